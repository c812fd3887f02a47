"""What a run says about itself: nanoorz/log.py, also on a disk that is full."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import config, jsonl, run_python, start_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from nanoorz import log as log_file
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


# ---- the numbers ---------------------------------------------------------------------------------


def test_a_phase_that_comes_twice_adds_up(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 15.0, 20.0])
    monkeypatch.setattr(log_file.time, "perf_counter", lambda: next(now))
    memory = iter([0.5, 0.25])
    monkeypatch.setattr(log_file, "memory_in_use", lambda: next(memory))
    clock = log_file.Clock(4)
    for _ in range(2):
        with clock("rollout"):
            pass
    expected = {"seconds_rollout": 2 + 5, "memory_rollout": max(0.5, 0.25)}
    expected |= {"seconds": 20, "tokens_per_second": 5}
    assert log_file.numbers_of_time(clock, 100) == expected


def test_memory_is_what_is_in_use_on_the_device(monkeypatch):
    gib = psutil.Process().memory_info().rss / 2**30
    assert log_file.memory_in_use() == pytest.approx(gib, 0.1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    assert log_file.memory_in_use() == 50


def test_memory_and_non_finite_errors_say_their_phase_and_a_bug_does_not():
    advice = {FloatingPointError: "a learning rate may be too high"}
    advice[torch.cuda.OutOfMemoryError] = "lower --packing_max_len or "
    for kind in advice:
        with pytest.raises(kind) as error, log_file.Clock(4)("policy"):
            raise kind("the gradient is not finite")
        (note,) = error.value.__notes__
        told = rf"in phase policy of step 4, with \d+\.\d GiB in use; {advice[kind]}"
        assert re.match(told, note)
    with pytest.raises(KeyError) as error, log_file.Clock(4)("sync"):
        raise KeyError("a bug")
    assert not hasattr(error.value, "__notes__"), "a bug is not explained away"


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
    batch = batch_of(samples)
    batch.rewards = torch.tensor([0.0, 0.5, 0.5, 0.5])
    expected = {"reward": 0.5, "paid": 0.375, "pass_at_n": 0.5, "truncated": 0.25, "answered": 0.75}
    expected |= {"response_length": 5, "length_right_mean": 4, "length_wrong_mean": 6, "words": 2}
    expected |= {"total_length": 7, "tries": 1.5}
    assert log_file.numbers_of_samples(samples, batch) == expected
    line = log_file.numbers_of_samples(samples[3:], batch_of(samples[3:]))
    assert line["length_wrong_mean"] == 4 and "length_right_mean" not in line
    for k, x in enumerate(samples):
        x.rewards = {"right": x.reward, "short": k / 4}
    line = log_file.numbers_of_samples(samples, batch)
    assert line == expected | {"reward_right": 0.5, "reward_short": 0.375}
    line = log_file.numbers_of_evaluation(samples, n=2)
    assert (line["accuracy"], line["reward_short"]) == (0.5, 0.375)
    assert log_file.describe(samples[1], 1, "train")["rewards"] == {"right": 1.0, "short": 0.25}


# ---- the screen and the files --------------------------------------------------------------------


def test_a_run_says_its_libraries_and_its_commit(tmp_path, monkeypatch):
    """The commit ends in -dirty where a file was edited. Without git it is left out."""
    # A hook that runs the tests sets some of these.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "log.py").write_text("")
    git = "git -c user.name=a -c user.email=a@b -c commit.gpgsign=false"
    command = f"git init -q && git add . && {git} commit -qm x"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(log_file, "__file__", str(tmp_path / "log.py"))
    assert re.fullmatch("[0-9a-f]{40}", log_file.versions()["git_commit"])
    (tmp_path / "log.py").write_bytes(b"\xe4")
    assert re.fullmatch("[0-9a-f]{40}-dirty", log_file.versions()["git_commit"])
    monkeypatch.setenv("PATH", "")
    assert "git_commit" not in log_file.versions()
    # PyPI's build for CUDA calls itself 2.13.0+cu130, and its package has the version 2.13.0.
    assert torch.__version__.startswith(log_file.versions()["torch"])


@pytest.fixture
def make_log(process_group):
    """make_log(folder, start=STEP, **flags): a RunLog of rank 0 of one, started if STEP is set."""
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    # It imports train.py here: accelerate must not find a stand-in for wandb.
    config()

    def make(folder, start=None, **flags) -> log_file.RunLog:
        log = log_file.RunLog(folder, config(**flags), tokenizer, ANSWER_FORMS)
        if start is not None:
            log.start(SimpleNamespace(step=start, world=2, variants={}), "GAP", b"x = 1")
        return log

    return make


def test_a_resumed_run_s_curve_has_each_step_once(make_log, tmp_path, monkeypatch):
    """Points behind the checkpoint are made again. Weights & Biases copies TensorBoard's curves."""
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for begin, end, log_with in ((0, 3, "tensorboard"), (2, 4, "wandb")):
        log = make_log(tmp_path, start=begin, log_with=log_with)
        for step in range(begin + 1, end + 1):
            log.tracker.add({"reward": begin}, step)
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/reward")]
    assert points == [(1, 0), (2, 0), (3, 2), (4, 2)]
    (begun, _, options), end = wandb.method_calls
    assert (begun, end) == ("init", mock.call.finish())
    assert (options["name"], options["sync_tensorboard"]) == (tmp_path.name, True)


