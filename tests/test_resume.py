"""Whole runs that are interrupted and go on, and checkpoints as other files.

With the same ranks the results are the same to the bit, with others they are nearly the same.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    SHARD_EVERYTHING,
    equal_runs,
    jsonl,
    launch,
    run_python,
    run_ranks,
)
from safetensors.torch import load_file

import ckpt


@pytest.mark.parametrize("zero, ranks", [(3, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_resume_is_exact(tiny, tmp_path, other_critic, zero, ranks):
    """In bf16 with fp32 masters, which lie on the CPU under ZeRO 3 (--offload).

    A critic is another model than the policy, and learns alone at first. The run is interrupted
    amid that, where Adam has moments of the critic and none of the policy. Steps 2 and 3 are made
    twice, so this also shows that the same seed gives the same run.
    """
    flags = {"variant": ["log_ratio", SHARD_EVERYTHING, "critic_first"], "critic_only_steps": 2}
    flags |= {"bf16": True, "gradient_checkpointing": True, "critic": other_critic}
    flags |= {"zero_stage": zero, "save_interval": 1, "keep_last": 0}
    flags |= {"eval_interval": 2, "eval_n": 2, "offload": "optimizer" if zero == 3 else "none"}
    whole = tmp_path / "whole"
    launch(whole, ranks=ranks, **tiny | flags)
    # As a power cut leaves it: what came after step 1 is in the logs.
    parts = Path(shutil.copytree(whole, tmp_path / "parts"))
    for name in ("step_000002", "step_000003"):
        shutil.rmtree(parts / name)
    (parts / "result.json").unlink()
    said = launch(parts, ranks=ranks, **tiny | flags).stdout
    assert "from step 1," in said, "a run that starts over would be equal too"
    equal_runs(whole, parts)
    assert (parts / "result.json").exists()
    lines = jsonl(whole / "metrics.jsonl")
    assert abs(lines[-1]["ratio"] - 1) < 0.02, "sampler and trainer disagree"
    check_exports(whole, Path(tiny["model"]), tmp_path / "exported")
    check_copy_of_rollout(tmp_path / "copy", whole / "policy")
    head = load_file(whole / "critic" / "value_head.safetensors")
    shapes = {name: tensor.shape for name, tensor in head.items()}
    assert shapes == {"value_head.weight": (1, 32)}, "of the critic's hidden size"
    # The policy's first step is the third one, with the first rate of its warm-up.
    rates = [line.get("policy_lr") for line in lines]
    assert rates == [None, None, pytest.approx(5e-4)]


def check_exports(run: Path, model: Path, out: Path):
    """`python ckpt.py` gives the very files of the final export. A tied head is in neither."""
    weights, base = (load_file(x / "model.safetensors") for x in (run / "policy", model))
    assert weights.keys() == base.keys() and "lm_head.weight" not in base
    run_python(ROOT / "ckpt.py", run / "step_000003", out)
    for ours in out.iterdir():
        names = sorted(path.name for path in ours.iterdir())
        assert names == sorted(path.name for path in (run / ours.name).iterdir())
        for name in names:
            assert (ours / name).read_bytes() == (run / ours.name / name).read_bytes(), name


USE_OF_ROLLOUT = """
import sys
from types import SimpleNamespace

import rollout
from nanoorz.ranks import start_distributed

