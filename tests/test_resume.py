"""Whole runs that are interrupted and go on: the same bits; on other numbers of ranks: the same numbers."""
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, clean_environment, equal_runs, jsonl, launch

from tools import reshard

CELLS = [("gae", 0, 1), ("grpo", 1, 2), ("grpo", 2, 1), ("gae", 3, 2)]  # each stage; both estimators with 1 and 2 ranks
WIDE = [(e, z, w) for e in ("gae", "grpo") for z in range(4) for w in (1, 2) if (e, z, w) not in CELLS]


def resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt, **more):
    """A run, and its copy as a power cut leaves it: what came after a checkpoint is in the logs, but not the end.
    Also: the same seed gives the same run, since the steps from there on are made twice."""
    same = dict(tiny, estimator=estimator, zero_stage=zero, save_interval=1, keep_last=0, eval_interval=2, eval_n=2,
                **more)
    launch(tmp_path / "whole", ranks=ranks, **same)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in range(interrupt + 1, 4):
        shutil.rmtree(tmp_path / "parts" / f"step_{step:06d}")
    (tmp_path / "parts" / "result.json").unlink()
    launch(tmp_path / "parts", ranks=ranks, **same)
    equal_runs(tmp_path / "whole", tmp_path / "parts")
    assert (tmp_path / "parts" / "result.json").exists()


@pytest.mark.parametrize("estimator, zero, ranks", [pytest.param(*CELLS[0], marks=pytest.mark.slow), *CELLS[1:]])
def test_resume_is_exact(tiny, tmp_path, estimator, zero, ranks):
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=2)


@pytest.mark.slow
def test_whole_run_as_the_recipes_on_gpus_have_it(tiny, tmp_path):
    """What train.py does without flags: bf16 with fp32 masters, ZeRO 3, gradient checkpointing, small parameters not
    sharded. Resumed to the bit too; the sampler is as near to the trainer as bf16 allows."""
    resume_cell(tiny, tmp_path, "gae", 3, 2, interrupt=2, bf16="true", gradient_checkpointing="true",
                zero3_persistence_threshold=100_000, log_ratio="true")
    for line in jsonl(tmp_path / "whole" / "metrics.jsonl"):
        assert 0 < abs(line["ratio"] - 1) < 0.02
        assert line["policy_grad_norm"] > 0 and line["critic_grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("estimator, zero, ranks", WIDE)
def test_resume_is_exact_everywhere(tiny, tmp_path, estimator, zero, ranks):
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=1)


@pytest.mark.parametrize("zero, ranks", [(0, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_export_from_checkpoint_equals_the_run_s_own(tiny, tmp_path, zero, ranks):
    """`convert.py export` needs neither GPU nor process group and gives the very weights of the final export."""
    from safetensors.torch import load_file

    launch(tmp_path / "run", ranks=ranks, **tiny | {"zero_stage": zero, "max_steps": 1})
    tool = [sys.executable, str(ROOT / "tools" / "convert.py")]
    listed = subprocess.run([*tool, "list", tmp_path / "run"], capture_output=True, text=True, check=True)
    assert "complete" in listed.stdout
    source = tmp_path / "run" / "step_000001"
    subprocess.run([*tool, "export", source, tmp_path / "out"], check=True, capture_output=True)
    for file in ("policy/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"):
        ours, theirs = load_file(tmp_path / "out" / file), load_file(tmp_path / "run" / file)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
        assert len(ours) >= len(theirs) - 1
    torn = subprocess.run([*tool, "export", tmp_path / "run", tmp_path / "no"], capture_output=True, text=True)
    assert torn.returncode == 2
    assert "not a complete checkpoint" in torn.stderr


# ---- other numbers of ranks, other ZeRO stages ----

def torchrun(ranks: int, *args) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone",
               str(ROOT / "tests" / "reshard_worker.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("before, after", [(2, 1), pytest.param(1, 2, marks=SLOW), pytest.param(2, 4, marks=SLOW)])
def test_reshard_is_exact(tmp_path, before, after):
    """Parameters and moments of every (stage, ranks) arrive in every other one, to the bit. 33 hidden units and tied
    embeddings: nothing divides evenly, and one parameter has two names."""
    import tiny as maker

    model = maker.make_model(tmp_path / "model", vocab=67)
    torchrun(before, model, tmp_path / "saved")
    for run in sorted((tmp_path / "saved").iterdir()):
        reshard.reshard(run)
    torchrun(after, model, tmp_path / "loaded", tmp_path / "saved")
    crossings = sorted((tmp_path / "loaded").iterdir())
    assert len(crossings) == 8
    for crossing in crossings:
        first, last = crossing.name.split("to")
        one, step = reshard.merged(tmp_path / "saved" / first / "step_000003" / "policy", int(first))
        two, other_step = reshard.merged(crossing / "step_000003" / "policy", int(last))
        assert step == other_step == 3
        assert one.keys() == two.keys()
        assert len(one) % 3 == 0
        assert all(torch.equal(one[key], two[key]) for key in one), crossing.name
        assert all(one[key].any() for key in one), "moments of zero prove nothing"


@SLOW
def test_run_goes_on_with_other_ranks(tiny, tmp_path):
    """2 ranks with ZeRO 3, then 1 with ZeRO 0, then 2 with ZeRO 1: refused without reshard, and the curve goes on."""
    same = dict(tiny, save_interval=1, keep_last=0, log_ratio="true")
    run = tmp_path / "run"
    launch(run, ranks=2, **same | {"zero_stage": 3, "max_steps": 1})
    refused = launch(run, check=False, **same | {"zero_stage": 0, "max_steps": 2})
    assert "2 ranks with ZeRO 3, this run of 1 with 0" in refused.stderr
    for ranks, stage, steps in ((1, 0, 2), (2, 1, 3)):
        subprocess.run([sys.executable, str(ROOT / "tools" / "convert.py"), "reshard", run], check=True)
        launch(run, ranks=ranks, **same | {"zero_stage": stage, "max_steps": steps})
    metrics = jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(abs(m["ratio"] - 1) < 1e-4 for m in metrics)
    launch(tmp_path / "whole", **same)
    for one, two in zip(metrics, jsonl(tmp_path / "whole" / "metrics.jsonl")):
        assert one["policy_grad_norm"] == pytest.approx(two["policy_grad_norm"], rel=0.02), "the curve has a kink"
