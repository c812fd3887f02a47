"""Every recipe in runs/ can be planned without a GPU, and the numbers are those of a count by hand."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, clean_environment
from transformers import AutoModelForCausalLM

import train
from tools import check, plan

RECIPES = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "launch.sh")


def flags_of(recipe: Path, tmp_path, *extra) -> list[str]:
    """What the recipe's own shell code hands to tools/plan.py: a stand-in for `python` on the PATH writes it down."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[2:]))' \"$@\"\n")
    fake.chmod(0o755)
    copy = tmp_path / "runs"
    shutil.copytree(ROOT / "runs", copy)
    env = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    command = ["bash", str(copy / recipe.name), "--dry_run", *extra]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipe_can_be_planned(recipe, tmp_path, capsys):
    extra = ("--model", "Qwen/Qwen2.5-32B") if recipe.stem == "orz_32b_anneal" else ()  # else of a run still to come
    plan.main(flags_of(recipe, tmp_path, *extra))
    out, text = capsys.readouterr().out, recipe.read_text()
    assert "samples" in out
    planned = re.search(r"= ([0-9.]+) training.* ([0-9.]+) sampling", out)
    assert planned or recipe.stem == "demo"
    if said := re.search(r"Memory \(planned, never run\): (\d+) GiB training, (\d+) GiB sampling", text):
        assert list(said.groups()) == [f"{float(x):.0f}" for x in planned.groups()]
    assert said or recipe.stem in ("demo", "orz_32b_anneal")
    assert "xpect" in text
    assert len(text.splitlines()) <= 12, "a recipe holds only what differs"


def test_all_recipes_of_the_list_are_there():
    names = """demo orz_0p5b_1gpu orz_0p5b_8gpu orz_1p5b_2x8 orz_7b_4x8 orz_32b_16x8 orz_32b_anneal grpo_7b_4x8
        debug_7b_1x8"""
    assert set(names.split()) <= {path.stem for path in RECIPES}
    assert (ROOT / "runs" / "slurm.sbatch").exists()


@pytest.mark.slow
def test_dry_run_for_real():
    """One recipe from end to end, with the real interpreter; an unknown flag among its own is refused by name."""
    env = clean_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["bash", str(ROOT / "runs" / "orz_7b_4x8.sh"), "--dry_run"]
    done = subprocess.run([*script, "--rollout_batchsize", "3"], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "did you mean --rollout_batch_size" in done.stderr


def config_of(**flags):
    argv = [str(x) for name, value in (SMALL | flags).items() for x in (f"--{name}", value)]
    return train.parse_flags(argv)


@pytest.mark.parametrize("stage, bf16, world", [(0, False, 2), (1, False, 2), (2, True, 4), (3, True, 4)])
def test_static_memory_is_counted_per_parameter(tiny, stage, bf16, world):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    count = sum(p.numel() for p in model.parameters())
    assert check.parameters(model.config) == count
    cfg = config_of(**tiny | {"zero_stage": stage, "bf16": str(bf16).lower()})
    memory = plan.estimate(cfg, model.config, world, 80 * plan.GIB)
    width = 2 if bf16 else 4
    gathered = width * model.config.vocab_size * model.config.hidden_size if stage == 3 else 0
    assert memory.weights * plan.GIB == pytest.approx(2 * count * width / (world if stage == 3 else 1) + gathered)
    assert memory.gradients * plan.GIB == pytest.approx(2 * count * 4 / (world if stage >= 2 else 1))
    states = 8 if stage == 0 else 12  # without ZeRO the fp32 weights are their own masters
    assert memory.optimizer * plan.GIB == pytest.approx(2 * count * states / (world if stage else 1))


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    flags = ["--model", "Qwen/Qwen2.5-32B", "--data", "x", "--machines", "1", "--gpus", "1"]
    with pytest.raises(check.ConfigError, match="does not fit"):
        plan.main(flags)
    out = capsys.readouterr().out
    assert "use more GPUs" in out
    assert "--gpu_memory_utilization" in out
