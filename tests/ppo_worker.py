"""Cells: small jobs on real DeepSpeed engines, many to a launch, which costs far more than a cell.

A cell names a function cell_KIND. What that returns on rank 0 is the cell's result. One rank is the
process of the tests; two ranks are two processes of this file: `ppo_worker.py FOLDER` runs the list
in FOLDER/cells.json. Their optimizer is mostly SGD, whose step is the gradient itself.
"""

import ctypes
import functools
import json
import os
import random
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import kernels  # noqa: F401 (varlen_attn's kernel on a CPU)
import tiny
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, z3_leaf_module
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import ppo
from nanoorz import families, models, ranks
from nanoorz.ranks import gather

LR = 2.0  # large: rounding of the weights must not blur the gradient read off their change
SGD_KINDS = ("step", "nonfinite", "bf16", "family", "taught")  # their update is the gradient itself
CPU = torch.device("cpu")
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


# No clipping of gradients, no warm-up, and a temperature that matters.
SETTINGS = {"max_norm": 1e9, "temperature": 1.3, "attention": "sdpa", "warmup_updates": 1}
SETTINGS |= {"actor_learning_rate": LR, "critic_learning_rate": LR, "critic_updates": 1}
SETTINGS |= {"micro_train_batch_size": 2, "generate_max_len": 50}


def config(model="-", **changes):
    return conftest.config(**SETTINGS | {"model": model} | changes)


def cell(name: str, kind: str, tied=True, whole=False, spec=None, **settings) -> dict:
    """cell_KIND gets the settings and `spec`.

    tied: of the model's embeddings, or the key of another model (reader). whole: small parameters
    stay whole under ZeRO-3, as in a run; else everything is sharded and the embedding exceeds a
    bucket, as in a large model.
    """
    options = {"name": name, "kind": kind, "tied": tied, "whole": whole, "spec": spec or {}}
    return options | {"settings": settings}


def make_models(root: Path) -> dict[bool, Path]:
    """Tied and untied. Their configs ask for dropout, which would break ratio = 1."""
    folders = {}
    for tied in (True, False):
        folders[tied] = tiny.make_model(root / f"tied-{tied}", tied=tied)
        path = folders[tied] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.3}))
    # Teachers with more ids than the policy's 64, and with fewer.
    for name, vocab in (("large", 80), ("small", 58)):
        folders[name] = tiny.make_model(root / name, vocab=vocab, hidden=96, layers=1, seed=3)
    return folders


def reader(one: list[dict], two: list[dict], folder: Path, folders: dict):
    """result(ranks, name): of a cell of `one`, run here, or of `two`, launched once."""
    for job in (*one, *two):
        job["settings"]["model"] = str(folders[job["tied"]])
        if "teacher" in job["spec"]:
            job["settings"]["teacher"] = str(folders[job["spec"]["teacher"]])

    @functools.cache
    def launch() -> str:
        (folder / "cells.json").write_text(json.dumps(two))
        with conftest.started_ranks([__file__, folder]) as ranks:
            said = [process.communicate(timeout=800) for process in ranks]
        return "".join(text[-2000:] for texts in said for text in texts)

    @functools.cache
    def result(ranks: int, name: str) -> dict:
        if ranks == 1:
            return run(next(job for job in one if job["name"] == name))
        log = launch()
        path = folder / f"{name}.pt"
        assert path.exists(), f"cell {name!r} left no result:\n{log[-4000:]}"
        return torch.load(path)

    return result


def make_batch(kind: str = "ragged") -> ppo.Batch:
    """A small rollout of sizes 2 to 48, groups of 1 to 6, and old values that are to be clipped."""
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
        # 8 times the same sample: a power of two divides without rounding.
        prompts, responses, groups, rewards = [6] * 8, [20] * 8, [0] * 8, [1.0] * 8
    drawn = [
        with_replies(rng, length) if kind == "turns" else [True] * length for length in responses
    ]
    prompt_ids = [[rng.randint(1, 55) for _ in range(length)] for length in prompts]
    response_ids = [[rng.randint(1, 55) for _ in range(length)] for length in responses]
    count = sum(map(sum, drawn))
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.5  # (T,)
    if kind == "copies":
        prompt_ids, response_ids = prompt_ids[:1] * 8, response_ids[:1] * 8
        values = torch.zeros_like(values)
    tokens = {"values": values}
    return batch_of_lists(prompt_ids, response_ids, groups, rewards, tokens, drawn)


def with_replies(rng, length: int) -> list[bool]:
    """Which tokens of a response are drawn: the first one, the last one, and some in between."""
    inner = [rng.random() < 0.6 for _ in range(length - 2)]
    return [True, *inner, True][:length]


def batch_of_lists(
    prompt_ids, response_ids, groups=None, rewards=None, tokens=None, drawn=None
) -> ppo.Batch:
    """On the CPU; of one group and without rewards if nothing is said."""
    count = len(prompt_ids)
    groups = torch.tensor(groups or [0] * count)
    rewards = torch.tensor(rewards or [0.0] * count, dtype=torch.float64)
    return ppo.Batch(prompt_ids, response_ids, groups, rewards, CPU, tokens or {}, [], drawn)


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in models.named_weights(engine)}


