"""What a run says about itself: nanoorz/log.py."""

import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, config, jsonl, start_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from nanoorz import log as log_file
from nanoorz.ranks import UserError
from reward import ANSWER_FORMS, Problem
from rollout import Request, Sample


def sample(group=0, index=0, reward=0.0, length=3, reason="stop", **text_metrics) -> Sample:
    problem = Problem(10 + group, f"{group}+0", str(group), f"{group}+0=", [1, 2])
    request = Request(problem, group, index, seed=0, max_tokens=99, temperature=1.0, top_p=1.0)
    ids = list(range(1, length + 1))
    found = Sample(request, ids, [True] * length, parts=["text"], finish_reason=reason)
    found.reward, found.answer, found.text_metrics = reward, "17", text_metrics
    return found


def batch_of(samples: list) -> ppo.Batch:
    rewards = [sample.reward for sample in samples]
    cfg = SimpleNamespace(temperature=1.0)
    return ppo.make_batch(samples, torch.device("cpu"), cfg, rewards)


@pytest.fixture
def make_log(process_group):
    """make_log(folder, start=STEP, **flags): a RunLog of rank 0 of one, started if STEP is set."""
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    # It imports train.py here: accelerate must not find a stand-in for wandb.
    config()

    def make(folder, start=None, **flags) -> log_file.RunLog:
        log = log_file.RunLog(folder, config(**flags), tokenizer, ANSWER_FORMS)
        if start is not None:
            log.start(start, ROOT / "reward.py")
        return log

    return make


# ---- the numbers ---------------------------------------------------------------------------------


def test_a_phase_that_comes_twice_adds_up(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 15.0, 20.0])
    monkeypatch.setattr(log_file.time, "perf_counter", lambda: next(now))
    memory = iter([0.5, 0.25])
    monkeypatch.setattr(log_file, "memory_in_use", lambda: next(memory))
    clock = log_file.Clock()
    for _ in range(2):
        with clock("rollout"):
            pass
    expected = {"seconds_rollout": 2 + 5, "memory_rollout": max(0.5, 0.25)}
    expected |= {"seconds": 20, "tokens_per_second": 5}
    assert log_file.numbers_of_time(clock, 100) == expected


def test_only_an_error_of_memory_ends_with_advice_about_memory():
    with pytest.raises(torch.OutOfMemoryError) as error, log_file.Clock()("policy"):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
    (note,) = error.value.__notes__
    assert re.match(r"\d+\.\d GiB were in use in the phase policy; lower --packing_max_len", note)
    with pytest.raises(RuntimeError) as error, log_file.Clock()("policy"):
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (2)")
    assert not hasattr(error.value, "__notes__")


def test_numbers_of_samples_are_those_worked_by_hand():
    samples = [
        sample(0, 0, 1.0, length=2, words=4),
        sample(0, 1, 1.0, length=6, words=0),
        sample(1, 0, 0.0, length=8, words=2, reason="length"),
        sample(1, 1, 0.0, length=4, words=2),
    ]
    samples[3].answer = None
    # The first sample lacks this metric. The mean is over those that have it.
    samples[1].text_metrics["tries"] = 1
    samples[2].text_metrics["tries"] = 2
    # A text metric with the name of a number of the run.
    samples[2].text_metrics["step"] = 9
    batch = batch_of(samples)
    batch.rewards = torch.tensor([0.0, 0.5, 0.5, 0.5])
    expected = {"step": 7, "reward": 0.5, "paid": 0.375, "pass_at_n": 0.5, "truncated": 0.25}
    expected |= {"answered": 0.75}
    expected |= {"response_length": 5, "length_right_mean": 4, "length_wrong_mean": 6, "words": 2}
    expected |= {"total_length": 7, "tries": 1.5}
    assert log_file.numbers_of_samples(7, samples, batch) == expected
    line = log_file.numbers_of_samples(7, samples[3:], batch_of(samples[3:]))
    assert line["length_wrong_mean"] == 4 and "length_right_mean" not in line
    for k, x in enumerate(samples):
        x.rewards = {"right": x.reward, "short": k / 4}
    line = log_file.numbers_of_samples(7, samples, batch)
    assert line == expected | {"reward_right": 0.5, "reward_short": 0.375}
    line = log_file.numbers_of_evaluation(samples, n=2)
    assert (line["accuracy"], line["reward_short"]) == (0.5, 0.375)
    assert log_file.describe(samples[1], 1, "train")["rewards"] == {"right": 1.0, "short": 0.25}


