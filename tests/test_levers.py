"""The levers on sampling, evaluation, and what a run writes about itself."""
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import jsonl, launch, same_metrics
from transformers import AutoTokenizer

import ppo
import rollout
import train
from reward import Problem
from tools import metrics, report


def finished(*lengths, reason="stop"):
    return [{"response_ids": [0] * n, "finish_reason": reason} for n in lengths]


def test_length_budget_follows_what_responses_needed():
    budget = rollout.LengthBudget(1000)
    assert budget.cap(7) == 1000, "nothing is known: no limit but the run's"
    budget.update([7] * 3 + [8], finished(10, 20, 40) + finished(100))
    assert (budget.cap(7), budget.cap(8), budget.cap(9)) == (60, 150, 150), "half as much again; a new one the batch's"
    budget.update([7] * 10, finished(*[60] * 9) + finished(60, reason="length"))
    assert budget.cap(7) == 90, "one in ten cut short is within the target"
    budget.update([7] * 10, finished(*[60] * 8) + finished(90, 90, reason="length"))
    assert budget.cap(7) == 180, "two in ten are not: it grows"
    for _ in range(9):
        budget.update([7], finished(180, reason="length"))
    assert budget.cap(7) == 1000, "never above generate_max_len"
    again = rollout.LengthBudget(1000, json.loads(json.dumps(budget.caps)))
    assert [again.cap(i) for i in range(10)] == [budget.cap(i) for i in range(10)], "its state survives a checkpoint"


def test_two_stage_expands_what_is_partly_right():
    """--partial_reward: shares of the tests are neither all right nor all wrong."""
    class Canned(train.Rollout):
        def __call__(self, problems, prompts, n, purpose, step, clock, first=0, only=None, caps=None):
            return [{"problem": i, "index": k, "reward": (0.2, 0.9)[k % 2]}
                    for i in (range(1) if only is None else only) for k in range(first, n)]

    settings = SimpleNamespace(first_stage=2, n_samples_per_prompt=5, reward="code")
    stage = Canned(None, None, None, None, settings, None)
    assert len(stage.two_stage([Problem(0, "", "", "")], [[1]], 0, None, None, {})) == 5


@pytest.mark.parametrize("task, history, expanded", [
    ("math", {}, [1, 2]),  # 0 is all right; 1 is mixed; 2 all wrong and never seen
    ("math", {"12": False}, [1]),  # all wrong, and none right at its last visit
    ("math", {"12": True}, [1, 2]),
    ("code", {}, [1]),  # code that passes no test is not worth more samples
])
def test_two_stage_expands_where_something_can_be_learnt(task, history, expanded):
    right = {0: (1, 1), 1: (0, 1), 2: (0, 0)}
    asked = []

    class Canned(train.Rollout):
        def __call__(self, problems, prompts, n, purpose, step, clock, first=0, only=None, caps=None):
            asked.append((first, n, only))
            return [{"problem": i, "index": k, "reward": float(right[i][k]) if k < 2 else 0.0}
                    for i in (only if only is not None else range(3)) for k in range(first, n)]

    stage = Canned(None, None, None, None, SimpleNamespace(first_stage=2, n_samples_per_prompt=5, reward=task), None)
    problems = [Problem(10 + i, "", "", "") for i in range(3)]
    records = stage.two_stage(problems, [[1]] * 3, 0, None, None, history)
    assert asked == [(0, 2, None), (2, 5, expanded)], "the second call goes on where the first ended"
    assert [r["problem"] for r in records] == sorted(r["problem"] for r in records)
    assert len(records) == 6 + 3 * len(expanded)
    assert history == {"10": True, "11": True, "12": False}


LEVERS = {"first_stage": 2, "adaptive_len": "true", "overlong": "drop", "tis_cap": 2.0, "rollout_batch_size": 4,
          "lr_end": 2e-4}


@pytest.fixture(scope="module")
def levers(tiny, tmp_path_factory):
    """A run with every lever on four problems that a random model never solves, and the same one interrupted."""
    place = tmp_path_factory.mktemp("levers")
    few = json.loads(Path(tiny["data"]).read_text())[:4]
    (place / "few.json").write_text(json.dumps(few))
    same = tiny | LEVERS | {"data": place / "few.json", "save_interval": 1, "keep_last": 0}
    launch(place / "whole", **same)
    shutil.copytree(place / "whole", place / "parts")  # as a power cut in step 3 leaves it
    shutil.rmtree(place / "parts" / "step_000003")
    (place / "parts" / "result.json").unlink()
    launch(place / "parts", **same)
    return place