def masters(engine) -> torch.Tensor:
    """All fp32 master weights as one vector."""
    parts = [safe_get_full_fp32_param(p).flatten() for p in engine.module.parameters()]
    return torch.cat(parts).detach()


# ---- cells ---------------------------------------------------------------------------------------


def cell_step(cfg, spec) -> dict:
    """One SGD update of critic and policy, after the passes without gradient. calls: of both
    models' first layers in the update."""
    batch = make_batch(spec["batch"])
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg)
    result = {"policy_start": weights(policy), "critic_start": weights(critic)}
    result["values"] = ppo.forward_pass(batch, cfg, critic)
    result["logprobs"] = ppo.compute_logprobs(policy, batch, cfg)
    calls = []
    for layer in (policy.module.model.base_model.layers[0], critic.module.model.layers[0]):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    cfg.token_passes(policy, None, batch, spec["step"])
    ppo.compute_advantages(batch, cfg)
    result["stats"] = cfg.train_critic(critic, batch, spec["step"])
    result["stats"] |= cfg.train_policy(policy, batch, spec["step"], total_steps=99)
    return result | {"critic": weights(critic), "policy": weights(policy), "calls": len(calls)}


def cell_flat(cfg, spec) -> dict:
    """A healthy AdamW update, which fills the moments; then a step with nothing to learn from."""
    policy = models.make_policy(cfg)
    result = {"start": weights(policy)}
    healthy = make_batch("half flat")
    ppo.compute_advantages(healthy, cfg)
    cfg.train_policy(policy, healthy, step=0, total_steps=2)
    result |= {"before": weights(policy)}
    flat = make_batch("flat")
    ppo.compute_advantages(flat, cfg)
    result["stats"] = cfg.train_policy(policy, flat, step=1, total_steps=2)
    return result | {"after": weights(policy)}


def cell_none(cfg, spec) -> dict:
    """A step in which all responses are truncated. The policy's update is one of AdamW."""
    batch = make_batch()
    batch.samples = [SimpleNamespace(finish_reason="length")] * 16
    policy = models.make_policy(cfg)
    result = {"policy_start": weights(policy), "stats": {}}
    critic = models.make_critic(cfg) if cfg.estimator == "gae" else None
    cfg.token_passes(policy, critic, batch, 0)
    result["stats"] |= ppo.compute_advantages(batch, cfg)
    if critic:
        result["critic_start"] = weights(critic)
        result["stats"] |= cfg.train_critic(critic, batch, 0)
        result["critic"] = weights(critic)
    result["stats"] |= cfg.train_policy(policy, batch, step=0, total_steps=2)
    return result | {"policy": weights(policy)}


def cell_nonfinite(cfg, spec) -> dict:
    """A NaN loss or inf gradient in one micro-batch of one rank only."""
    batch = make_batch()
    engine = getattr(models, f"make_{spec['model']}")(cfg)
    before = weights(engine)
    ppo.compute_advantages(batch, cfg)
    if spec["how"] == "nan":
        batch.per_token["advantages"][3] = float("nan")
        batch.per_token["returns"][3] = float("nan")
    is_sick = spec["how"] == "inf" and dist.get_rank() == dist.get_world_size() - 1
    hooks = []

    def losses_of(*inputs):
        losses = getattr(ppo, f"{spec['model']}_losses")(*inputs)
        if is_sick and not hooks:
            # The loss looks healthy.
            hooks.append(losses.register_hook(lambda gradient: gradient * float("inf")))
        return losses

    raised = ""
    try:
        ppo.update(engine, losses_of, batch, batch.all_indices(), LR, cfg)
    except FloatingPointError as error:
        raised = str(error)
    unchanged = all(map(torch.equal, before.values(), weights(engine).values()))
    return {"ranks": gather((raised, unchanged))}


def cell_logging(cfg, spec) -> dict:
    """Ratio to a sampler that agrees exactly, and KL to a reference that is the policy itself."""
    batch = make_batch("half flat")
    policy = models.make_policy(cfg)
    batch.per_token["logprobs"] = ppo.compute_logprobs(policy, batch, cfg) - 0.01
    cfg.token_passes(policy, None, batch, step=0)
    batch.per_token["ref_logprobs"] -= 0.02
    ppo.compute_advantages(batch, cfg)
    return cfg.train_policy(policy, batch, step=0, total_steps=1)


def make_taught_batch() -> ppo.Batch:
    """Responses with replies. One token of the policy is none of the small teacher's."""
    batch = make_batch("turns")
    batch.response_ids[1][0] = 63
    return batch


def cell_taught(cfg, spec) -> dict:
    """One SGD update of the policy that a teacher scores."""
    batch = make_taught_batch()
    policy = models.make_policy(cfg)
    result = {"start": weights(policy)}
    cfg.token_passes(policy, None, batch, 0)
    ppo.compute_advantages(batch, cfg)
    result |= {"stats": cfg.train_policy(policy, batch, step=0, total_steps=99)}
    result |= {"tokens": batch.per_token, "line": cfg.metrics({}, [], batch)}
    return result | {"after": weights(policy)}


