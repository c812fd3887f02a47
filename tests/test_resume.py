"""Whole runs that are interrupted and go on, and checkpoints as other files.

The same ranks: the same bits. Other numbers of ranks: the same numbers.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, clean_environment, equal_runs, jsonl, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckpt
from tools import convert

SLOW = pytest.mark.slow
# It differs from train.py under ZeRO 3 only.
SHARDED = ROOT / "tests" / "sharded_train.py"
# Each stage, and both estimators with 1 and 2 ranks.
CELLS = [("gae", 0, 1), ("grpo", 1, 2), ("grpo", 2, 1), ("gae", 3, 2)]
ALL_CELLS = itertools.product(("gae", "grpo"), range(4), (1, 2))
WIDE = [cell for cell in ALL_CELLS if cell not in CELLS]


def resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt, script=SHARDED, **more):
    """A run, and its copy as a power cut leaves it.

    What came after a checkpoint is in the copy's logs, but not the end. This also shows that the
    same seed gives the same run, since the steps from there on are made twice.
    """
    same = tiny | {"estimator": estimator, "zero_stage": zero, "save_interval": 1, "keep_last": 0}
    same |= {"eval_interval": 2, "eval_n": 2, **more}
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    launch(whole, ranks=ranks, script=script, **same)
    shutil.copytree(whole, parts)
    for step in range(interrupt + 1, 4):
        shutil.rmtree(parts / f"step_{step:06d}")
    (parts / "result.json").unlink()
    launch(parts, ranks=ranks, script=script, **same)
    equal_runs(whole, parts)
    assert (parts / "result.json").exists()


@pytest.mark.parametrize(
    "estimator, zero, ranks", [*(pytest.param(*cell, marks=SLOW) for cell in CELLS[:3]), *CELLS[3:]]
)
def test_resume_is_exact(tiny, tmp_path, other_critic, estimator, zero, ranks):
    """With a critic, that one is given, is another model, and warms up alone: resumed amid that
    under ZeRO 0, where Adam has no moments of the policy yet, and after it under ZeRO 3."""
    if estimator == "grpo":
        return resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=2)
    warmup = 2 if zero == 0 else 1
    interrupt = 1 if zero == 0 else 2
    flags = {"critic": other_critic, "critic_only_steps": warmup}
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt, **flags)
    check_warmup(tmp_path / "whole", Path(tiny["model"]), warmup, zero)
    check_critic(tmp_path / "whole", other_critic)
    check_exports(tmp_path / "whole", 3, Path(tiny["model"]), tmp_path / "exported")


def check_warmup(run: Path, model: Path, warmup: int, zero: int):
    """The policy is the base model to the bit until its own first step, whose rate is the first of
    its warm-up of two steps; the critic moves all the while."""
    base = load_file(model / "model.safetensors")
    critics = []
    for step, line in enumerate(jsonl(run / "metrics.jsonl"), start=1):
        checkpoint = run / f"step_{step:06d}"
        whole, updates = convert.merge(checkpoint / "policy", zero)
        same = [torch.equal(whole[f"fp32/model.{name}"], base[name]) for name in base]
        assert all(same) == (step <= warmup)
        assert updates == max(0, step - warmup)
        assert ("policy_lr" in line) == (step > warmup)
        if step == warmup + 1:
            assert line["policy_lr"] == pytest.approx(5e-4)
        assert line["critic_lr"] == pytest.approx(1e-3 if step > 1 else 7.5e-4)
        critics.append(convert.merge(checkpoint / "critic", zero)[0]["fp32/value_head.weight"])
    assert not torch.equal(critics[0], critics[1])


def check_critic(run: Path, given: str):
    """Its size is that of the folder it came from, in what the run exports."""
    hidden = json.loads((Path(given) / "config.json").read_text())["hidden_size"]
    exported = load_file(run / "critic" / "value_head.safetensors")
    assert exported.keys() == {"value_head.weight"}
    assert exported["value_head.weight"].shape == (1, hidden)


def check_exports(run: Path, step: int, model: Path, out: Path):
    """`convert.py export` needs neither GPU nor process group, and gives the very files of the
    final export. That one also held a tied head under its second name, and this one did not."""
    assert "complete" in convert_py("list", run).stdout
    done = convert_py("export", run / f"step_{step:06d}", out)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("policy", "critic"):
        ours = sorted((out / name).iterdir())
        theirs = sorted((run / name).iterdir())
        assert [path.name for path in ours] == [path.name for path in theirs]
        for one, two in zip(ours, theirs):
            assert one.read_bytes() == two.read_bytes(), one
    # What a tied model of transformers holds, which vLLM reads at every start.
    exported = load_file(run / "policy" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()


@SLOW
def test_whole_run_as_the_recipes_on_gpus_have_it(tiny, tmp_path):
    """What train.py does without flags: bf16 with fp32 masters, ZeRO 3, gradient checkpointing, and
    small parameters that are not sharded.

    Resumed to the bit too; the sampler is as near to the trainer as bf16 allows.
    """
    train = ROOT / "train.py"
    flags = {"bf16": "true", "gradient_checkpointing": "true", "log_ratio": "true"}
    resume_cell(tiny, tmp_path, "gae", 3, 2, interrupt=2, script=train, **flags)
    for line in jsonl(tmp_path / "whole" / "metrics.jsonl"):
        assert 0 < abs(line["ratio"] - 1) < 0.02
        assert line["policy_grad_norm"] > 0 and line["critic_grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("estimator, zero, ranks", WIDE)
def test_resume_is_exact_everywhere(tiny, tmp_path, estimator, zero, ranks):
    resume_cell(tiny, tmp_path, estimator, zero, ranks, interrupt=1)


# ---- tools/convert.py ----------------------------------------------------------------------------


def convert_py(*words):
    command = [sys.executable, str(ROOT / "tools" / "convert.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment())


@SLOW
@pytest.mark.parametrize("zero, ranks", [(0, 1), (3, 2)])
def test_export_from_checkpoint_equals_the_run_s_own(tiny, tmp_path, zero, ranks):
    """Also with the critic that a run makes for itself, which has the size of the policy."""
    run = tmp_path / "run"
    launch(run, ranks=ranks, script=SHARDED, **tiny | {"zero_stage": zero, "max_steps": 1})
    check_exports(run, 1, Path(tiny["model"]), tmp_path / "out")
    head = load_file(run / "critic" / "value_head.safetensors")
    assert head.keys() == {"value_head.weight"}


@SLOW
def test_an_export_is_a_base_model(tiny, whole, tmp_path):
    """transformers and vLLM load it: a run from it begins with a comparison of the two."""
    base = whole(max_steps=1) / "policy"
    said = launch(tmp_path / "run", **tiny | {"model": base, "max_steps": 1}).stdout
    assert "sampler and trainer differ by" in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert str(base) in json.dumps(config)


@pytest.mark.parametrize("command", ["list", "export", "reshard"])
def test_a_folder_without_checkpoints_is_one_line(tmp_path, command):
    words = [tmp_path / "out"] if command == "export" else []
    done = convert_py(command, tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}")
    assert done.stderr.count("\n") == 1


# ---- other numbers of ranks, other ZeRO stages ---------------------------------------------------


def torchrun(ranks: int, *words):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    worker = str(ROOT / "tests" / "reshard_worker.py")
    command = [sys.executable, *launcher, worker, *map(str, words)]
    env = clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """The folder of a tiny model and what a number of ranks has saved of it, made once."""
    import tiny as maker

    folders = {}

    def save(ranks: int) -> Path:
        if ranks not in folders:
            folder = tmp_path_factory.mktemp("saved")
            maker.make_model(folder / "model", vocab=67, hidden=68)
            torchrun(ranks, folder / "model", folder / "saved")
            folders[ranks] = folder
        return folders[ranks]

    return save


def test_all_ranks_hear_of_one_sick_disk(saved_by):
    """Rank 1 cannot write, under ZeRO 3: nothing is published, the checkpoint before stays, and the
    next try works. Both ranks are told who could not, what was needed and what is free."""
    folder = saved_by(2)
    run = folder / "saved.sick"
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    needed = 16 * sum(parameter.numel() for parameter in model.parameters())
    numbers = rf"{run}: needed {needed:,} bytes, free [\d,]+"
    for rank in (0, 1):
        told = (run / f"4_{rank}.txt").read_text()
        assert re.fullmatch(rf"machine .*, rank 1: OSError: .*File too large; {numbers}", told)
    for name in ("3_0", "3_1", "5_0", "5_1"):
        assert (run / f"{name}.txt").read_text() == "None"
    assert [path.name for path in ckpt.checkpoints(run)] == ["step_000005", "step_000003"]
    assert all(ckpt.manifest(path) for path in ckpt.checkpoints(run))
    assert not list(run.glob(".saving_*"))


@pytest.mark.parametrize(
    "before, after",
    [(2, 1), pytest.param(1, 2, marks=SLOW), pytest.param(3, 4, marks=SLOW)],
)
def test_reshard_is_exact(saved_by, tmp_path, before, after):
    """Parameters and moments of every (stage, ranks) arrive in every other one, to the bit.

    With 68 hidden units and 67 tokens little divides evenly by 3 ranks, and biases of 34 not by 4;
    and of tied embeddings one parameter has two names.
    """
    saved = saved_by(before) / "saved"
    loaded = tmp_path / "loaded"
    for run in sorted(saved.iterdir()):
        convert.reshard(run)
    torchrun(after, saved_by(before) / "model", loaded, saved)
    crossings = sorted(loaded.iterdir())
    assert len(crossings) == 8
    for crossing in crossings:
        source, target = crossing.name.split("to")
        one, step = convert.merge(saved / source / "step_000003" / "policy", int(source))
        two, other_step = convert.merge(crossing / "step_000003" / "policy", int(target))
        assert step == other_step == 3
        assert one.keys() == two.keys()
        assert len(one) % 3 == 0
        assert all(torch.equal(one[key], two[key]) for key in one), crossing.name
        assert all(one[key].any() for key in one), "moments of zero prove nothing"


@SLOW
def test_run_goes_on_with_other_ranks(tiny, tmp_path):
    """2 ranks with ZeRO 3, then 1 with ZeRO 0, then 2 with ZeRO 1: refused without reshard, and the
    curve goes on."""
    same = tiny | {"save_interval": 1, "keep_last": 0, "log_ratio": "true"}
    run = tmp_path / "run"
    launch(run, ranks=2, script=SHARDED, **same | {"zero_stage": 3, "max_steps": 1})
    refused = launch(run, check=False, **same | {"zero_stage": 0, "max_steps": 2})
    assert "2 ranks with ZeRO 3, this run of 1 with 0" in refused.stderr
    for ranks, stage, steps in ((1, 0, 2), (2, 1, 3)):
        assert convert_py("reshard", run).returncode == 0
        assert "any number of ranks" in convert_py("list", run).stdout
        launch(run, ranks=ranks, **same | {"zero_stage": stage, "max_steps": steps})
    metrics = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in metrics)
    launch(tmp_path / "whole", **same)
    for one, two in zip(metrics, jsonl(tmp_path / "whole" / "metrics.jsonl")):
        norm = pytest.approx(two["policy_grad_norm"], rel=0.02)
        assert one["policy_grad_norm"] == norm, "the curve has a kink"
