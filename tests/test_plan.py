"""tools/plan.py: its memory against real engines, and what it prints."""

import gc
import json
import re
import shutil
import subprocess
import sys

import pytest
import tiny as maker
import torch
from conftest import ROOT, clean_environment, config, run_tool, stand_in
from ppo_worker import make_batch

import ppo
from nanoorz import models
from tools import plan
from tools.shapes import model_config

RECIPES = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "launch.sh")
LARGE = "--model Qwen/Qwen2.5-7B --data x"
GSM8K = "--model Qwen/Qwen2.5-0.5B-Instruct --data x --estimator grpo --zero_stage 2 "
GSM8K += "--rollout_batch_size 16 --n_samples_per_prompt 16 --generate_max_len 512 "
GSM8K += "--prompt_max_len 512 --max_len 1024"


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
    always = plan.Rank(cfg, model_config(cfg.model), world=1).always()
    expected = plan.total(always) - plan.CONTEXT
    assert held_bytes() - before == pytest.approx(expected, rel=0.02)


# Bytes of a trained parameter on one of 8 ranks: weights, masters and moments, gradient sums.
SHARES = {0: (4, 8, 4), 2: (2, 12 / 8, 4 / 8), 3: (2 / 8, 12 / 8, 4 / 8)}


@pytest.mark.parametrize("stage", SHARES)
@pytest.mark.parametrize(
    "name, policy, critic",
    [("0.5B", 494_032_768, 494_033_664), ("7B", 7_615_616_512, 7_070_622_720)],
)
def test_zero_divides_what_it_shards_by_the_ranks(name, policy, critic, stage):
    """Policy and critic learn. ZeRO-3 keeps the gradient sums, and one bucket for each model."""
    cfg = config(estimator="gae", bf16=stage > 0, zero_stage=stage)
    rank = plan.Rank(cfg, model_config(f"Qwen/Qwen2.5-{name}"), world=8)
    weights, states, sums = SHARES[stage]
    expected = {"weights": weights, "masters and moments": states}
    always = rank.always()
    if stage == 3:
        expected["gradients"] = sums
        assert always.pop("buckets") == 2 * 4 * 10**8
    else:
        assert rank.update(critic, has_head=False)["gradients"] == sums * critic
    del always["CUDA and NCCL"]
    assert always == {item: size * (policy + critic) for item, size in expected.items()}


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, told",
    [
        (GSM8K, "KV cache: 3,177,239 tokens"),
        (f"{GSM8K} --variant log_kl", "not counted; a billion parameters take 1.9 GiB per rank"),
        # The sampler holds 0.34 GiB less, so its cache holds more tokens. No GPU is needed.
        (f"{GSM8K} --variant fp8_rollout", "KV cache: "),
        (f"{GSM8K} --variant lr_end --lr_end 0.1", "KV cache: "),
        (f"{GSM8K} --estimator gae --variant critic_first", "KV cache: "),
        (f"{GSM8K} --estimator gae --variant critic_lambd --critic_lambd 0.9", "KV cache: "),
        (f"{GSM8K} --card_gb 48", "of 47 GiB"),
        (f"{GSM8K} --compile_layers true --packing_max_len 46080", "at most 6 rows"),
        ("--help", "All flags but those below.* --gpus N .*--dry_run"),
        # Without ZeRO the fp32 weights are their own masters.
        (f"{GSM8K} --zero_stage 0 --bf16 false", "always: weights 1.8 .* moments 3.7 "),
        (
            f"{LARGE} --machines 4 --gpus 8 --gpu_memory_utilization 0.7",
            "rollout: .* = 65.0\n.*policy: .* gathered 1.3 = 24.6\n.* 698,460 tokens,",
        ),
        (f"{LARGE} --gpus 8 --kv_cache_gb 4", "KV cache: 74,898 tokens"),
        # Of 18 B a parameter ten are pinned, which takes 2 + 2 + 1 GiB. The moments take 3.7 GiB.
        (f"{GSM8K} --offload optimizer", "CPU memory: 9 GiB"),
        # Each rank has a half of the sums.
        (f"{GSM8K} --estimator gae --gpus 2", r"policy: .*\+ critic's sums 0.9 "),
        (f"{GSM8K} --gpus x", "error: argument --gpus: invalid int value"),
        (f"{GSM8K} --card_gb nan", "error: --card_gb nan: must be a number above 0"),
        ("--model no/where --data x", "error: --model no/where cannot be planned .*give a causal"),
        (f"{GSM8K} --gpus 3", "error: --rollout_batch_size 16: choose a multiple of 3"),
        (
            f"{GSM8K} --variant pass_at_k --estimator pass_at_k --pass_k 16",
            "error: .* more than --pass_k 16",
        ),
        (
            f"{LARGE} --gpus 8 --gpu_memory_utilization 0.7 --zero_stage 2",
            "WARNING: the plan does not fit: phase rollout 104.5, sync 104.5 of 75.2 GiB",
        ),
        (LARGE, "WARNING: .*: phase rollout .*, critic .*, policy .*, sync .*--offload optimizer"),
        (
            f"{LARGE} --gpus 8 --micro_train_batch_size 8",
            "WARNING: .* fit: phase critic .*, policy ",
        ),
        (f"{LARGE} --gpus 8 --gpu_memory_utilization 0.23", "WARNING: .*rollout: the KV cache .*"),
    ],
)
def test_a_plan_says_the_memory_and_refuses_or_warns_in_one_line(flags, told):
    """Wrong flags are refused. A plan that does not fit is a warning, because no card has
    calibrated the plan."""
    code, output, errors = run_tool("plan", *flags.split())
    is_line = re.fullmatch(f"{told}.*\n", errors)
    if told.startswith("error: "):
        assert code == 2 and is_line
    elif told.startswith("WARNING: "):
        assert code == 0 and is_line
    else:
        assert (code, errors) == (0, "") and re.search(told, output, re.DOTALL)


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
    assert code == 0 and "peaks: " in output, errors


@pytest.mark.parametrize(
    "nvidia_smi, words, card, code",
    [
        ("echo 81559; echo 24564", ["--seed", "7"], "24", 0),
        ("echo 81559; echo 24564", ["--seed", "x"], "24", 2),
        ("echo 8192", ["--dry_run"], "24", 0),
        # The plan only warns.
        ("echo 8192", [], "8", 0),
        ("echo '[N/A]'; exit 9", [], "80", 0),
    ],
)
def test_a_start_is_planned_for_the_smallest_card_of_this_machine(
    nvidia_smi, words, card, code, tmp_path
):
    """Flags that the plan refuses start nothing. A dry run is for the cards of the recipe."""
    stand_in(tmp_path / "bin", "nvidia-smi", nvidia_smi)
    planned, *launched = run_recipe("orz_1p5b_24gb.sh", tmp_path, *words, code=code)
    assert planned[5:7] == ["--card_gb", card]
    assert len(launched) == (code == 0 and words != ["--dry_run"])
    for start in launched:
        assert start[start.index("train.py") + 1 :] == planned[7:], "what is planned is run"