def cell_memory(cfg, spec) -> dict:
    """This process's peak memory after forward and backward of ever more tokens, V = 151,936, and
    the head's gradients of a token."""
    if dist.get_rank() > 0:
        return {}
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 20_000_000)  # freed memory goes back at once
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 151_936}
    policy = models.Policy(Qwen2ForCausalLM(Qwen2Config(**shape)), None)
    peaks = []
    gradients = []
    # The first count pays for what does not depend on the number of tokens.
    for count in (16, 256, 640):
        samples = count // 16
        batch = batch_of_lists([[1]] * samples, [list(range(16))] * samples)
        micro = ppo.build_rows(batch, [[i] for i in batch.all_indices()])
        logprobs, entropy = policy(micro, cfg.temperature)
        policy.zero_grad()
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append(policy.model.lm_head.weight.grad / count)
        # getrusage would begin with the parent's peak.
        status = Path("/proc/self/status").read_text()
        peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024)
    return {"peaks": peaks, "logits": 640 * 151_936 * 4, "gradients": gradients}


def cell_bf16(cfg, spec) -> dict:
    """Gradients of 8 samples, read off the fp32 masters: all others, or copies, or one alone."""
    result = {}
    kinds = {"others": ("equal sizes", 8)}
    if dist.get_world_size() == 1:
        kinds |= {"copies": ("copies", 8), "one": ("copies", 1)}
    for name, (kind, count) in kinds.items():
        batch = make_batch(kind)
        advantages = torch.ones_like(batch.per_token["values"])  # (T,)
        if name == "others":
            advantages = torch.linspace(-1, 1, len(advantages))  # (T,)
        batch.per_token["advantages"] = advantages
        policy = models.make_policy(cfg)
        before = masters(policy)
        stats = ppo.update(policy, ppo.policy_losses, batch, list(range(count)), LR, cfg)
        result[name] = stats | {"gradient": (before - masters(policy)) / LR}
    return result


def cell_adamw(cfg, spec) -> dict:
    """Two AdamW updates of the policy."""
    batch = make_batch()
    policy = models.make_policy(cfg)
    start = weights(policy)
    ppo.compute_advantages(batch, cfg)
    stats = [cfg.train_policy(policy, batch, step, total_steps=2) for step in range(2)]
    offloaded = policy.deepspeed.zero_offload_optimizer() is not None
    (group,) = policy.deepspeed.optimizer.param_groups
    numbers = {key: group[key] for key in ("betas", "weight_decay", "lr")}
    result = {"start": start, "policy": weights(policy), "stats": stats}
    return result | {"numbers": numbers, "offloaded": offloaded}


def freeze_embedding(model):
    """As --variant lora does, beside other weights."""
    model.get_input_embeddings().weight.requires_grad = False
    return model


def cell_family(cfg, spec) -> dict:
    """The gradient of an SGD update of the policy, and the number of layers that are one unit."""
    families.replace_auto(cfg)
    if "frozen" in spec:
        cfg.policy_model = freeze_embedding
    batch = make_batch()
    policy = models.make_policy(cfg)
    start = weights(policy)
    ppo.compute_advantages(batch, cfg)
    cfg.train_policy(policy, batch, step=0, total_steps=1)
    gradient = {name: (start[name] - tensor) / LR for name, tensor in weights(policy).items()}
    layers = [x for x in policy.module.modules() if isinstance(x, GradientCheckpointingLayer)]
    return {"gradient": gradient, "layers": sum(map(z3_leaf_module, layers))}


def gradient_of_update(learner, batch, cfg) -> torch.Tensor:
    """The gradient of an update of all samples, in fp32. The learner is not changed."""
    found = []

    def keep(lr) -> float:
        gradients = map(safe_get_full_grad, learner.module.parameters())
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
        return 0.0

    learner.apply_update = keep
    losses_of = getattr(ppo, f"{learner.name}_losses")
    ppo.update(learner, losses_of, batch, batch.all_indices(), 0.0, cfg)
    return found[0]


# ---- all of them ---------------------------------------------------------------------------------


def run(cell: dict) -> dict:
    cell_function = globals()[f"cell_{cell['kind']}"]
    engine_config = models.engine_config

    def of_cell(*inputs) -> dict:
        settings = engine_config(*inputs)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    cfg = config(**cell["settings"])
    changes = {} if cell["whole"] else {"engine_config": of_cell, "BUCKET": 3000}
    if cell["kind"] in SGD_KINDS:
        changes["make_optimizer"] = torch.optim.SGD
    with mock.patch.multiple(models, **changes):
        return cell_function(cfg, cell["spec"])


if __name__ == "__main__":
    ranks.TIMEOUT = timedelta(seconds=120)  # a hang becomes an error
    ranks.start_distributed()
    folder = Path(sys.argv[1])
    for job in json.loads((folder / "cells.json").read_text()):
        result = run(job)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{job['name']}.pt")
    dist.barrier()
    # As train.py: gloo's threads can abort a finalising interpreter.
    os._exit(0)