def test_levers_in_a_whole_run(levers, tiny):
    samples = jsonl(levers / "whole" / "samples.jsonl")
    assert [sum(s["step"] == step for s in samples) for step in (1, 2, 3)] == [16, 8, 8], "hopeless once seen"
    lines = jsonl(levers / "whole" / "metrics.jsonl")
    assert all(m["ratio_max"] < 1.001 for m in lines)
    assert [m["prompts_expanded"] for m in lines] == [1, 0, 0]
    assert [m["tokens_saved"] for m in lines] == [0, *(sum(s["length"] for s in samples if s["step"] == k)
                                                       for k in (2, 3))], "two of four: as many again"
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    for step, m in enumerate(lines, 1):  # --overlong drop: the critic's two optimizer steps never see what was cut
        kept = [s for s in samples if s["step"] == step and s["finish_reason"] == "stop"]
        tokens = sum(s["length"] + len(tokenizer(s["question"] + "<think>")["input_ids"]) for s in kept)
        assert m["critic_tokens"] == tokens / 2
        assert 0 < len(kept) < sum(s["step"] == step for s in samples)
    assert [m["policy_lr"] for m in lines] == [5e-4, 1e-3, pytest.approx(2e-4)], "two steps of warm-up, then to lr_end"
    state = json.loads((levers / "whole" / "step_000003" / "state.json").read_text())
    assert state["history"] == dict.fromkeys("0123", False)
    assert state["caps"].keys() == {"", *"0123"}


def test_levers_resume_exactly(levers):
    """Caps and history are state: without them the resumed run would sample other numbers of other lengths."""
    assert (levers / "whole" / "samples.jsonl").read_text() == (levers / "parts" / "samples.jsonl").read_text()
    whole, parts = (list(map(same_metrics, jsonl(levers / run / "metrics.jsonl"))) for run in ("whole", "parts"))
    assert whole == parts


def small_batch(rewards, lengths):
    responses = [list(range(1, n + 1)) for n in lengths]
    return ppo.Batch([[1, 2]] * len(lengths), responses, torch.zeros(len(lengths), dtype=torch.long),
                     torch.tensor(rewards, dtype=torch.float64), {})


def test_dropped_samples_count_in_the_group_and_nowhere_else():
    cfg = SimpleNamespace(estimator="reinforce", advantage_normalization=True)
    batch, short = small_batch([1, 0, 0], [2, 3, 9]), small_batch([1, 0], [2, 3])
    means = ppo.compute_advantages(batch, cfg, "cpu", kept=[0, 1])
    assert means["advantage"] == pytest.approx(0, abs=1e-6), "whitened over what is trained on, and so reported"
    short.rewards = short.rewards - 1 / 3 + 0.5  # the mean of all three is what they are measured against
    ppo.compute_advantages(short, cfg, "cpu")
    assert torch.allclose(batch.tokens["advantages"][:5], short.tokens["advantages"])
    batch.tokens["values"] = torch.tensor([0.5] * 5 + [0.0] * 9)  # of --fuse_values: none of a sample left out
    found = ppo.compute_advantages(batch, SimpleNamespace(
        estimator="gae", gamma=1.0, lambd=1.0, advantage_normalization=True), "cpu", kept=[0, 1])
    assert found["explained_variance"] == pytest.approx(0), "a constant explains nothing"


def test_truncated_importance_weights():
    """The gradient is that of sum min(exp(logp - sampler's), cap) A logp with the weight held fixed."""
    batch = small_batch([1, 0], [3, 2])
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], requires_grad=True)
    sampler = torch.tensor([-1.0, -4.0, -0.4, -2.0, -9.0])
    advantages = torch.tensor([0.5, -1.0, 2.0, 1.0, -0.7])
    batch.tokens = {"logprobs": sampler, "advantages": advantages}
    cfg = SimpleNamespace(temperature=1.0, tis_cap=2.0, log_kl=False)
    rows = SimpleNamespace(weight=torch.ones(5), index=torch.arange(5))
    loss, stats = ppo.policy_loss(lambda rows, temperature: (logp, logp), batch, rows, cfg)
    loss.backward()
    weight = torch.tensor([1.0, 2.0, np.exp(-0.1), np.exp(-1.0), 2.0], dtype=torch.float32)
    assert torch.allclose(logp.grad, -weight * advantages)
    assert stats["ratio_max"].item() == pytest.approx(np.exp(7.5)), "the raw ratio, before the cap"
    assert stats["approx_kl_k1"].item() == pytest.approx(-(2 - 0.1 - 1 + 7.5))


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    right = np.array([0, 1, 3, 6])
    got = metrics.pass_at_k(right, 6)
    assert list(got) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        draws = [any(i < c for i in draw) for c in right for draw in itertools.combinations(range(6), k)]
        assert got[f"pass@{k}"] == pytest.approx(np.mean(draws))


