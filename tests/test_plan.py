"""Every recipe in runs/ can be planned without a GPU; the numbers are those of a count by hand."""

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
from lib import check
from lib.common import UserError
from tools import plan

RECIPES = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "launch.sh")


def config_of(**flags) -> train.Config:
    argv = []
    for name, value in (SMALL | flags).items():
        argv += [f"--{name}", str(value)]
    return train.parse_flags(argv)


def stand_in(folder: Path, name: str, script: str) -> None:
    """A program of this name for the PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_recipe(
    recipe: str, tmp_path: Path, *extra: str, **environment
) -> subprocess.CompletedProcess:
    """The recipe's own shell code with stand-ins for `python` and `accelerate` on the PATH.

    They print their arguments as JSON lines, and `python` ends with the exit code $PLAN.
    """
    programs = tmp_path / "bin"
    dump = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    stand_in(programs, "python", f'{dump} "$@"\nexit ${{PLAN:-0}}')
    stand_in(programs, "accelerate", f'{dump} "$@"')
    copy = tmp_path / "runs"
    shutil.copytree(ROOT / "runs", copy)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | environment
    command = ["bash", str(copy / recipe), *extra]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def calls(done: subprocess.CompletedProcess) -> list[list[str]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, bf16, world", [(0, False, 2), (1, False, 2), (2, True, 4), (3, True, 4)]
)
def test_static_memory_is_counted_per_parameter(tiny, stage, bf16, world):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    assert check.count_parameters(config) == count
    cfg = config_of(**tiny | {"zero_stage": stage, "bf16": str(bf16).lower()})
    memory = plan.estimate(cfg, config, world, 80 * plan.GIB)
    width = 2 if bf16 else 4
    gathered = width * config.vocab_size * config.hidden_size if stage == 3 else 0
    weights = 2 * count * width / (world if stage == 3 else 1) + gathered
    assert memory.weights * plan.GIB == pytest.approx(weights)
    gradients = 2 * count * 4 / (world if stage >= 2 else 1)
    assert memory.gradients * plan.GIB == pytest.approx(gradients)
    # Without ZeRO the fp32 weights are their own masters.
    states = 8 if stage == 0 else 12
    assert memory.optimizer * plan.GIB == pytest.approx(
        2 * count * states / (world if stage else 1)
    )
    assert memory.card == 80


def test_an_offloaded_optimizer_is_not_on_the_card(tiny):
    config = plan.model_config("Qwen/Qwen2.5-0.5B")
    kept, offloaded = (
        plan.estimate(config_of(**tiny | flags), config, 2, 80 * plan.GIB)
        for flags in ({"zero_stage": 1}, {"zero_stage": 1, "offload": "optimizer"})
    )
    assert kept.optimizer > 0
    assert offloaded.optimizer == 0
    assert offloaded.training == pytest.approx(kept.training - kept.optimizer)


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_can_be_planned(recipe, tiny, tmp_path, capsys):
    extra = []
    if recipe.stem == "orz_32b_anneal":
        # Its own model is made by a run that is still to come.
        extra = ["--model", "Qwen/Qwen2.5-32B"]
    words = ["--dry_run", *extra]
    if recipe.stem == "smollm2_cpu":
        words = [tiny["model"], "--dry_run"]
    done = run_recipe(recipe.name, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    *before, [script, *flags] = calls(done)
    assert script == "tools/plan.py"
    made = [["tools/word_problems.py", "out/words"]]
    assert before == (made if recipe.stem == "smollm2_cpu" else [])
    plan.main(flags)
    out = capsys.readouterr().out
    text = recipe.read_text()
    planned = re.search(r"= ([0-9.]+) training.* ([0-9.]+) sampling", out)
    if recipe.stem == "demo":
        assert "tools/demo.py" in out
    else:
        assert "samples" in out
        assert planned
    said = re.search(r"Memory \(planned, never run\): (\d+) GiB training, (\d+) GiB sampling", text)
    if said:
        assert list(said.groups()) == [f"{float(x):.0f}" for x in planned.groups()]
    assert said or recipe.stem in ("demo", "orz_32b_anneal", "smollm2_cpu")
    assert "xpect" in text
    assert len(text.splitlines()) <= 12, "a recipe holds only what differs"


def test_all_recipes_of_the_list_are_there():
    names = """demo orz_0p5b_1gpu orz_0p5b_8gpu orz_1p5b_2x8 orz_7b_4x8 orz_32b_16x8 orz_32b_anneal
        grpo_7b_4x8 debug_7b_1x8"""
    assert set(names.split()) <= {path.stem for path in RECIPES}
    assert (ROOT / "runs" / "slurm.sbatch").exists()


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    flags = ["--model", "Qwen/Qwen2.5-32B", "--data", "x", "--machines", "1", "--gpus", "1"]
    with pytest.raises(UserError, match="does not fit"):
        plan.main(flags)
    out = capsys.readouterr().out
    assert "use more GPUs" in out
    assert "--gpu_memory_utilization" in out


def test_a_plan_checks_the_flags():
    flags = ["--model", "Qwen/Qwen2.5-0.5B", "--data", "x", "--gpus", "3"]
    with pytest.raises(UserError, match="--rollout_batch_size 128: use a multiple of 3"):
        plan.main(flags)
    with pytest.raises(UserError, match="--estimator ppo: choose gae or grpo"):
        plan.main([*flags, "--estimator", "ppo"])


@pytest.mark.slow
def test_dry_run_for_real():
    """One recipe with the real interpreter, and a flag that it does not know."""
    python_folder = Path(sys.executable).parent
    env = clean_environment() | {"PATH": f"{python_folder}:{os.environ['PATH']}"}
    script = ["bash", str(ROOT / "runs" / "orz_7b_4x8.sh"), "--dry_run"]
    command = [*script, "--rollout_batchsize", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "did you mean --rollout_batch_size" in done.stderr


# ---- runs/launch.sh ------------------------------------------------------------------------------


def test_a_start_is_planned_for_the_smallest_card_of_this_machine(tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 81559\necho 24564\necho 81559")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, "--seed", "7")
    assert done.returncode == 0, done.stderr
    planned, launched = calls(done)
    assert planned[:7] == ["tools/plan.py", "--machines", "1", "--gpus", "1", "--card_gb", "23"]
    start = launched.index("train.py")
    assert launched[start + 1 :] == planned[7:], "what is planned is what is run"
    assert planned[-2:] == ["--seed", "7"]


def test_a_start_that_does_not_fit_is_refused(tmp_path):
    """Before a model is read. Only a dry run had the plan once."""
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 8192")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, PLAN="2")
    assert done.returncode == 2
    [planned] = calls(done)
    assert planned[5:7] == ["--card_gb", "8"]


@pytest.mark.parametrize("answer", ["exit 9", "echo NVIDIA-SMI has failed\nexit 9", "echo '[N/A]'"])
def test_without_a_gpu_a_run_starts_too(answer, tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", answer)
    done = run_recipe("demo.sh", tmp_path, CARD_GB="80")
    assert done.returncode == 0, done.stderr
    planned, launched = calls(done)
    assert planned[5:7] == ["--card_gb", "80"]
    assert launched[-1] == "train.py"


def test_a_dry_run_is_for_the_cards_of_the_recipe(tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 8192")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, "--dry_run")
    [planned] = calls(done)
    assert planned[5:7] == ["--card_gb", "24"]
