"""Whole runs whose task replies, and who gave an answer: policy or tool.

test_rollout.py has how the sampler draws turns, and test_ppo.py what is learnt from them.
"""

import fcntl
import json
import re
import shutil
from types import SimpleNamespace

import conftest
import pytest
from conftest import config, equal_runs, jsonl, launch

import reward
import rollout
import train
from rollout import Sample
from tasks import calculator

TASK = """
import signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from reward import *

STOP = ["3", "4", "5"]


def finished_steps():
    run = Path(sys.argv[sys.argv.index("--run_dir") + 1])
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def reply(text, finish_reason, label):
    {body}
"""
CALLS = 'return "1+" if text[-1:] in "345" and text.count("1+") < 3 else None'
RAISES = f"""if finished_steps() == 2:
        raise ValueError("the tool is gone")
    {CALLS}"""
# A launcher would send this signal when the time of a job is over. A pool has a process by then.
WAITS = f"""global pool
    if finished_steps() == 2:
        pool = ProcessPoolExecutor(1)
        pool.submit(abs, 1).result()
        signal.raise_signal(signal.SIGTERM)
        return pool.submit(time.sleep, 9999)
    {CALLS}"""


def write_task(folder, body):
    path = folder / "mine.py"
    path.write_text(TASK.format(body=body))
    return path


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """(its flags, the folder of a run with replies). The log-probs of the sampler are compared."""
    folder = tmp_path_factory.mktemp("turns")
    flags = tiny | {"task": write_task(folder, CALLS), "stop": None, "variant": "log_ratio"}
    flags |= {"save_interval": 1, "keep_last": 0, "eval_interval": 2, "lambd": 0.9, "gamma": 0.99}
    launch(folder / "run", **flags)
    return flags, folder / "run"


@pytest.mark.engine
def test_a_run_learns_from_what_the_policy_has_drawn(whole):
    """The ratio compares sampler and trainer in all turns: a wrong id or a wrong place shows."""
    flags, run = whole
    for line in jsonl(run / "metrics.jsonl"):
        assert abs(line["ratio"] - 1) < 1e-4
        assert line["turns"] > 1
        # A reply has two tokens.
        assert line["reply_length"] == pytest.approx(2 * (line["turns"] - 1))
        lengths = line["response_length"] * 16, line["drawn_tokens"]
        assert lengths[0] == pytest.approx(lengths[1])
    found = [line for line in jsonl(run / "samples.jsonl") if "parts" in line]
    detailed = [line for line in found if "tokens" in line]
    assert found and detailed
    for line in found:
        assert "".join(line["parts"]) == line["response"]
        assert set(line["parts"][1::2]) == {"1+"}
    for line in detailed:
        assert len(line["tokens"]) == len(line["drawn"])
        assert sum(line["drawn"]) == line["length"]
        assert line["drawn"].count(False) == len(line["parts"]) - 1
        for name in ("values", "advantages", "logprobs"):
            assert len(line[name]) == sum(line["drawn"])
    assert not any("drawn" in x for x in jsonl(run / "samples.jsonl") if "parts" not in x)
    assert json.loads((run / "config.json").read_text())["stop"] == ["3", "4", "5"]


@pytest.mark.engine
def test_a_run_with_replies_resumes_to_the_bit(whole, tmp_path):
    flags, run = whole
    parts = shutil.copytree(run, tmp_path / "parts")
    for name in ("step_000002", "step_000003"):
        shutil.rmtree(parts / name)
    assert "from step 1," in launch(parts, **flags).stdout
    equal_runs(run, parts)


@pytest.mark.engine
def test_two_ranks_draw_the_conversations_of_one_rank(whole, tmp_path):
    flags, run = whole
    launch(tmp_path / "two", ranks=2, **flags | {"max_steps": 1})
    one, two = (jsonl(x / "samples.jsonl") for x in (run, tmp_path / "two"))
    names = ("problem", "index", "response", "parts", "reward")
    assert [[x.get(name) for name in names] for x in two] == [
        [x.get(name) for name in names] for x in one if x["step"] == 1
    ]


@pytest.mark.engine
def test_a_reply_that_fails_on_a_rank_ends_the_run_and_loses_no_step(tiny, tmp_path):
    task = write_task(tmp_path, RAISES)
    done = launch(tmp_path / "run", ranks=2, code=1, **tiny | {"stop": None}, task=task)
    line = (
        TASK.format(body=RAISES).splitlines().index('        raise ValueError("the tool is gone")')
    )
    assert f'File "{task}", line {line + 1}, in reply' in done.stderr
    assert "stopped; --resume auto goes on from step 2\n" in done.stdout
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000002"]


