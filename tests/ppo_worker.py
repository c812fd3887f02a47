"""Runs cells on the real DeepSpeed engines: `[accelerate launch ...] ppo_worker.py FOLDER`.

FOLDER/cells.json is a list of cells (cells.py); what `cell_KIND` returns on rank 0 goes to
FOLDER/NAME.pt. Every engine is built by make_policy or make_critic. Their optimizer is mostly SGD,
whose step is the gradient itself.
"""

import json
import os
import random
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

import ppo  # noqa: E402
from lib import common, models  # noqa: E402
from lib.common import gather  # noqa: E402

LR = 2.0  # large: rounding of the weights must not blur the gradient read off their change
SGD = {"optimizer_class": torch.optim.SGD}
CPU = torch.device("cpu")


def config(model="", **overrides) -> SimpleNamespace:
    """The fields of train.Config that ppo.py and lib/models.py read: no clipping of gradients, no
    warm-up, and a temperature that matters."""
    settings = {
        "model": str(model),
        "seed": 5,
        "bf16": False,
        "attention": "sdpa",
        "gradient_checkpointing": False,
        "zero_stage": 0,
        "offload": "none",
        "max_norm": 1e9,
        "actor_learning_rate": LR,
        "critic_learning_rate": LR,
        "warmup_updates": 1,
        "lr_end": None,
        "critic": None,
        "critic_only_steps": 0,
        "critic_updates": 1,
        "packing_max_len": 64,
        "micro_train_batch_size": 2,
        "temperature": 1.3,
        "value_clip": 0.2,
        "estimator": "gae",
        "gamma": 1.0,
        "lambd": 1.0,
        "critic_lambd": None,
        "loss_mean": "token",
        "generate_max_len": 50,
        "advantage_normalization": True,
    }
    unknown = set(overrides) - set(settings)
    if unknown:
        raise KeyError(f"not a field: {unknown}")
    return SimpleNamespace(**settings | overrides)


def make_batch(kind: str = "ragged") -> ppo.Batch:
    """A small rollout, the same on every rank.

    Sizes 2 to 48, groups of 1 to 6, and old values that are far enough to be clipped.
    """
    rng = random.Random(3)
    prompts = [rng.randint(1, 8) for _ in range(16)]
    responses = [1, 40, 2, 33, 5] + [rng.randint(1, 40) for _ in range(11)]
    groups = [7, 7, 2, 2, 2, 9, 4, 4, 4, 4, 4, 4, 0, 0, 7, 2]
    rewards = [float(rng.random() < 0.5) for _ in range(16)]
    if kind == "one":
        # Fewer samples than ranks.
        prompts, responses, groups, rewards = [5], [17], [0], [1.0]
    elif kind == "half flat":
        # Equal rewards in groups 4 and 0, which have no advantage under grpo.
        rewards = [0.1 if group in (4, 0) else float(i % 2) for i, group in enumerate(groups)]
    elif kind == "flat":
        rewards = [0.1] * 16
    elif kind == "equal sizes":
        prompts, responses = [6] * 16, [20] * 16
    elif kind == "copies":
        # 64 times the same sample: a power of two divides without rounding.
        prompts, responses, groups, rewards = [6] * 64, [20] * 64, [0] * 64, [1.0] * 64
    prompt_ids = [[rng.randint(1, 55) for _ in range(length)] for length in prompts]
    response_ids = [[rng.randint(1, 55) for _ in range(length)] for length in responses]
    values = torch.randn(sum(responses), generator=torch.Generator().manual_seed(1)) * 0.5  # (T,)
    if kind == "copies":
        prompt_ids = prompt_ids[:1] * 64
        response_ids = response_ids[:1] * 64
        values = torch.zeros_like(values)
    return batch_of_lists(prompt_ids, response_ids, groups, rewards, {"values": values})


def batch_of_lists(prompt_ids, response_ids, groups=None, rewards=None, tokens=None) -> ppo.Batch:
    """On the CPU; of one group and without rewards if nothing is said."""
    count = len(prompt_ids)
    groups = torch.tensor(groups or [0] * count)
    rewards = torch.tensor(rewards or [0.0] * count, dtype=torch.float64)
    return ppo.Batch(prompt_ids, response_ids, groups, rewards, CPU, tokens or {}, [])


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in models.named_weights(engine)}


def masters(engine) -> torch.Tensor:
    """All fp32 master weights as one vector."""
    parts = [safe_get_full_fp32_param(p).detach().flatten() for p in engine.module.parameters()]
    return torch.cat(parts).clone()


# ---- cells of test_ppo.py ------------------------------------------------------------------------