start_distributed()
cfg = SimpleNamespace(model=sys.argv[1], bf16=False, max_len=256, stop=[], enforce_eager=True)
cfg.micro_rollout_batch_size, cfg.gpu_memory_utilization = 4, 0.5
cfg.kv_cache_gb, cfg.tensor_parallel, cfg.packing = None, 1, "packed"
cfg.sampler_settings = lambda settings: settings
cfg.sampling_params = lambda params, request: params
sampler = rollout.Sampler(cfg)
problem = SimpleNamespace(prompt_ids=sampler.tokenizer.encode("12+34"))
requests = rollout.make_requests([problem], [0], 4, max_tokens=16, temperature=1.0, top_p=1.0)
print(sorted(sample.request.sample_number for _, sample in sampler.generate(requests)), flush=True)
"""


def check_copy_of_rollout(folder: Path, policy: Path):
    """vLLM loads an export, and rollout.py works in a folder with ranks.py and environment.py."""
    (folder / "nanoorz").mkdir(parents=True)
    for name in ("rollout.py", "nanoorz/ranks.py", "nanoorz/environment.py"):
        shutil.copy(ROOT / name, folder / name)
    done = run_python("-c", USE_OF_ROLLOUT, policy, cwd=folder, env={"PYTHONPATH": ""})
    assert done.stdout.splitlines()[-1] == "[0, 1, 2, 3]"


@pytest.mark.parametrize(
    "words, told",
    [
        (["HERE"], "give a checkpoint and a new folder: RUN/step_NNNNNN OUT"),
        (["HERE", "OUT"], "HERE is no checkpoint; HERE has step_000002"),
        (["HERE/step_000009", "OUT"], "HERE/step_000009 is no checkpoint; HERE has step_000002"),
    ],
)
def test_a_wrong_export_is_refused_in_one_line(tmp_path, capsys, words, told):
    (tmp_path / "step_000002").mkdir()
    assert ckpt.main([word.replace("HERE", str(tmp_path)) for word in words]) == 2
    assert capsys.readouterr().err == f"error: {told.replace('HERE', str(tmp_path))}\n"


# A variant whose export depends on what it remembers.
SCALED = """
import ppo


class Scaled(ppo.Recipe):
    def allowed_gap(self, of_mean, of_worst):
        return 9.0, 9.0

    def policy_rate(self, past_updates, total_updates):
        self.memory["Scaled"] = {"factor": 1.0 + past_updates}
        return super().policy_rate(past_updates, total_updates)

    def named_weights(self, learner, named):
        factor = self.memory.get("Scaled", {"factor": 1.0})["factor"]
        for name, tensor in super().named_weights(learner, named):
            yield name, tensor * factor
"""


@pytest.mark.slow
def test_a_complete_run_goes_on_and_goes_back(tiny, tmp_path):
    """The evaluation of step 1 is made once, also where it is due again. A run that goes back to
    step 1 and ends there exports step 1. An export of a step knows what a variant remembers."""
    path = tmp_path / "scaled.py"
    path.write_text(SCALED)
    same = tiny | {"eval_interval": 2, "save_interval": 1, "keep_last": 0, "variant": path}
    for name, last in (("whole", 3), ("run", 1), ("run", 3)):
        launch(tmp_path / name, max_steps=last, **same)
    run = tmp_path / "run"
    run_python(ROOT / "ckpt.py", run / "step_000003", tmp_path / "old")
    weights = [x / "policy" / "model.safetensors" for x in (run, tmp_path / "old")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for file in ("eval.jsonl", "eval_samples.jsonl"):
        expected, lines = (jsonl(tmp_path / name / file) for name in ("whole", "run"))
        assert [line for line in lines if line["step"] != 1] == expected
        count = len([line for line in expected if line["step"] == 0])
        assert len([line for line in lines if line["step"] == 1]) == count
    run = tmp_path / "run"
    run_python(ROOT / "ckpt.py", run / "step_000001", tmp_path / "older")
    launch(run, max_steps=1, resume=run / "step_000001", **same)
    weights = [x / "policy" / "model.safetensors" for x in (run, tmp_path / "older")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((run / "result.json").read_text())["steps"] == 1


# ---- other numbers of ranks, other ZeRO stages ---------------------------------------------------


WORKER = ROOT / "tests" / "layout_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model. With 69 hidden units and 67 tokens little divides evenly, and of
    the tied embeddings one parameter has two names."""
    import tiny as maker

    folder = tmp_path_factory.mktemp("layouts")
    maker.make_model(folder / "model", vocab=67, hidden=69)
    return folder


def tensors_of(run: Path, step: int) -> dict:
    """{KIND/PARAMETER: tensor} of a checkpoint's policy."""
    tensors = {}
    for path in (run / f"step_{step:06d}" / "policy").glob("*.safetensors"):
        part = load_file(path)
        assert not tensors.keys() & part.keys(), "a tensor was written twice"
        tensors |= part
    return tensors


