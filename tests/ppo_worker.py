"""Runs cells of test_ppo.py on the real DeepSpeed engines: `[accelerate launch ...] ppo_worker.py FOLDER`.

FOLDER/cells.json holds a list of {"name", "kind", ...}; each cell's result goes to FOLDER/NAME.pt when it is there. One
process group runs all cells, since a launch costs far more than a cell. Every engine is built by ppo.make_policy or
ppo.make_critic; only their optimizer is swapped for SGD, whose step is the gradient itself."""
import contextlib
import functools
import json
import os
import random
import re
import socket
import sys
import types
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

import ppo  # noqa: E402

LR = 2.0  # large, so that rounding of the weights does not blur the gradient read off their change


def config(model, **overrides) -> types.SimpleNamespace:
    """The fields of train.Config that ppo.py reads; no clipping, no warm-up, and a temperature that matters."""
    values = {"model": str(model), "seed": 5, "bf16": False, "attention": "sdpa", "gradient_checkpointing": False,
              "zero_stage": 0, "zero3_persistence_threshold": 0, "max_norm": 1e9, "actor_learning_rate": LR,
              "critic_learning_rate": LR, "packing_max_len": 64, "micro_train_batch_size": 2, "temperature": 1.3,
              "value_clip": 0.2, "estimator": "gae", "gamma": 1.0, "lambd": 1.0, "advantage_normalization": True,
              "log_ratio": False, "log_kl": False, "tis_cap": None, "fuse_values": False}
    if unknown := set(overrides) - set(values):
        raise KeyError(f"not a field: {unknown}")
    return types.SimpleNamespace(**values | overrides)


def make_batch(kind: str = "ragged") -> ppo.Batch:
    """A small rollout, the same on every rank; sizes 2 to 48, groups of 1 to 6, old values far enough to be clipped."""
    rng = random.Random(3)
    prompts = [rng.randint(1, 8) for _ in range(16)]
    responses = [1, 40, 2, 33, 5] + [rng.randint(1, 40) for _ in range(11)]
    groups, rewards = [7, 7, 2, 2, 2, 9, 4, 4, 4, 4, 4, 4, 0, 0, 7, 2], [float(rng.random() < 0.5) for _ in range(16)]
    if kind == "one":  # fewer samples than ranks
        prompts, responses, groups, rewards = [5], [17], [0], [1.0]
    elif kind == "half flat":  # group 4 and group 0 have equal rewards: zero advantage under grpo
        rewards = [0.1 if g in (4, 0) else float(i % 2) for i, g in enumerate(groups)]
    elif kind == "flat":
        rewards = [0.1] * 16
    elif kind == "equal sizes":
        prompts, responses = [6] * 16, [20] * 16
    elif kind == "copies":  # 64 times the same sample: a power of two divides without rounding
        prompts, responses, groups, rewards = [6] * 64, [20] * 64, [0] * 64, [1.0] * 64
    tokens = [[rng.randint(1, 55) for _ in range(n)] for n in prompts + responses]
    if kind == "copies":
        tokens = [tokens[0]] * 64 + [tokens[64]] * 64
    values = torch.randn(sum(responses), generator=torch.Generator().manual_seed(1)) * 0.5  # (T,)
    if kind == "copies":
        values = torch.zeros_like(values)
    return ppo.Batch(tokens[:len(prompts)], tokens[len(prompts):], torch.tensor(groups),
                     torch.tensor(rewards, dtype=torch.float64), {"values": values})


@contextlib.contextmanager
def sgd():
    """make_policy and make_critic with SGD in place of AdamW."""
    original = ppo.make_engine
    ppo.make_engine = functools.partial(original, optimizer_class=torch.optim.SGD)
    yield
    ppo.make_engine = original


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in ppo.named_weights(engine)}