def cell_step(cfg, spec) -> dict:
    """One SGD step of critic and policy over the whole batch, after the passes without gradient."""
    batch = make_batch(spec.get("batch", "ragged"))
    policy = models.make_policy(cfg, **SGD)
    critic = models.make_critic(cfg, **SGD)
    result = {"critic_start": weights(critic)}
    result["values"] = ppo.compute_values(critic, batch, cfg)
    result["logprobs"] = ppo.compute_logprobs(policy, batch, cfg)
    ppo.compute_advantages(batch, cfg)
    result["stats"] = ppo.train_critic(critic, batch, cfg, step=0)
    result["stats"] |= ppo.train_policy(policy, batch, cfg, step=0, total_steps=1)
    return result | {"critic": weights(critic), "policy": weights(policy)}


def cell_splits(cfg, spec) -> dict:
    """The critic's twelve optimizer steps; which tokens did each of them see?"""
    batch = make_batch()
    critic = models.make_critic(cfg, **SGD)
    start = weights(critic)
    ppo.compute_advantages(batch, cfg)
    seen = []

    def update(*arguments):
        seen.append([])
        return original_update(*arguments)

    def critic_loss(engine, batch, micro, cfg):
        seen[-1] += micro.flat_index[micro.mask > 0].tolist()
        return original_loss(engine, batch, micro, cfg)

    original_update = ppo.update
    original_loss = ppo.critic_loss
    with mock.patch.multiple(ppo, update=update, critic_loss=critic_loss):
        ppo.train_critic(critic, batch, cfg, spec["step"])
    of_steps = []
    for of_ranks in zip(*gather(seen), strict=True):
        of_steps.append(sum(of_ranks, []))
    return {"seen": of_steps, "critic_start": start, "critic": weights(critic)}


def cell_flat(cfg, spec) -> dict:
    """A healthy AdamW step, which fills the moments; then rollouts with nothing to learn from."""
    policy = models.make_policy(cfg)
    start = weights(policy)
    healthy = make_batch("half flat")
    ppo.compute_advantages(healthy, cfg)
    ppo.train_policy(policy, healthy, cfg, step=0, total_steps=2)
    before = weights(policy)
    flat = make_batch("flat")
    ppo.compute_advantages(flat, cfg)
    stats = ppo.train_policy(policy, flat, cfg, step=1, total_steps=2)
    # An empty list of samples is not all of them, though these have signal.
    no_samples = ppo.update(policy, ppo.policy_loss, healthy, [], 1e-3, cfg)
    result = {"start": start, "before": before, "after": weights(policy)}
    result |= {"stats": stats, "no_samples": no_samples}
    return result | {"steps": policy.deepspeed.global_steps}


class Poison(torch.autograd.Function):
    """The identity, with an infinite gradient: a loss that looks healthy."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def cell_nonfinite(cfg, spec) -> dict:
    """A NaN loss, NaN ratio or inf gradient in one micro-batch of one rank only."""
    batch = make_batch()
    loss_of = {"policy": ppo.policy_loss, "critic": ppo.critic_loss}[spec["model"]]
    make = {"policy": models.make_policy, "critic": models.make_critic}[spec["model"]]
    engine = make(cfg, **SGD)
    before = weights(engine)
    ppo.compute_advantages(batch, cfg)
    if spec["how"] == "nan":
        batch.per_token["advantages"][3] = float("nan")
        batch.per_token["returns"][3] = float("nan")
    elif spec["how"] == "ratio":
        # As with --log_ratio. The largest ratio is no sum, and NaN is larger than nothing.
        batch.per_token["logprobs"] = torch.full_like(batch.per_token["advantages"], float("nan"))
    calls = []

    def loss_fn(engine, batch, micro, cfg):
        calls.append(1)
        loss, stats = loss_of(engine, batch, micro, cfg)
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        if spec["how"] == "inf" and is_last_rank and len(calls) == 1:
            loss = Poison.apply(loss)
        return loss, stats

    raised = ""
    try:
        ppo.update(engine, loss_fn, batch, batch.all_samples(), LR, cfg)
    except FloatingPointError as error:
        raised = str(error)
    after = weights(engine)
    unchanged = all(torch.equal(after[name], before[name]) for name in before)
    return {"ranks": gather((raised, unchanged))}


def cell_logging(cfg, spec) -> dict:
    """Ratio to a sampler that agrees exactly, and KL to a reference that is the policy itself."""
    batch = make_batch("half flat")
    policy = models.make_policy(cfg)
    reference = models.make_reference(cfg)
    batch.per_token["logprobs"] = ppo.compute_logprobs(policy, batch, cfg) - 0.01
    batch.per_token["ref_logprobs"] = ppo.compute_logprobs(reference, batch, cfg) - 0.02
    ppo.compute_advantages(batch, cfg)
    return ppo.train_policy(policy, batch, cfg, step=0, total_steps=1)


# ---- cells of test_models.py ---------------------------------------------------------------------


def cell_memory(cfg, spec) -> dict:
    """This process's peak memory after forward and backward of ever more tokens, V = 151,936."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )
    policy = models.Policy(model)
    cfg = config(packing_max_len=17, micro_train_batch_size=999)  # a row for each sample
    peaks = []
    # The first count pays for what does not depend on the number of tokens.
    for count in (16, 256, 2048):
        samples = count // 16
        batch = batch_of_lists([[1]] * samples, [list(range(16))] * samples)
        (micro,) = ppo.micro_batches(batch, batch.all_samples(), cfg)
        logprobs, entropy = policy(micro, 1.0)
        (logprobs.sum() + entropy.sum()).backward()
        # getrusage would begin with the parent's peak.
        status = Path("/proc/self/status").read_text()
        peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024)
    return {"peaks": peaks, "logits": 2048 * 151_936 * 4}