def test_a_repeated_question_makes_no_evaluation_more_certain():
    rewards = [1.0, 0, 1, 1, 0, 0]
    samples = [sample(k // 2, k % 2, reward) for k, reward in enumerate(rewards)]
    once = log_file.numbers_of_evaluation(samples, 2)["stderr"]
    assert once == pytest.approx(np.std([0.5, 1, 0], ddof=1) / np.sqrt(3))
    assert log_file.numbers_of_evaluation(samples * 32, 2)["stderr"] == pytest.approx(once)
    assert log_file.numbers_of_evaluation(samples[:2] * 32, 2)["stderr"] == 0


# ---- the files and the lines ---------------------------------------------------------------------


def test_the_first_and_the_last_files_of_a_run(make_log, tmp_path, capsys):
    """A result.json says that a run is complete, so an old one goes when the run goes on. The code
    of the run's beginning stays, and a line tells what was edited since."""
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "code").mkdir()
    for name in ("ppo.py", "task.py"):
        (tmp_path / "code" / name).write_text("old")
    log = make_log(tmp_path, start=3, seed=3)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "code"}, "no curves"
    code = {path.name: path.read_text() for path in (tmp_path / "code").iterdir()}
    stages = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in log_file.STAGES}
    assert code == stages | {"ppo.py": "old", "task.py": "old"}
    told = f"WARNING: the run began with other texts of ppo.py, task.py; {tmp_path}/code has"
    assert capsys.readouterr().out.startswith(told)
    make_log(tmp_path, start=0)
    assert (tmp_path / "code" / "task.py").read_text() == stages["reward.py"]
    assert not capsys.readouterr().out
    log = make_log(tmp_path, start=3, seed=3)
    assert not capsys.readouterr().out
    written = json.loads((tmp_path / "config.json").read_text())
    facts = {"world": 1, "variants": [], "versions": log_file.versions()}
    assert written == vars(log.cfg) | facts and "torch" in facts["versions"]
    log.result(5)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 5 and 0 < result["wall_seconds"] < 1e6
    assert re.fullmatch("2 steps in .*\n", capsys.readouterr().out), "those of this start"


def test_other_ranks_write_nothing(make_log, monkeypatch, tmp_path):
    monkeypatch.setattr(log_file.dist, "get_rank", lambda: 1)
    log = make_log(tmp_path, start=0, log_with="tensorboard")
    log.step(1, [sample()], batch_of([sample()]), {}, log_file.Clock())
    log.evaluation("x", [sample()], 0)
    log.result(1)
    log.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("log_samples, first", [(0, 8), (1, 1), (5, 5), (256, 8)])