def masters(engine) -> torch.Tensor:
    """All fp32 master weights as one vector."""
    return torch.cat([safe_get_full_fp32_param(p).detach().flatten().clone() for p in engine.module.parameters()])


def everyone(batch) -> list[int]:
    return list(range(len(batch.response_ids)))


class Poison(torch.autograd.Function):
    """The identity, with an infinite gradient: a loss that looks healthy."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def cell_step(cfg, batch: str = "ragged", **_) -> dict:
    """One SGD step of critic and policy over the whole batch, and the passes without gradient before it."""
    batch, out = make_batch(batch), {}
    with sgd():
        policy, critic = ppo.make_policy(cfg), ppo.make_critic(cfg)
    out["critic_start"] = weights(critic)
    out["values"] = ppo.token_pass(batch, cfg, "cpu", critic)
    out["logprobs"] = ppo.token_pass(batch, cfg, "cpu", lambda rows: policy(rows, cfg.temperature)[0])
    ppo.compute_advantages(batch, cfg, "cpu")
    calls, progress = [], []
    for layer in (policy.module.model.base_model.layers[0], critic.module.model.layers[0]):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    report = lambda totals, *done: progress.append(done)  # noqa: E731
    out["critic_stats"] = ppo.update(critic, ppo.critic_loss, batch, everyone(batch), cfg, LR, "cpu", report)
    out["policy_stats"] = ppo.update(policy, ppo.policy_loss, batch, everyone(batch), cfg, LR, "cpu", report)
    out |= {"critic": weights(critic), "policy": weights(policy), "progress": progress, "mlp_calls": len(calls)}
    return out


def cell_splits(cfg, **_) -> dict:
    """train.py's critic phase: 12 optimizer steps over array_split of one permutation; what did each step see?"""
    batch, seen = make_batch(), []
    with sgd():
        critic = ppo.make_critic(cfg)
    start = weights(critic)
    ppo.compute_advantages(batch, cfg, "cpu")

    def loss_fn(engine, batch, rows, cfg):
        seen[-1] += rows.index[rows.weight > 0].tolist()
        return ppo.critic_loss(engine, batch, rows, cfg)

    for part in np.array_split(np.random.default_rng(0).permutation(len(batch.response_ids)), 12):
        seen.append([])
        ppo.update(critic, loss_fn, batch, part, cfg, 0.02, "cpu")
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, seen)
    seen = [[token for part in parts for token in part[k]] for k in range(12)]
    return {"seen": seen, "critic_start": start, "critic": weights(critic)}


def cell_flat(cfg, **_) -> dict:
    """A healthy AdamW step, which fills the moments, then a rollout of nothing but flat groups."""
    policy = ppo.make_policy(cfg)
    for kind in ("half flat", "flat"):
        before, batch = weights(policy), make_batch(kind)
        ppo.compute_advantages(batch, cfg, "cpu")
        stats = ppo.update(policy, ppo.policy_loss, batch, everyone(batch), cfg, 1e-3, "cpu")
    adam = [{key: group[key] for key in ("betas", "weight_decay", "lr")} for group in policy.optimizer.param_groups]
    return {"before": before, "after": weights(policy), "stats": stats, "steps": policy.global_steps, "adam": adam}


