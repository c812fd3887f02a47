"""Whole runs that are interrupted and go on, and checkpoints as other files.

The same ranks: the same bits. Other numbers of ranks: the same numbers.
"""

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
    run_tool,
)
from safetensors.torch import load_file

import ckpt
from tools import convert


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
    """`convert.py export` gives the very files of the final export. A tied head is in neither."""
    weights, base = (load_file(x / "model.safetensors") for x in (run / "policy", model))
    assert weights.keys() == base.keys() and "lm_head.weight" not in base
    assert "complete" in run_tool("convert", "list", run)[1]
    code, _, errors = run_tool("convert", "export", run / "step_000003", out)
    assert code == 0, errors
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


@pytest.mark.parametrize("command", ["list", "export", "reshard"])
def test_a_folder_without_checkpoints_is_refused_in_one_line(tmp_path, command):
    words = [tmp_path / "out"] if command == "export" else []
    code, _, errors = run_tool("convert", command, tmp_path, *words)
    assert code == 2
    assert errors.startswith(f"error: {tmp_path}") and errors.count("\n") == 1


# ---- other numbers of ranks, other ZeRO stages ---------------------------------------------------


WORKER = ROOT / "tests" / "reshard_worker.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model and what two ranks have saved of it."""
    import tiny as maker

    folder = tmp_path_factory.mktemp("saved")
    maker.make_model(folder / "model", vocab=67, hidden=69)
    run_ranks([WORKER, folder / "model", folder / "saved"])
    return folder


def test_a_disk_that_fails_is_reported_on_every_rank(saved):
    """Rank 1 cannot write, under ZeRO 3: nothing is published, the checkpoint before stays, and the
    next try works. Both ranks report who could not."""
    run = saved / "saved.sick"
    for rank in (0, 1):
        told = (run / f"4_{rank}.txt").read_text()
        assert re.fullmatch(r"machine .*, rank 1: OSError: .*File too large.*", told)
    for name in ("3_0", "3_1", "5_0", "5_1"):
        assert (run / f"{name}.txt").read_text() == "None"
    assert [path.name for path in ckpt.checkpoints(run)] == ["step_000005", "step_000003"]
    assert all(ckpt.read_manifest(path) for path in ckpt.checkpoints(run))
    assert not list(run.glob(".saving_*"))


def test_reshard_is_exact(saved, tmp_path):
    """Parameters and moments of two ranks arrive in three ranks to the bit, at each pair of stages.

    With 69 hidden units and 67 tokens little divides evenly, and of tied embeddings one parameter
    has two names.
    """
    loaded = tmp_path / "loaded"
    for run in sorted((saved / "saved").iterdir()):
        convert.reshard(run)
    run_ranks([WORKER, saved / "model", loaded, saved / "saved"], 3)
    crossings = sorted(loaded.iterdir())
    assert len(crossings) == 8
    for crossing in crossings:
        source, target = crossing.name.split("to")
        one, step = convert.merge(saved / "saved" / source / "step_000003" / "policy", int(source))
        two, other_step = convert.merge(crossing / "step_000003" / "policy", int(target))
        assert step == other_step == 3
        assert one.keys() == two.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
        for kind in one:
            assert one[kind].keys() == two[kind].keys() == one["fp32"].keys()
            for name, tensor in one[kind].items():
                assert torch.equal(tensor, two[kind][name]), (crossing.name, kind, name)
                assert tensor.any(), "moments of zero prove nothing"


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
    assert run_tool("convert", "reshard", run)[0] == 0
    assert "any number of ranks" in run_tool("convert", "list", run)[1]
    assert "from step 1," in launch(run, **same | {"zero_stage": 0}).stdout
    metrics = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for one, two in zip(metrics, jsonl(whole / "metrics.jsonl")):
        assert abs(one["ratio"] - 1) < 1e-4
        norm = pytest.approx(two["policy_grad_norm"], rel=0.02)
        assert one["policy_grad_norm"] == norm, "the curve has a kink"
