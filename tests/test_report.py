"""What a run says about itself: lib/metrics.py and lib/report.py, also on a disk that is full."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import jsonl, launch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
import train
from lib import metrics, report
from reward import Problem
from rollout import Request, Sample


def sample(group=0, index=0, reward=0.0, length=3, reason="stop", **text_metrics) -> Sample:
    problem = Problem(10 + group, f"{group}+0", str(group), f"{group}+0=", [1, 2])
    request = Request(problem, group, index, seed=0, max_tokens=99, temperature=1.0, top_p=1.0)
    ids = list(range(1, length + 1))
    return Sample(request, ids, None, "text", reason, reward, "17", text_metrics)


def batch_of(samples: list) -> ppo.Batch:
    rewards = [sample.reward for sample in samples]
    return ppo.make_batch(samples, torch.device("cpu"), None, rewards)


# ---- lib/metrics.py ------------------------------------------------------------------------------


def test_a_phase_that_comes_twice_adds_up(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    memory = iter([2.0, 1.0])
    monkeypatch.setattr(metrics, "memory_in_use", lambda: next(memory))
    clock = metrics.Clock(4)
    for _ in range(2):
        with clock("rollout"):
            pass
    assert clock.seconds == {"rollout": 2 + 5}
    assert clock.memory == {"rollout": 2.0}, "the most"


def test_memory_is_what_is_in_use_on_the_device(monkeypatch):
    """torch's allocator counts a sleeping sampler's memory, which is not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    assert metrics.memory_in_use() == 50


def test_an_error_says_its_phase():
    with pytest.raises(FloatingPointError) as error, metrics.Clock(4)("policy"):
        raise FloatingPointError("policy: the gradient is not finite")
    note, memory = error.value.__notes__
    assert note.startswith("in phase policy of step 4; ")
    assert re.fullmatch(r"\d+\.\d GiB are in use", memory)
    with pytest.raises(RuntimeError) as error, metrics.Clock(4)("sync"):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    note, _ = error.value.__notes__
    assert "memory ran out, lower --packing_max_len or --gpu_memory_utilization" in note
    with pytest.raises(KeyError) as error, metrics.Clock(4)("sync"):
        raise KeyError("a bug")
    assert not hasattr(error.value, "__notes__"), "a bug is not explained away"


def test_numbers_of_samples():
    samples = [
        sample(0, 0, 1.0, length=2, words=4),
        sample(0, 1, 0.0, length=8, words=0, reason="length"),
        sample(1, 0, 0.0, length=3, words=2),
        sample(1, 1, 0.0, length=7, words=2),
    ]
    batch = batch_of(samples)
    batch.rewards = torch.tensor([0.0, 0.5, 0.5, 0.5])
    line = metrics.of_samples(samples, batch, 8)
    assert (line["reward"], line["pass_at_n"], line["truncated"]) == (0.25, 0.5, 0.25)
    assert line["paid"] == 0.375, "what is learnt from may be something else"
    assert (line["response_length"], line["total_length"], line["words"]) == (5, 7, 2)
    assert (line["length_right_mean"], line["length_right_std"]) == (2, 0)
    assert line["length_wrong_mean"] == 6
    assert line["length_wrong_std"] == pytest.approx(np.std([8, 3, 7]))
    # 16 bins of half a token; the last one has its upper end too.
    assert [k for k, count in enumerate(line["length_right_histogram"]) if count] == [4]
    assert [k for k, count in enumerate(line["length_wrong_histogram"]) if count] == [6, 14, 15]


def test_pass_at_n_is_the_share_of_problems_with_a_right_answer():
    samples = [sample(0, k, 1.0) for k in range(3)] + [sample(1, k) for k in range(3)]
    assert metrics.of_samples(samples, batch_of(samples), 8)["pass_at_n"] == 0.5


def test_no_right_answer_has_no_mean_length():
    samples = [sample(), sample()]
    line = metrics.of_samples(samples, batch_of(samples), 8)
    assert "length_right_mean" not in line
    assert line["length_right_histogram"] == [0] * 16