def cell_nonfinite(cfg, how: str = "nan", model: str = "policy", **_) -> dict:
    """A NaN loss or an inf gradient in one micro-batch of one rank only."""
    batch, loss_fn = make_batch(), {"policy": ppo.policy_loss, "critic": ppo.critic_loss}[model]
    with sgd():
        engine = {"policy": ppo.make_policy, "critic": ppo.make_critic}[model](cfg)
    before, raised, count = weights(engine), "", []
    ppo.compute_advantages(batch, cfg, "cpu")
    if how == "nan":
        batch.tokens["advantages"][3] = batch.tokens["returns"][3] = float("nan")
    if how == "ratio":  # with --log_ratio: the largest of the ratios is not a sum, and NaN is larger than nothing
        batch.tokens["logprobs"] = torch.full_like(batch.tokens["advantages"], float("nan"))

    def poisoned(engine, batch, rows, cfg):
        count.append(1)
        loss, stats = loss_fn(engine, batch, rows, cfg)
        bad = dist.get_rank() == dist.get_world_size() - 1 and len(count) == 1
        return Poison.apply(loss) if bad else loss, stats

    try:
        ppo.update(engine, poisoned if how == "inf" else loss_fn, batch, everyone(batch), cfg, LR, "cpu")
    except FloatingPointError as error:
        raised = str(error)
    parts, after = [None] * dist.get_world_size(), weights(engine)
    dist.all_gather_object(parts, (raised, all(torch.equal(after[name], before[name]) for name in before)))
    return {"ranks": parts}


def cell_bf16(cfg, **_) -> dict:
    """Gradients, read off the fp32 masters: of 64 copies of a sample, of one of them, of 16 different samples."""
    out = {}
    for kind, samples in (("copies", 64), ("copies", 1), ("equal sizes", 16)):
        batch = make_batch(kind)
        batch.tokens["advantages"] = torch.linspace(-1, 1, len(batch.tokens["values"])) if samples == 16 else \
            torch.ones_like(batch.tokens["values"])  # (T,)
        with sgd():
            policy = ppo.make_policy(cfg)
        before = masters(policy)
        stats = ppo.update(policy, ppo.policy_loss, batch, list(range(samples)), cfg, LR, "cpu")
        out[str(samples)] = {"gradient": (before - masters(policy)) / LR, "micro_batches": stats["micro_batches"],
                             "norm": stats["grad_norm"]}
    return out


def cell_logging(cfg, **_) -> dict:
    """Ratio to a sampler that agrees exactly, and KL to a reference that is the policy itself."""
    batch, policy, reference = make_batch("half flat"), ppo.make_policy(cfg), ppo.make_policy(cfg, trained=False)
    logprobs = ppo.token_pass(batch, cfg, "cpu", lambda rows: policy(rows, cfg.temperature)[0])  # (T,)
    ref_logprobs = ppo.token_pass(batch, cfg, "cpu", lambda rows: reference(rows, cfg.temperature)[0])  # (T,)
    batch.tokens |= {"logprobs": logprobs - 0.01, "ref_logprobs": ref_logprobs - 0.02}
    ppo.compute_advantages(batch, cfg, "cpu")
    return ppo.update(policy, ppo.policy_loss, batch, everyone(batch), cfg, 1e-3, "cpu")


def cell_memory(cfg, **_) -> dict:
    """Growth of this process's peak memory over forward and backward of 256 and then 2,048 tokens at V = 151,936."""
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=151_936, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True))
    policy, peaks, one_row_each = ppo.Policy(model), [], config("", packing_max_len=17, micro_train_batch_size=999)
    for count in (16, 256, 2048):  # the first pays for what does not depend on the number of tokens
        batch = ppo.Batch([[1]] * (count // 16), [list(range(16))] * (count // 16), torch.zeros(count // 16),
                          torch.zeros(count // 16), {})
        rows, = ppo.micro_batches(batch, everyone(batch), one_row_each, "cpu")
        logprobs, entropy = policy(rows, 1.0)
        (logprobs.sum() + entropy.sum()).backward()
        status = Path("/proc/self/status").read_text()  # not getrusage, which begins with the parent's peak
        peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024)
    return {"peaks": peaks, "logits": 2048 * 151_936 * 4}


def main(folder: Path) -> None:
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(s.getsockname()[1])}
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=120))  # a hang becomes an error
    for cell in json.loads((folder / "cells.json").read_text()):
        cfg = config(**cell.pop("config"))
        result = globals()["cell_" + cell.pop("kind")](cfg, **cell)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{cell['name']}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # as train.py: gloo's threads can abort a finalising interpreter