@pytest.mark.slow
def test_a_reply_that_fails_ends_both_ranks_of_a_shared_sampler(tiny, shared_memory, tmp_path):
    """Only the first rank asks. Without it the other one would wait in the next decode."""
    task = write_task(tmp_path, RAISES)
    flags = tiny | {"stop": None, "tensor_parallel": 2}
    done = launch(tmp_path / "run", ranks=2, code=1, **flags, task=task)
    assert "ValueError: the tool is gone" in done.stderr
    assert "stopped; --resume auto goes on from step 2\n" in done.stdout


@pytest.mark.engine
def test_a_signal_ends_a_run_that_waits_for_a_reply(tiny, tmp_path):
    """No reply ever comes. The pool's process would keep the lock of the folder, and a pipe open
    to which the run writes."""
    task = write_task(tmp_path, WAITS)
    done = launch(tmp_path / "run", **tiny | {"stop": None}, task=task)
    assert "stopped; --resume auto goes on from step 2" in done.stdout
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- whose answer is it? -------------------------------------------------------------------------

BOX = "<answer>\\boxed{18}</answer>"


@pytest.mark.parametrize(
    "parts, grades_replies, is_right",
    [
        ([BOX], False, True),
        (["What is it? ", BOX, ""], False, False),  # the tool has printed the answer
        (["What is it? ", BOX, ""], True, True),  # and the task says that this counts
        (["<answer>\\boxed{", "18", "}</answer>"], False, False),  # a part of the answer
        (["6*3=", "18", f" so {BOX}"], False, True),
        ([BOX, " Is that so?", " Yes."], False, True),
        ([BOX, "<answer>\\boxed{19}</answer>", " No."], False, True),
        (["<answer>\\boxed{1", " and ", "8}</answer>"], False, False),  # a reply divides a number
    ],
)
def test_an_answer_of_a_reply_is_not_the_policy_s(parts, grades_replies, is_right):
    names = {"Grader": reward.Grader, "text_metrics": reward.text_metrics}
    task = SimpleNamespace(GRADES_REPLIES=grades_replies, **names)
    assert reward_of(task, "18", parts) == is_right


def reward_of(task, label, parts) -> float:
    """What the grader of a task gives to a response that has stopped by itself."""
    request = rollout.Request(reward.Problem(0, "", label, ""), 0, 0, 0, 9, 1.0, 1.0)
    sample = Sample(request, [1] * 9, parts=parts, finish_reason="stop")
    with task.Grader() as grader:
        one = SimpleNamespace(task=task, grader=grader)
        rollout.Rollout.submit(one, 0, sample)
        rollout.Rollout.take_rewards(one, {0: sample})
    return sample.reward


def test_the_page_s_task_looks_words_up(tmp_path, monkeypatch):
    page = (conftest.ROOT / "docs" / "change.md").read_text()
    path = tmp_path / "my_tool.py"
    path.write_text(re.search(r"^```python\n# tool\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    (tmp_path / "words.json").write_text('{"tree": "a plant"}')
    monkeypatch.chdir(tmp_path)
    task = train.load_task(config(task=path))
    reply = config().reply_function(task)
    assert reply("What is it? <look_up>tree</look_up>", "stop", "") == "a plant"
    assert reply("<look_up>tree</look_up>a plant <look_up>house</look_up>", "stop", "") == "unknown"
    assert reply("<answer>\\boxed{1}</answer>", "stop", "") is None


# ---- flags ---------------------------------------------------------------------------------------


def test_a_task_that_replies_names_its_stop_texts(tmp_path, monkeypatch, process_group, tiny):
    """With ORZ's stop texts a turn would never end at the tool's, and nothing would say so."""

    def stops(task, **flags):
        cfg = config(task=task, model=tiny["model"], **{"stop": None} | flags)
        train.load_task(cfg)
        return cfg.stop

    assert stops("calculator") == ["="] and stops("python_tool") == ["```output", "</answer>"]
    assert stops("math") == train.ORZ_STOP
    assert stops("calculator", stop="a") == ["a"] and stops("calculator", stop="") == []
    path = tmp_path / "mine.py"
    text = TASK.format(body="return None")
    path.write_text(text.replace('["3", "4", "5"]', "[]"))
    assert stops(path) == []
    path.write_text(text.replace("STOP = ", "other = "))
    with pytest.raises(
        train.UserError, match="has `reply` and no STOP, the list of texts that end a turn$"
    ):
        stops(path)


def test_a_recipe_may_bring_its_own_reply(tmp_path, process_group):
    """A variant's function comes in place of the task's, or calls it."""
    (tmp_path / "hint.py").write_text(
        "import ppo\n\n\nclass Hint(ppo.Recipe):\n"
        "    def reply_function(self, task):\n        return self._hint\n\n"
        "    def _hint(self, text, finish_reason, label):\n        return 'hm'\n"
    )
    cfg = config(variant=tmp_path / "hint.py")
    assert cfg.reply_function(calculator)("", "stop", {}) == "hm"
    assert config().reply_function(calculator) is calculator.reply
    assert config().reply_function(reward) is None