def test_rates_of_a_step(monkeypatch):
    clock = metrics.Clock(4)
    clock.seconds = {"rollout": 1.0, "critic": 1.5, "policy": 0.5}
    clock.memory = {"rollout": 7.0, "critic": 8.0, "policy": 9.0}
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock.start + 4)
    line = metrics.of_time(clock, 100)
    assert (line["seconds"], line["tokens_per_second"]) == (4, 25)
    assert (line["seconds_rollout"], line["memory_policy"]) == (1, 9)


def test_numbers_of_an_evaluation():
    samples = [
        sample(0, 0, 1.0, length=2),
        sample(0, 1, 0.0, length=4),
        sample(1, 0, 1.0, length=6),
        sample(1, 1, 1.0, length=8, reason="length"),
        sample(2, 0, 0.0, length=5),
        sample(2, 1, 0.0, length=5),
    ]
    line = metrics.of_evaluation(samples, 2)
    assert (line["problems"], line["n"], line["accuracy"]) == (3, 2, 0.5)
    assert line["stderr"] == pytest.approx(np.std([0.5, 1, 0], ddof=1) / np.sqrt(3))
    assert (line["length"], line["truncated"]) == (5, pytest.approx(1 / 6))
    assert line["pass@1"] == pytest.approx(0.5) and line["pass@2"] == pytest.approx(2 / 3)


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    right = np.array([0, 1, 3, 6])
    got = metrics.pass_rates(right, 6)
    assert list(got) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        draws = []
        for count in right:
            for draw in itertools.combinations(range(6), k):
                draws.append(any(position < count for position in draw))
        assert got[f"pass@{k}"] == pytest.approx(np.mean(draws))


# ---- lib/report.py -------------------------------------------------------------------------------


def test_a_changed_file_shows_in_what_made_the_run(tmp_path, monkeypatch):
    # A hook that runs the tests sets some of these.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "report.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    assert re.fullmatch("[0-9a-f]{40}", report.versions()["git_commit"])
    (tmp_path / "report.py").write_bytes(b"\xe4")
    assert re.fullmatch("[0-9a-f]{40}-dirty", report.versions()["git_commit"])


def test_without_git_a_run_says_its_libraries(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "git_commit" not in report.versions()
    assert report.versions()["torch"] == torch.__version__


@pytest.fixture
def make_log(process_group):
    """make_log(folder, **flags): a RunLog of rank 0 of one."""
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))

    def make(folder, **flags) -> report.RunLog:
        return report.RunLog(folder, train.Config(**flags), tokenizer)

    return make


def test_a_resumed_run_s_curve_has_each_step_once(make_log, tmp_path):
    """What came after the checkpoint is made again, and the old points would stay beside it."""
    for start, last in ((0, 3), (2, 4)):
        log = make_log(tmp_path)
        log.tracker = report.make_tracker(log.cfg, tmp_path, start)
        for step in range(start + 1, last + 1):
            log.track({"reward": start}, step)
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward")]
    assert points == [(1, 0), (2, 0), (3, 2), (4, 2)]


