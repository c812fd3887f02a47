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


LEVERS = {"first_stage": 2, "adaptive_len": "true", "overlong": "drop", "tis_cap": 2.0, "rollout_batch_size": 4}


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


def test_levers_in_a_whole_run(levers):
    samples = jsonl(levers / "whole" / "samples.jsonl")
    assert [sum(s["step"] == step for s in samples) for step in (1, 2, 3)] == [16, 8, 8], "hopeless once seen"
    assert all(m["ratio_max"] < 1.001 for m in jsonl(levers / "whole" / "metrics.jsonl"))
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
    well = {"truncated": 0.1, "entropy": 0.5, "reward": 0.4, "explained_variance": 0.2, "ratio": 1.0,
            "policy_grad_norm": 1.0}
    usual = [1.0] * 10
    assert metrics.health(well, usual) == []
    assert metrics.health({"truncated": 0.0, "reward": 0.5, "policy_grad_norm": 1.0}, []) == [], "without a critic"
    assert metrics.health(well | {"policy_grad_norm": 50.0}, [1.0]) == [], "a spike against what?"
    assert metrics.health(well | {"entropy": 0.01, "reward": 0.95}, usual) == [], "sure because it is right"
    for change, word in (({"truncated": 0.31}, "31%"), ({"entropy": 0.01}, "collapsed"),
                         ({"explained_variance": -0.1}, "critic"), ({"policy_grad_norm": 11.0}, "11"),
                         ({"ratio": 1.2}, "1.200"), ({"ratio": 0.8}, "differ")):
        sign, = metrics.health(well | change, usual)
        assert word in sign


def test_eval_only(tiny, tmp_path):
    """The same code path as training's: the numbers of a training run at step 0. No training run is touched."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.jsonl").write_text('{"step": 0, "set": "of an evaluation before"}\n')
    two = [tiny["eval_data"], tiny["data"]]
    done = launch(tmp_path / "eval", **tiny | {"eval_only": "true", "eval_n": 4, "eval_data": two})
    assert "pass@4" in done.stdout
    result = json.loads((tmp_path / "eval" / "result.json").read_text())
    assert [line["set"] for line in result["sets"]] == ["eval", "train"], "a second evaluation replaces the first"
    assert {"accuracy", "stderr", "pass@1", "pass@2", "pass@4", "length", "truncated"} <= set(result["sets"][0])
    assert result["config"]["temperature"] == 1.0
    assert "torch" in result["versions"]
    assert len(jsonl(tmp_path / "eval" / "eval_samples.jsonl")) == (8 + 40) * 4
    launch(tmp_path / "train", **tiny | {"max_steps": 1, "eval_n": 4})
    assert jsonl(tmp_path / "train" / "eval.jsonl")[0] == result["sets"][0]
    refused = launch(tmp_path / "train", check=False, **tiny | {"eval_only": "true"})
    assert refused.returncode == 2
    assert "holds a training run" in refused.stderr


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


def test_full_disk_costs_no_line(tmp_path, capsys):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    try:
        log, lines = report.RunLog(tmp_path, None, None), [{"step": k, "text": "x" * 9000} for k in range(12)]
        for k in range(0, 12, 3):
            log.append("samples.jsonl", lines[k:k + 3])
        assert "wait" in capsys.readouterr().err
        kept = (tmp_path / "samples.jsonl").read_text()
        assert kept.endswith("\n"), "no half line"
        subprocess.run(["mount", "-o", "remount,size=1m", str(tmp_path)], check=True)
        log.flush()
        assert jsonl(tmp_path / "samples.jsonl") == lines
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