def test_other_ranks_write_nothing(make_log, monkeypatch, tmp_path):
    monkeypatch.setattr(log_file.dist, "get_rank", lambda: 1)
    log = make_log(tmp_path, start=0)
    log.step(1, [sample()], batch_of([sample()]), {}, log_file.Clock(4))
    log.evaluation("x", [sample()], 0)
    log.result(1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_the_first_and_the_last_lines_of_a_run(make_log, tmp_path, capsys):
    """A result.json says that a run is complete, so an old one goes when the run goes on."""
    (tmp_path / "result.json").write_text("{}")
    log = make_log(tmp_path, start=3, seed=3)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "task.py"}, "no curves"
    assert (tmp_path / "task.py").read_text() == "x = 1"
    written = json.loads((tmp_path / "config.json").read_text())
    facts = {"world": 1, "variants": [], "versions": log_file.versions()}
    assert written == vars(log.cfg) | facts
    log.result(5)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["seed"]) == (5, 3)
    assert 0 < result["wall_seconds"] < 1e6
    first = r"4 prompts x 4 samples a step, GAP; from step 3, ready after \d+ s"
    assert re.fullmatch(f"{first}\n5 steps in .*\n", capsys.readouterr().out)


def test_a_tracker_that_fails_does_not_end_the_run(make_log, tmp_path, capsys):
    """TensorBoard's thread dies of a full disk, and from then on each call raises, close() too."""

    def fail(*words):
        print(*words)
        raise OSError("No space left on device")

    failed = "WARNING: the tracker has failed and gets no more numbers: No space left on device\n"
    for add_scalar, told in [
        (fail, ("eval x/reward 0.5 7\n", failed)),
        (print, ("eval x/reward 0.5 7\neval x/length 2 7\n\n", "")),
    ]:
        log = make_log(tmp_path, start=0, log_with="tensorboard")
        log.tracker.writer.close()
        log.tracker.writer = SimpleNamespace(add_scalar=add_scalar, close=fail)
        capsys.readouterr()
        log.tracker.add({"step": 7, "reward": 0.5, "length": 2, "name": "aime"}, 7, "x/")
        log.close()
        assert capsys.readouterr() == told