def test_health_speaks_up_and_only_then():
    well = {"truncated": 0.1, "entropy": 0.5, "reward": 0.4, "explained_variance": 0.2,
            "approx_kl": 0.001, "policy_grad_norm": 1.0}
    usual = [1.0] * 10
    assert metrics.health(well, usual) == []
    assert metrics.health({"truncated": 0.0, "reward": 0.5, "policy_grad_norm": 1.0}, []) == [], "without a critic"
    assert metrics.health(well | {"policy_grad_norm": 50.0}, [1.0]) == [], "a spike against what?"
    assert metrics.health(well | {"entropy": 0.01, "reward": 0.95}, usual) == [], "sure because it is right"
    assert metrics.health(well | {"explained_variance": -1.0, "reward": 0.97}, usual) == [], "little to explain"
    for change, word in (({"truncated": 0.31}, "31%"), ({"entropy": 0.01}, "collapsed"),
                         ({"explained_variance": -0.1}, "critic"), ({"policy_grad_norm": 11.0}, "11"),
                         ({"approx_kl": 0.05}, "differ: KL 0.050")):
        sign, = metrics.health(well | change, usual)
        assert word in sign


def test_imbalance(monkeypatch):
    """Of no samples at all (--overlong drop, all truncated) it once was 1, on one rank too."""
    for world, samples, expected in ((1, [], 0), (1, [0, 1], 0), (2, [], 0), (2, [0, 1], 0.25), (2, [0], 1)):
        monkeypatch.setattr(metrics.dist, "get_world_size", lambda world=world: world)
        assert metrics.imbalance([4, 3], samples) == expected


def test_code_in_a_whole_run(tiny, tmp_path):
    """--reward code: the same loop, graded by the sandbox."""
    item = {"text": "add", "test_list": ["assert f(1, 2) == 3"]}
    items = [item, item | {"text": "sum"}]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(x) + "\n" for x in items))
    code = {"reward": "code", "data": tmp_path / "code.jsonl", "eval_data": tmp_path / "code.jsonl"}
    launch(tmp_path / "run", **tiny | code | {"partial_reward": "true", "template": "plain", "prompt_max_len": 120,
                                              "max_len": 200, "packing_max_len": 256, "rollout_batch_size": 2,
                                              "max_steps": 1})
    assert [s["reward"] for s in jsonl(tmp_path / "run" / "samples.jsonl")] == [0.0] * 8
    assert jsonl(tmp_path / "run" / "metrics.jsonl")[0]["reward_lost"] == 0, "0 by verdict, not by accident"


@pytest.fixture
def tiny_disk(tmp_path):
    """A tmpfs of 64 KB, where the machine lets us mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_full_disk_costs_no_line(tiny_disk, capsys):
    log, lines = report.RunLog(tiny_disk, None), [{"step": k, "text": "x" * 9000} for k in range(12)]
    for k in range(0, 12, 3):
        log.append("samples.jsonl", lines[k:k + 3])
    assert "wait" in capsys.readouterr().err
    kept = (tiny_disk / "samples.jsonl").read_text()
    assert kept.endswith("\n"), "no half line"
    subprocess.run(["mount", "-o", "remount,size=1m", str(tiny_disk)], check=True)
    log.flush()
    assert jsonl(tiny_disk / "samples.jsonl") == lines


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_ends_the_tracker_and_not_the_run(tiny_disk, capsys):
    """TensorBoard's thread dies of it, and from then on each call raises. And no half result.json: it would look like
    the end of a run."""
    log = report.RunLog(tiny_disk, None)
    log.tracker = report.tracker(train.Config(), tiny_disk, 0)
    (tiny_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(tiny_disk).free)
    for step in range(1000):
        log.track({"reward": 0.5}, step, {"length_right": torch.arange(99)})
    assert log.tracker is None
    assert capsys.readouterr().err.count("no more events") == 1
    log.close()
    with pytest.raises(OSError):
        log.write("result.json", {"steps": "9" * 9999})
    assert not (tiny_disk / "result.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tracker_that_cannot_finish_does_not_spoil_the_exit_code(tiny_disk):
    log = report.RunLog(tiny_disk, None)
    log.tracker = report.tracker(train.Config(), tiny_disk, 0)
    log.track({f"name{k}": 0.5 for k in range(99)}, 1)
    (tiny_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(tiny_disk).free)
    log.tracker.tracker.add_text("long", "x" * 99_999)
    log.close()


def test_weights_and_biases(tiny, tmp_path):
    """Where it is installed: a run without network keeps its numbers, one that is not logged in ends in a line."""
    pytest.importorskip("wandb")
    run, anonymous = tmp_path / "run", {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    done = launch(run, **tiny, max_steps=1, log_with="wandb", check=False, env=anonymous)
    assert done.returncode == 2 and "--log_with wandb: No API key" in done.stderr
    launch(run, **tiny, max_steps=1, log_with="wandb", env={"WANDB_MODE": "offline"})
    (kept,) = run.glob("wandb/offline-run-*/*.wandb")
    assert all(name in kept.read_bytes() for name in (b"policy_grad_norm", b"histogram", b"actor_learning_rate"))
