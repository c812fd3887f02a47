"""tools/plan.py: its memory against real engines, what it prints; and runs/launch.sh."""

import gc
import json
import shutil
import subprocess
import sys

import pytest
import tiny as maker
import torch
from conftest import ROOT, clean_environment, config, held_port, run_tool, stand_in
from ppo_worker import make_batch

import ppo
from nanoorz import models
from tools import plan

RECIPES = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "launch.sh")
LARGE = "--model Qwen/Qwen2.5-7B"
GSM8K = "--model Qwen/Qwen2.5-0.5B --estimator grpo --zero_stage 2 --kv_cache_gb 4 --card_gb 24"


def held_bytes() -> int:
    """Of every storage that a tensor of this process holds."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.engine
def test_what_stays_is_what_real_engines_hold(stage, process_group, tmp_path):
    """ZeRO-3 keeps its gradient sums and a bucket an engine for ever; ZeRO-2 neither of them."""
    model = maker.make_model(tmp_path, tied=False, hidden=256, layers=4, vocab=2048)
    cfg = config(model=model, estimator="gae", zero_stage=stage, bf16=True)
    before = held_bytes()
    batch = make_batch()
    engines = [models.make_policy(cfg), models.make_critic(cfg)]
    cfg.token_passes(*engines, batch, step=0)
    ppo.compute_advantages(batch, cfg)
    # The moments are made by the first update.
    for engine, losses_of in zip(engines, (ppo.policy_losses, ppo.critic_losses)):
        ppo.update(engine, losses_of, batch, batch.all_indices(), 1e-3, cfg)
    found = plan.Plan(cfg, plan.model_config(cfg.model), world=1, card=plan.GIB)
    expected = sum(found.always().values()) - plan.CUDA
    assert held_bytes() - before == pytest.approx(expected, rel=0.02)


# Bytes of a trained parameter on one of 8 ranks: weights, masters and moments, gradient sums.
SHARES = {0: (4, 8, 4), 2: (2, 12 / 8, 4 / 8), 3: (2 / 8, 12 / 8, 4 / 8)}


@pytest.mark.parametrize("stage", SHARES)
@pytest.mark.parametrize(
    "name, policy, critic",
    [("0.5B", 494_032_768, 494_033_664), ("7B", 7_615_616_512, 7_070_622_720)],
)
def test_zero_divides_what_it_shards_by_the_gpus(name, policy, critic, stage):
    """Policy and critic learn. ZeRO-3 keeps the gradient sums, and one bucket for each model."""
    cfg = config(estimator="gae", bf16=stage > 0, zero_stage=stage)
    found = plan.Plan(cfg, plan.model_config(f"Qwen/Qwen2.5-{name}"), 8, 80 * plan.GIB)
    weights, states, sums = SHARES[stage]
    always = found.always()
    assert always["weights"] == weights * (policy + critic)
    assert always["optimizer: exact weights, two averages"] == states * (policy + critic)
    if stage == 3:
        assert always["gradients"] == sums * (policy + critic) + 2 * 4 * 10**8
    else:
        assert found.phases["critic"]["gradients"] == sums * critic


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, told",
    [
        (GSM8K, "It fits, with 8.5 GiB of each GPU to spare"),
        (f"{GSM8K} --variant log_kl", "one of the policy's size takes 0.9 GiB of each GPU"),
        # Of 18 B a parameter ten are pinned, which takes 2 + 2 + 1 GiB. The moments take 3.7 GiB.
        (f"{GSM8K} --offload optimizer", "--offload takes 9 GiB of CPU memory for each GPU"),
        (
            f"{LARGE} --machines 4 --gpus 8 --gpu_memory_utilization 0.7",
            "It fits, with 10.1 GiB of each GPU to spare",
        ),
        (
            f"{LARGE} --gpus 8 --gpu_memory_utilization 0.7",
            "With --gpu_memory_utilization 0.5 it fits",
        ),
        (f"{LARGE} --gpus 8 --gpu_memory_utilization 0.1", "too small for one sample of --max_len"),
        (
            f"{LARGE} --gpus 8 --gpu_memory_utilization 0.2",
            "With --gpu_memory_utilization 0.5 it fits",
        ),
        (f"{GSM8K} --kv_cache_gb 24", "With --kv_cache_gb 12 it fits"),
        (f"{LARGE} --card_gb 24", "No flag changes this: take larger cards"),
    ],
)
def test_a_plan_ends_with_a_sentence(flags, told):
    code, output, errors = run_tool("plan", *flags.split())
    assert (code, errors) == (0, "") and told in output


def test_a_flag_that_helps_makes_the_run_fit_and_is_not_on_already():
    flags = ["--model", "Qwen/Qwen2.5-1.5B", "--card_gb", "24", "--estimator", "grpo"]
    flags += ["--zero_stage", "2"]
    told = run_tool("plan", *flags)[1].splitlines()[-1]
    assert "With --offload optimizer it fits" in told
    flags += ["--offload", "optimizer"]
    assert "It fits, with " in run_tool("plan", *flags)[1]
    told = run_tool("plan", *flags, "--gradient_checkpointing", "false")[1].splitlines()[-1]
    assert "With --gradient_checkpointing true it fits" in told


def test_wrong_flags_are_refused_in_one_line():
    for flags, told in (
        ("--model no/where", "--model no/where"),
        (f"{LARGE} --gpus 3", "--rollout_batch_size 128: choose a multiple of 3"),
    ):
        code, _, errors = run_tool("plan", *flags.split())
        assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
        assert told in errors or "no/where" in flags


# ---- the recipes ---------------------------------------------------------------------------------


def run_recipe(recipe: str, tmp_path, *words, code=0) -> list[list[str]]:
    """The words of each `python`, which ends with that code, and `accelerate` in the recipe."""
    programs = tmp_path / "bin"
    dump = f"{sys.executable} -IS -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    stand_in(programs, "python", f'{dump} "$@"\nexit {code}')
    stand_in(programs, "accelerate", f'{dump} "$@"')
    copy = tmp_path / "runs"
    shutil.copytree(ROOT / "runs", copy)
    env = clean_environment()
    env["PATH"] = f"{programs}:{env['PATH']}"
    done = subprocess.run(["bash", copy / recipe, *words], capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_dry_run_plans_the_memory_of_each_recipe(recipe, tiny, tmp_path):
    folder = [tiny["model"]] if recipe.stem == "smollm2_cpu" else []
    *_, [script, *flags] = run_recipe(recipe.name, tmp_path, *folder, "--dry_run")
    assert script == "tools/plan.py"
    code, output, errors = run_tool("plan", *flags)
    assert code == 0 and "It fits, with " in output, errors


@pytest.mark.parametrize(
    "nvidia_smi, words, card, code",
    [
        ("echo 81559; echo 24564", ["--seed", "7"], "24", 0),
        ("echo 81559; echo 24564", ["--seed", "x"], "24", 2),
        ("echo 8192", ["--dry_run"], "24", 0),
        # Without a GPU no plan is printed.
        ("echo '[N/A]'; exit 9", [], None, 0),
    ],
)
def test_a_start_is_planned_for_the_smallest_card_of_this_machine(
    nvidia_smi, words, card, code, tmp_path
):
    """Flags that the plan refuses start nothing. A dry run is for the cards of the recipe."""
    stand_in(tmp_path / "bin", "nvidia-smi", nvidia_smi)
    calls = run_recipe("orz_1p5b_24gb.sh", tmp_path, *words, code=code)
    plans = [call for call in calls if call[0] == "tools/plan.py"]
    starts = [call for call in calls if call[0] == "train.py"]
    assert [call[5:7] for call in plans] == ([["--card_gb", card]] if card else [])
    assert len(starts) == (code == 0 and words != ["--dry_run"])
    for planned, start in zip(plans, starts):
        assert start[1:] == planned[7:], "what is planned is run"


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_exit_code_of_the_launcher_is_that_of_the_ranks(gpus):
    with held_port() as port:
        command = ["bash", ROOT / "runs" / "launch.sh", "1", str(gpus), "--wrong", "1"]
        env = clean_environment() | {"MASTER_PORT": port}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "error: --wrong is no flag" in done.stderr and "Traceback" not in done.stderr