@pytest.mark.parametrize("log_samples, first", [(0, 8), (1, 1), (5, 5), (256, 8)])
def test_a_step_is_a_line_with_all_its_numbers(
    make_log, tmp_path, capsys, monkeypatch, log_samples, first
):
    """The first --log_samples are written (0: all). --log_tokens or more are written by token:
    whole groups. Here the second group, because the rewards of the first group are equal."""
    log = make_log(tmp_path, log_samples=log_samples, log_tokens=2, generate_max_len=16)
    log.tracker = mock.Mock()
    samples = [sample(k // 4, k % 4, reward=float(k > 5), length=1 + k) for k in range(8)]
    batch = batch_of(samples)
    for offset, name in enumerate(("values", "logprobs", "advantages")):
        batch.per_token[name] = torch.arange(36.0) + offset
    clock = log_file.Clock(4)
    clock.seconds = {"rollout": 0.05, "critic": 0.04, "policy": 1.0}
    clock.memory = dict.fromkeys(clock.seconds, 9.0)
    clock.numbers["reward_lost"] = 3
    monkeypatch.setattr(log_file.time, "perf_counter", lambda: clock.start + 2)
    log.step(7, samples, batch, {"policy_tokens": 30}, clock)
    (line,) = jsonl(tmp_path / "metrics.jsonl")
    numbers = {"step": 7, "reward": 0.25, "reward_lost": 3, "policy_tokens": 30}
    numbers |= {"seconds_policy": 1, "memory_policy": 9, "tokens_per_second": 26}
    assert line.items() >= numbers.items(), "26 = (8 prompts of 2 + 36) / 2 s"
    assert log.tracker.add.call_args[0][0]["reward"] == 0.25
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


def test_a_form_that_no_response_meets_is_said_once_with_three_of_them(make_log, tmp_path, capsys):
    """The first step shows a wrong flag. Rewards stay 0 then, and nothing else says why."""
    log = make_log(tmp_path, task="math", answer_form="hashes", n_samples_per_prompt=2)
    said = []
    for step, reward, answered in ((1, 0, False), (2, 0, False), (1, 0, True), (1, 1, False)):
        samples = [sample(k // 2, k % 2, reward=reward) for k in range(8)]
        for k, drawn in enumerate(samples):
            drawn.parts = ["x" * 999 + f"the answer is {k}."]
            drawn.answer = "3" if answered and k == 3 else None
        log.step(step, samples, batch_of(samples), {}, log_file.Clock(step))
        said.append(capsys.readouterr().err)
    line = said[0].rstrip("\n")
    assert said == [f"{line}\n", "", "", ""], "one line, of the first step"
    told = "WARNING: --task math finds an answer in 0 of 8 responses that end, in the form hashes; "
    assert re.match(told, line)
    assert re.findall(r"the answer is (\d)", line) == ["0", "2", "4"], "of three problems"
    assert len(line) < 1200


def test_the_form_that_the_responses_have_is_named_after_the_first_step(make_log, tmp_path, capsys):
    """The prompt asks for a box, and --answer_form expects an answer block."""
    log = make_log(tmp_path, task="math", answer_form="orz", n_samples_per_prompt=2)
    samples = [sample(k // 2, k % 2, reward=0) for k in range(8)]
    for k, drawn in enumerate(samples):
        drawn.parts = [f"So it is \\boxed{{{k}}}." if k else "I do not know."]
        drawn.answer = None
    log.step(1, samples, batch_of(samples), {}, log_file.Clock(1))
    told = (
        "--task math finds an answer in 0 of 8 responses that end, in the form orz; 7 have one in "
    )
    told += "another form: add --answer_form boxed_anywhere"
    assert capsys.readouterr().err == f"WARNING: {told}\n"
    for drawn in samples:
        drawn.finish_reason = "length"
    log.step(1, samples, batch_of(samples), {}, log_file.Clock(1))
    assert "no response ends by itself" in capsys.readouterr().err


def test_numbers_of_numpy_and_labels_that_json_refuses_are_written(make_log, tmp_path):
    """A float32 of a user's text_metrics, or a set as a label, ended the run in phase 9 once."""
    log = make_log(tmp_path)
    labels = ["1", Fraction(1, 2), {(1, 2): 3}, {"a": {1}}, np.float32(0.5)]
    samples = [sample(k, words=np.float32(k)) for k in range(5)]
    for one, label in zip(samples, labels):
        one.request = replace(one.request, problem=replace(one.request.problem, label=label))
    added = {"mine": np.float32(0.5), "two": torch.tensor(2)}
    log.cfg.metrics = lambda line, samples, batch: line | added
    log.step(1, samples, batch_of(samples), {}, log_file.Clock(1))
    (line,) = jsonl(tmp_path / "metrics.jsonl")
    assert (line["words"], line["mine"], line["two"]) == (2.0, 0.5, 2)
    found = [line["label"] for line in jsonl(tmp_path / "samples.jsonl")]
    assert found == ["1", "Fraction(1, 2)", "{(1, 2): 3}", {"a": "{1}"}, 0.5]


ABORT = """
import os, signal, sys
from nanoorz import log
# Not SIG_IGN, because the process of sh would inherit it.
signal.signal(signal.SIGINT, lambda *_: None)
log.redirect_libraries(sys.argv[1])
os.killpg(0, signal.SIGINT)
os.write(2, b"NCCL says why\\n")
if sys.argv[2] == "abort":
    os.abort()
os._exit(3)
"""


@pytest.mark.parametrize("end, code", [("abort", -6), ("exit", 3)])
def test_an_abort_leaves_the_last_lines_of_run_log_on_the_screen(tmp_path, end, code):
    """The screen was blank once: what C libraries print goes to run.log. A Ctrl-C does not end the
    process that prints the lines."""
    log = tmp_path / "run.log"
    # Without a session of its own the signal would also reach pytest.
    done = run_python("-c", ABORT, log, end, code=code, start_new_session=True)
    assert log.read_text() == "NCCL says why\n"
    said = done.stdout + done.stderr
    assert ("NCCL says why" in said) == (end != "exit")
    assert ("Fatal Python error: Aborted; the last lines of" in said) == (end == "abort")


IN_TERMINAL = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from nanoorz import environment, log
folder = Path(sys.argv[1])
log.redirect_libraries(folder / "run.log")
signals = environment.Signals(dist.HashStore())
print("ready")
while not signals.asked:
    time.sleep(0.05)
for number in range(99):
    print("nobody can read this", number)
    print("nor this", file=sys.stderr)
(folder / "saved").touch()
os._exit(0)
"""


def test_a_run_outlives_its_terminal_and_the_reader_of_its_output(tmp_path):
    """A write to a closed terminal is an error. It came before the save once. A terminal that is
    closed sends a SIGHUP; `tee` in a pipe may end at the Ctrl-C that the run gets too."""
    master, slave = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    screens = [(slave, take_terminal), (subprocess.PIPE, None)]
    for screen, before in screens:
        (tmp_path / "saved").unlink(missing_ok=True)
        run = start_python(
            "-c", IN_TERMINAL, tmp_path, stdout=screen, stderr=screen, preexec_fn=before
        )
        if before:
            os.close(slave)
            assert os.read(master, 5) == b"ready"
            os.close(master)
        else:
            assert run.stdout.readline() == "ready\n"
            run.stdout.close()
            run.stderr.close()
            run.send_signal(signal.SIGINT)
        assert run.wait(60) == 0 and (tmp_path / "saved").exists()


def test_a_repeated_question_makes_no_evaluation_more_certain():
    samples = [sample(k // 2, k % 2, reward, 2) for k, reward in enumerate([1.0, 0, 1, 1, 0, 0])]
    once = log_file.numbers_of_evaluation(samples, 2)["stderr"]
    assert log_file.numbers_of_evaluation(samples * 32, 2)["stderr"] == pytest.approx(once)
    assert log_file.numbers_of_evaluation(samples[:2] * 32, 2)["stderr"] == 0


def test_an_evaluation_is_a_line_and_its_answers(make_log, tmp_path, capsys):
    log = make_log(tmp_path, eval_n=2)
    log.tracker = mock.Mock()
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    samples = [sample(k // 2, k % 2, rewards[k], 2 + k) for k in range(6)]
    samples[3].finish_reason = "length"
    log.evaluation("aime", samples, 7)
    log.tracker.add.assert_called_once_with(mock.ANY, 7, prefix="aime/")
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