def test_a_step_is_a_line_with_all_its_numbers(
    make_log, tmp_path, capsys, monkeypatch, log_samples, first
):
    """The first --log_samples are written (0: all). --log_tokens or more are written by token:
    whole groups. Here the second group, because the rewards of the first group are equal."""
    log = make_log(tmp_path, log_samples=log_samples, log_tokens=2, generate_max_len=16)
    samples = [sample(k // 4, k % 4, reward=float(k > 5), length=1 + k) for k in range(8)]
    batch = batch_of(samples)
    for offset, name in enumerate(("values", "logprobs", "advantages")):
        batch.per_token[name] = torch.arange(36.0) + offset
    clock = log_file.Clock()
    clock.seconds = {"rollout": 0.05, "critic": 0.04, "policy": 1.0}
    clock.memory = dict.fromkeys(clock.seconds, 9.0)
    clock.numbers["reward_lost"] = 3
    monkeypatch.setattr(log_file.time, "perf_counter", lambda: clock.start + 2)
    log.step(7, samples, batch, {"policy_tokens": 30}, clock)
    (line,) = jsonl(tmp_path / "metrics.jsonl")
    numbers = {"step": 7, "reward": 0.25, "reward_lost": 3, "policy_tokens": 30}
    numbers |= {"seconds_policy": 1, "memory_policy": 9, "tokens_per_second": 26}
    assert line.items() >= numbers.items(), "26 = (8 prompts of 2 + 36) / 2 s"
    said = "step 7  reward 0.250  length 4.5  rollout 0.1  policy 1.0  2.0 s\n"
    assert capsys.readouterr().out == said
    lines = jsonl(tmp_path / "samples.jsonl")
    found = [(line["step"], line["paid"], line["problem"], "tokens" in line) for line in lines]
    written = sorted({*range(first), 4, 5, 6, 7})
    assert found == [(7, k > 5, 10 + k // 4, k > 3) for k in written]
    for k, line in zip(written[-4:], lines[-4:]):
        start = k * (k + 1) // 2
        values = [*range(start, start + k + 1)]
        assert line["values"] == values and line["logprobs"] == [x + 1 for x in values]
        assert line["tokens"] == [chr(x) for x in range(1, k + 2)], "in every process alike"


def test_an_evaluation_is_a_line_and_its_answers(make_log, tmp_path, capsys):
    log = make_log(tmp_path, eval_n=2)
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    samples = [sample(k // 2, k % 2, rewards[k], 2 + k) for k in range(6)]
    samples[3].finish_reason = "length"
    log.evaluation("aime", samples, 7)
    expected = {"step": 7, "set": "aime", "problems": 3, "n": 2, "accuracy": 0.5}
    expected |= {"pass@2": 2 / 3, "stderr": np.std([0.5, 1, 0], ddof=1) / np.sqrt(3)}
    expected |= {"length": 4.5, "truncated": 1 / 6}
    assert jsonl(tmp_path / "eval.jsonl") == [pytest.approx(expected)]
    answers = jsonl(tmp_path / "eval_samples.jsonl")
    assert [answer["reward"] for answer in answers] == rewards
    first = {"step": 7, "set": "aime", "problem": 10, "question": "0+0", "label": "0", "index": 0}
    first |= {"response": "text", "reward": 1.0, "finish_reason": "stop", "length": 2}
    assert answers[0] == first
    assert re.match("step 7  aime: .*accuracy 0.500 .*pass@2 0.667 ", capsys.readouterr().out)


def test_numbers_of_numpy_and_labels_of_any_kind_are_written(make_log, tmp_path):
    """A float32 of a user's text_metrics, or a set as a label, ended the run in phase 9 once."""
    log = make_log(tmp_path)
    labels = ["1", Fraction(1, 2), {"a": {1}}, np.float32(0.5)]
    samples = [sample(k, words=np.float32(k)) for k in range(4)]
    for one, label in zip(samples, labels):
        one.request = replace(one.request, problem=replace(one.request.problem, label=label))
    added = {"mine": np.float32(0.5), "two": torch.tensor(2)}
    log.cfg.metrics = lambda line, samples, batch: line | added
    log.step(1, samples, batch_of(samples), {}, log_file.Clock())
    (line,) = jsonl(tmp_path / "metrics.jsonl")
    assert (line["words"], line["mine"], line["two"]) == (1.5, 0.5, 2)
    found = [line["label"] for line in jsonl(tmp_path / "samples.jsonl")]
    assert found == ["1", "Fraction(1, 2)", {"a": "{1}"}, 0.5]


WITHOUT_READER = """
import sys
from nanoorz.ranks import print0, start_distributed
start_distributed()
print0("ready")
sys.stdin.readline()
print0("nobody can read this")
open(sys.argv[1], "w").close()
"""


def test_a_run_outlives_the_reader_of_its_output(tmp_path):
    """`tee` in a pipe ends at the Ctrl-C that the run gets too. The run has to save after it."""
    run = start_python("-c", WITHOUT_READER, tmp_path / "saved", stdin=-1)
    assert run.stdout.readline() == "ready\n"
    run.stdout.close()
    run.stdin.write("go on\n")
    run.stdin.close()
    run.wait(60)
    assert (tmp_path / "saved").exists()


# ---- one warning about answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, told",
    [
        ("the answer is {k}.", r"; these are the ends of three responses: .* 0\..* 2\..* 4\."),
        ("so it is \\boxed{{{k}}}.", "; 8 have one in another form: add --answer_form boxed_an"),
    ],
)
def test_answers_of_another_form_are_said_once(make_log, tmp_path, capsys, text, told):
    """The first evaluation or step shows a wrong flag. Rewards stay 0 then."""
    samples = [sample(k, reason="length" if k == 7 else "stop") for k in range(8)]
    for k, one in enumerate(samples):
        one.parts, one.answer = ["x" * 999 + text.format(k=k)], None
    first = "WARNING: --task math finds an answer in 0 of 8 responses, in the form hashes; 1 reach "
    log = make_log(tmp_path, answer_form="hashes")
    log.evaluation("aime", samples, 0)
    warning, line = capsys.readouterr().out.splitlines()
    assert warning.startswith(first) and re.search(told, warning) and len(warning) < 1200
    log.step(1, samples, batch_of(samples), {}, log_file.Clock())
    assert "WARNING" not in capsys.readouterr().out, "once"
    # A task may give rewards without answers.
    samples[3].reward = 0.5
    log = make_log(tmp_path, answer_form="hashes")
    log.step(1, samples, batch_of(samples), {}, log_file.Clock())
    assert "WARNING" not in capsys.readouterr().out


# ---- curves elsewhere ----------------------------------------------------------------------------


def test_a_resumed_curve_has_each_step_once(make_log, tmp_path):
    """The evaluation of step 2 was the last of the first start. Step 3 was not saved."""
    samples = [sample(), sample(1)]
    for begin, end in ((0, 3), (2, 4)):
        log = make_log(tmp_path, start=begin, log_with="tensorboard", eval_n=1)
        for step in range(begin, end + 1):
            if step > begin:
                log.step(step, samples, batch_of(samples), {}, log_file.Clock())
            if step != 3 and not log.has_evaluation("aime", step):
                log.evaluation("aime", samples, step)
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("aime/accuracy")] == [0, 1, 2, 4]


def test_a_tracker_that_fails_is_a_warning(make_log, tmp_path, monkeypatch, capsys):
    """At its start, at a point, or at its end."""
    for name in ("__init__", "add", "close"):

        class Failing(log_file.TensorBoard):
            pass

        def fail(*_):
            raise OSError("No space left on device")

        setattr(Failing, name, fail)
        monkeypatch.setitem(log_file.TRACKERS, "tensorboard", Failing)
        log = make_log(tmp_path, start=0, log_with="tensorboard")
        for step in (1, 2):
            log.step(step, [sample()], batch_of([sample()]), {}, log_file.Clock())
        log.close()
        told = "WARNING: --log_with tensorboard has failed and gets no more numbers: No space left"
        assert capsys.readouterr().out.count(told) == 1
    assert len(jsonl(tmp_path / "metrics.jsonl")) == 6


class Wandb:
    """A stand-in for the package, which the tests do not install."""

    def __init__(self):
        self.UsageError = type("UsageError", (Exception,), {})
        self.ids = []
        self.has_key = True

    def login(self, verify):
        if not self.has_key:
            raise self.UsageError("No API key configured")

    def init(self, project, id, resume, **_):
        self.ids.append((project, id, resume))
        return mock.Mock()


def test_a_resumed_run_goes_on_with_its_id_of_wandb(make_log, tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    for folder, start in (("a", 0), ("a", 2), ("b", 0)):
        make_log(tmp_path / folder, start=start, log_with="wandb").close()
    (one, a, _), again, (_, b, resume) = wandb.ids
    assert again == (one, a, resume) == ("nanoorz", a, "allow") and a != b
    wandb.has_key = False
    # Before the engines start.
    with pytest.raises(UserError, match="^--log_with wandb: No API key configured$"):
        make_log(tmp_path / "a", log_with="wandb")