@pytest.mark.slow
def test_a_checkpoint_of_each_layout_goes_on_in_each_other(folder):
    """Weights and moments arrive to the bit, also when they are saved again before an update. In
    the same layout the next step is the same to the bit, in others nearly."""
    for words in ([folder / "saved"], [folder / "loaded", folder / "saved"]):
        for ranks in (1, 2, 3):
            run_ranks([WORKER, folder / "model", *words], ranks)
    layouts = sorted((folder / "saved").iterdir())
    crossings = sorted((folder / "loaded").iterdir())
    assert len(layouts) == 18 and len(crossings) == 8 * 8 + 3 * 3 + 3 * 3 + 4 * 4
    # Without ZeRO the saved tensors are the parameters themselves. The layouts have the same steps.
    plain = tensors_of(folder / "saved" / "1-0-fp32", 3)
    assert {key.partition("/")[0] for key in plain} == {"fp32", "exp_avg", "exp_avg_sq"}
    assert all(tensor.any() for tensor in plain.values()), "tensors of zero prove nothing"
    for layout in layouts:
        saved = tensors_of(layout, 3)
        if "frozen" in layout.name:
            assert plain.keys() - saved.keys() == {
                f"{kind}/model.model.embed_tokens.weight" for kind in ckpt.KINDS
            }
        elif "fp32" in layout.name or "offload" in layout.name:
            assert_near(saved, plain)
    for crossing in crossings:
        origin, target = crossing.name.split("_")
        saved, loaded = tensors_of(folder / "saved" / origin, 3), tensors_of(crossing, 3)
        assert saved.keys() == loaded.keys()
        weights = load_file(crossing / "weights.safetensors")
        for key, tensor in saved.items():
            assert torch.equal(tensor, loaded[key]), (crossing.name, key)
            kind, _, name = key.partition("/")
            if kind == "fp32":
                weight = weights[name.removeprefix("model.")]
                assert torch.equal(weight, tensor.to(weight.dtype)), (crossing.name, key)
        after, expected = tensors_of(crossing, 4), tensors_of(folder / "saved" / origin, 4)
        if origin == target:
            for key, tensor in after.items():
                assert torch.equal(tensor, expected[key]), (crossing.name, key)
        elif "bf16" not in origin:
            assert_near(after, expected)


def assert_near(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        # The gradient of a key's bias is 0 but for rounding, and Adam divides by its size.
        if "k_proj.bias" in key:
            continue
        # Where a gradient is nearly 0, rounding decides about its sign, and Adam makes a whole step
        # of it. This was one weight of 9,522 on one machine, and none on another.
        difference = (tensor - expected[key]).abs()
        is_far = difference > 1e-4 * expected[key].abs() + 1e-5 * expected[key].abs().max()
        assert is_far.float().mean() < 1e-3 and difference.max() < 1e-2, key


def test_a_disk_that_fails_is_told_on_every_rank(folder):
    """Rank 1 cannot write, under ZeRO 3: nothing gets a name, the checkpoint before stays, and the
    next try works. Both ranks return who could not."""
    run_ranks([WORKER, folder / "model", folder / "sick"])
    run = folder / "sick"
    for rank in (0, 1):
        told = (run / f"4_{rank}.txt").read_text()
        assert re.fullmatch(r"machine .*, rank 1: .*File too large.*", told)
    for name in ("3_0", "3_1", "5_0", "5_1"):
        assert (run / f"{name}.txt").read_text() == "None"
    assert [path.name for path in ckpt.checkpoints(run)] == ["step_000005", "step_000003"]
    assert not list(run.glob(".saving_*"))


@pytest.mark.slow
def test_run_goes_on_with_other_ranks(tiny, tmp_path):
    """The first of three steps is made by 2 ranks with ZeRO 3, the others by 1 with ZeRO 0."""
    same = tiny | {"save_interval": 1, "keep_last": 0, "zero_stage": 3}
    same["variant"] = ["log_ratio", SHARD_EVERYTHING]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    launch(whole, ranks=2, **same)
    shutil.copytree(whole, run)
    for step in (2, 3):
        shutil.rmtree(run / f"step_{step:06d}")
    assert "from step 1," in launch(run, **same | {"zero_stage": 0}).stdout
    metrics = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for one, two in zip(metrics, jsonl(whole / "metrics.jsonl")):
        assert abs(one["ratio"] - 1) < 1e-4
        norm = pytest.approx(two["policy_grad_norm"], rel=0.02)
        assert one["policy_grad_norm"] == norm, "the curve has a kink"