def cell_fresh(cfg, spec) -> dict:
    """The weights of policy and critic as they are made."""
    policy = models.make_policy(cfg, **SGD)
    critic = models.make_critic(cfg, **SGD)
    return {"policy": weights(policy), "critic": weights(critic)}


def cell_calls(cfg, spec) -> dict:
    """How often do the first layers of policy and critic run in a step?"""
    batch = make_batch()
    policy = models.make_policy(cfg, **SGD)
    critic = models.make_critic(cfg, **SGD)
    ppo.compute_advantages(batch, cfg)
    calls = []
    for layer in (policy.module.model.base_model.layers[0], critic.module.model.layers[0]):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    stats = ppo.train_critic(critic, batch, cfg, step=0)
    stats |= ppo.train_policy(policy, batch, cfg, step=0, total_steps=1)
    micro_batches = stats["policy_micro_batches"] + stats["critic_micro_batches"]
    return {"calls": len(calls), "micro_batches": micro_batches}


def cell_bf16(cfg, spec) -> dict:
    """Gradients, read off the fp32 masters: of 64 copies of a sample, of one of them, and of 16
    different samples."""
    result = {}
    for kind, count in (("copies", 64), ("copies", 1), ("equal sizes", 16)):
        batch = make_batch(kind)
        advantages = torch.ones_like(batch.per_token["values"])  # (T,)
        if count == 16:
            advantages = torch.linspace(-1, 1, len(advantages))  # (T,)
        batch.per_token["advantages"] = advantages
        policy = models.make_policy(cfg, **SGD)
        before = masters(policy)
        stats = ppo.update(policy, ppo.policy_loss, batch, list(range(count)), LR, cfg)
        result[str(count)] = stats | {"gradient": (before - masters(policy)) / LR}
    return result


def cell_adamw(cfg, spec) -> dict:
    """Two AdamW steps of the policy."""
    batch = make_batch()
    policy = models.make_policy(cfg)
    start = weights(policy)
    ppo.compute_advantages(batch, cfg)
    stats = [ppo.train_policy(policy, batch, cfg, step, total_steps=2) for step in range(2)]
    groups = []
    for group in policy.deepspeed.optimizer.param_groups:
        groups.append({key: group[key] for key in ("betas", "weight_decay", "lr")})
    result = {"start": start, "policy": weights(policy), "stats": stats, "groups": groups}
    return result | {"offloaded": policy.deepspeed.zero_offload_optimizer() is not None}


# ---- all of them ---------------------------------------------------------------------------------


def run(cell: dict) -> dict:
    cell_function = globals()[f"cell_{cell['kind']}"]
    cfg = config(**cell["settings"])
    if cell["whole"]:
        return cell_function(cfg, cell["spec"])
    engine_config = models.engine_config

    def as_for_a_large_model(cfg, stage: int) -> dict:
        """Everything is sharded, and the embedding does not fit into a bucket."""
        settings = engine_config(cfg, stage)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        settings["zero_optimization"]["reduce_bucket_size"] = 3000
        return settings

    with mock.patch.object(models, "engine_config", as_for_a_large_model):
        return cell_function(cfg, cell["spec"])


def main(folder: Path) -> None:
    common.PATIENCE = timedelta(seconds=120)  # a hang becomes an error
    common.start_distributed()
    torch.set_num_threads(1)
    for cell in json.loads((folder / "cells.json").read_text()):
        result = run(cell)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{cell['name']}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # As train.py: gloo's threads can abort a finalising interpreter.
    os._exit(0)