def test_other_ranks_write_nothing(make_log, monkeypatch, tmp_path):
    monkeypatch.setattr(report.dist, "get_rank", lambda: 1)
    log = make_log(tmp_path, eval_data=["x"])
    log.start(None, "")
    log.step(1, [sample()], batch_of([sample()]), {}, metrics.Clock(4))
    log.evaluation("x", [sample()], 0)
    log.result(1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_the_first_lines_of_a_run(make_log, tmp_path, capsys):
    """An old result.json speaks of a run that goes on now."""
    (tmp_path / "result.json").write_text("{}")
    log = make_log(tmp_path, log_with="none")
    state = SimpleNamespace(step=3, total_steps=9, world=2, variants={})
    log.start(state, "what check_sampler found")
    assert not (tmp_path / "result.json").exists()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.items() >= vars(log.cfg).items()
    assert written["world"] == 2 and "torch" in written["versions"]
    said = capsys.readouterr().out
    assert "what check_sampler found" in said and "step" in said


@pytest.fixture
def tiny_disk(tmp_path):
    """A tmpfs of 64 KB, where the machine lets us mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk) -> None:
    # The tracker's thread may take the last bytes meanwhile.
    with contextlib.suppress(OSError):
        (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)


def test_a_full_disk_costs_no_line(make_log, tiny_disk, capsys):
    log = make_log(tiny_disk)
    lines = [{"step": k, "text": "x" * 9000} for k in range(12)]
    for k in range(0, 12, 3):
        log.append("samples.jsonl", lines[k : k + 3])
    assert "wait" in capsys.readouterr().err
    kept = (tiny_disk / "samples.jsonl").read_text()
    assert kept.endswith("\n"), "no half line"
    subprocess.run(["mount", "-o", "remount,size=1m", str(tiny_disk)], check=True)
    log.append("samples.jsonl", [])
    assert jsonl(tiny_disk / "samples.jsonl") == lines


DEAD_THREAD = "ignore::pytest.PytestUnhandledThreadExceptionWarning"


@pytest.mark.filterwarnings(DEAD_THREAD)
def test_a_full_disk_ends_the_tracker_and_not_the_run(make_log, tiny_disk, capsys):
    """TensorBoard's thread dies of it, and from then on each call raises."""
    log = make_log(tiny_disk)
    log.tracker = report.make_tracker(log.cfg, tiny_disk, 0)
    fill(tiny_disk)
    many = {f"number_{k}": 0.5 for k in range(99)}
    for step in range(1000):
        log.track(many, step)
    assert log.tracker is None
    assert capsys.readouterr().err.count("no more events") == 1
    log.close()


def test_half_a_result_is_never_written(make_log, tiny_disk):
    """It would look like the end of a run."""
    fill(tiny_disk)
    with pytest.raises(OSError):
        make_log(tiny_disk).write("result.json", {"steps": "9" * 9999})
    assert not (tiny_disk / "result.json").exists()


@pytest.mark.filterwarnings(DEAD_THREAD)
def test_a_tracker_that_cannot_finish_does_not_spoil_the_exit_code(make_log, tiny_disk):
    log = make_log(tiny_disk)
    log.tracker = report.make_tracker(log.cfg, tiny_disk, 0)
    log.track({f"name{k}": 0.5 for k in range(99)}, 1)
    fill(tiny_disk)
    # Its thread may be dead already.
    with contextlib.suppress(OSError):
        log.tracker.add_text("long", "x" * 99_999)
    log.close()


def test_a_step_is_a_line_with_all_its_numbers(make_log, tmp_path, capsys):
    flags = {"generate_max_len": 16, "max_len": 64}
    log = make_log(tmp_path, critic_updates=4, log_tokens=0, **flags)
    samples = [sample(0, k, reward=float(k)) for k in range(2)]
    learned = {"policy_tokens": 30, "critic_tokens": 20}
    clock = metrics.Clock(4)
    for phase in ("critic", "policy"):
        with clock(phase):
            pass
    clock.numbers["reward_lost"] = 3
    log.step(1, samples, batch_of(samples), learned, clock)
    log.step(2, samples, batch_of(samples), learned, clock)
    one, two = jsonl(tmp_path / "metrics.jsonl")
    assert one["step"] == 1 and one["reward"] == 0.5 and one["reward_lost"] == 3
    assert one.items() >= learned.items()
    assert two["step"] == 2 and {"seconds_policy", "memory_policy"} <= one.keys()
    assert one["length_right_histogram"].index(1) == 3, "16 bins of one token"
    assert len(jsonl(tmp_path / "samples.jsonl")) == 4
    assert "step 2  reward 0.500  length 3.0" in capsys.readouterr().out


def test_a_form_that_no_response_meets_is_said_once_with_three_of_them(make_log, tmp_path, capsys):
    """At the first step, where a wrong --answer_form, --template or --stop shows.

    Rewards stay 0 for ever then, and nothing else says why."""
    log = make_log(tmp_path, task="math", answer_form="hashes", n_samples_per_prompt=1)
    for step, reward, answered in ((1, 0, False), (2, 0, False), (1, 0, True), (1, 1, False)):
        samples = [sample(k, reward=reward) for k in range(4)]
        for k, drawn in enumerate(samples):
            drawn.text = "x" * 999 + f"the answer is {k}."
            drawn.answer = "3" if answered and k == 3 else None
        log.step(step, samples, batch_of(samples), {}, metrics.Clock(step))
        said = capsys.readouterr().err
        if (step, reward, answered) == (1, 0, False):
            (line,) = said.splitlines()
            assert line.startswith("WARNING: no response has an answer in the form of --task math")
            assert "--answer_form hashes" in line
            assert all((f"the answer is {k}." in line) == (k < 3) for k in range(4))
            assert len(line) < 1200
        else:
            assert not said
    shares = [line.get("answered") for line in jsonl(tmp_path / "metrics.jsonl")]
    assert shares == [0, 0, 0.25, 0]


@pytest.mark.parametrize("log_samples, written", [(0, 8), (1, 1), (5, 5), (256, 8)])
def test_log_samples_is_how_many_of_a_step_are_written(make_log, tmp_path, log_samples, written):
    """The first ones of the step; 0 is all of them."""
    log = make_log(tmp_path, log_samples=log_samples, log_tokens=2)
    samples = [sample(k // 4, k % 4) for k in range(8)]
    lines = log.sample_lines(samples, 3, batch_of(samples))
    places = [(line["problem"], line["index"]) for line in lines]
    assert places == [(10 + k // 4, k % 4) for k in range(written)]
    with_tokens = ["tokens" in line for line in lines]
    assert with_tokens == [k < 2 for k in range(written)], "--log_tokens"
    assert [line["paid"] for line in lines] == [0.0] * written


def test_a_sample_is_written_token_by_token(make_log, tmp_path):
    log = make_log(tmp_path)
    samples = [sample(length=2), sample(index=1, length=3)]
    batch = batch_of(samples)
    batch.per_token["values"] = torch.tensor([9, 9, 1, 2, 3.5])
    line = log.sample_lines(samples, 3, batch)[1]
    assert line["tokens"] == ["\x01", "\x02", "\x03"]
    assert line["values"] == [1, 2, 3.5]
    assert "logprobs" not in line
    for name in ("logprobs", "advantages"):
        batch.per_token[name] = torch.zeros(5)
    line = log.sample_lines(samples, 3, batch)[0]
    assert list(line)[-3:] == ["values", "logprobs", "advantages"], "in every process alike"


def test_an_evaluation_is_a_line_and_its_answers(make_log, tmp_path, capsys):
    log = make_log(tmp_path, eval_n=2)
    log.evaluation("aime", [sample(0, 0, 1.0), sample(0, 1, 0.0)], 7)
    (line,) = jsonl(tmp_path / "eval.jsonl")
    assert (line["step"], line["set"], line["accuracy"], line["pass@2"]) == (7, "aime", 0.5, 1.0)
    answers = jsonl(tmp_path / "eval_samples.jsonl")
    assert [answer["reward"] for answer in answers] == [1, 0]
    assert answers[0] == {
        "step": 7,
        "set": "aime",
        "problem": 10,
        "question": "0+0",
        "label": "0",
        "index": 0,
        "response": "text",
        "reward": 1.0,
        "finish_reason": "stop",
        "length": 3,
    }
    said = capsys.readouterr().out
    assert said.startswith("step 7  aime:") and "accuracy 0.500" in said and "pass@2 1.000" in said


def test_the_result_says_that_a_run_is_complete(make_log, tmp_path, capsys):
    make_log(tmp_path, seed=3).result(5)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["seed"]) == (5, 3)
    assert result["wall_seconds"] > 0
    assert capsys.readouterr().out.startswith("5 steps in ")


def test_weights_and_biases(tiny, tmp_path):
    """A run without network keeps its numbers; one that is not logged in says so."""
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    flags = tiny | {"max_steps": 1, "log_with": "wandb"}
    anonymous = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    done = launch(run, **flags, check=False, env=anonymous)
    assert done.returncode != 0 and "API key" in done.stderr
    launch(run, **flags, env={"WANDB_MODE": "offline"})
    (kept,) = run.glob("wandb/offline-run-*/*.wandb")
    assert all(name in kept.read_bytes() for name in (b"policy_grad_norm", b"actor_learning_rate"))
