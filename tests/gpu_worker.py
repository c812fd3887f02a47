"""Real vLLM and DeepSpeed on one device, for test_gpu.py.

    gpu_worker.py sampler OUT FLAGS of train.py    sampling, sleep and sync
    gpu_worker.py step OUT MODEL ROW_LEN           an optimizer step in bf16, at ZeRO 2 and 3

Each call is a process, so the GPU is empty before and after it. The worker writes what it found to
the JSON file OUT.
"""

import copy
import dataclasses
import gc
import json
import os
import sys
from pathlib import Path

import torch
from conftest import config, run_python
from deepspeed.runtime.zero import GatheredParameters
from ppo_worker import masters
from transformers import AutoModelForCausalLM

import ppo
import reward
import train
from nanoorz import families, models
from nanoorz.ranks import start_distributed
from rollout import Sampler, make_requests, problem_seeds
from tools.bench import held_gib


def worker(kind: str, out: Path, *words) -> dict:
    """Runs this file in its own process. Returns what the file found."""
    run_python(__file__, kind, out, *words, timeout=480)
    return json.loads(out.read_text())


# ---- the sampler ---------------------------------------------------------------------------------


def sampled(sampler, requests) -> list[list[int]]:
    """The token ids of each request's response."""
    found = dict(sampler.generate(requests))
    return [found[position].response_ids for position in range(len(requests))]


def gap(sampler, policy, requests, cfg) -> dict:
    """The mean difference of log-probs over tokens, and the mean of the worst response."""
    samples = [sample for _, sample in sampler.generate(requests, with_logprobs=True)]
    batch = ppo.make_batch(samples, policy.device, cfg)
    apart = (ppo.compute_logprobs(policy, batch, cfg) - batch.per_token["logprobs"]).abs()  # (T,)
    worst = max(part.mean().item() for part in batch.split(apart))
    return {"mean": apart.mean().item(), "worst": worst}


def change(policy, function):
    """Changes each parameter by function(tensor), under ZeRO 3 too."""
    for parameter in policy.module.parameters():
        is_sharded = hasattr(parameter, "ds_id")
        with GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded):
            function(parameter.data)


def sync(sampler, policy) -> float:
    """Returns the GiB on the GPU while the sampler sleeps. To sleep twice is no error."""
    sampler.sleep()
    sampler.sleep()
    held = held_gib()
    sampler.sync(models.named_weights(policy))
    return held


def scales(model) -> float:
    """The sum of the scales of quantized weights."""
    return sum(p.double().sum().item() for name, p in model.named_parameters() if "scale" in name)


def find_of_sampler(*argv: str) -> dict:
    cfg = train.parse_flags(list(argv))
    families.replace_auto(cfg)
    start = held_gib()
    start_distributed()
    sampler = Sampler(cfg)
    problems = []
    for k in range(8):
        ids = sampler.tokenizer.encode(f"{10 + k}+{20 + k}<think>")
        problems.append(reward.Problem(k, "", str(30 + 2 * k), "", ids))
    requests = make_requests(problems, problem_seeds(0, 0, "train", 8), 4, 32, 1.0, 1.0)
    others = [dataclasses.replace(request, seed=request.seed + 1) for request in requests]
    first = sampled(sampler, requests)
    found = {"device": "cuda" if sampler.gpu else "cpu", "count": len(first)}
    # How many samples are the same in another call, in another order, with other seeds.
    found["again"] = sampled(sampler, requests) == first
    found["reversed"] = sum(map(list.__eq__, sampled(sampler, requests[::-1])[::-1], first))
    found["other seeds"] = sum(map(list.__eq__, sampled(sampler, others), first))
    found["scales"] = [sampler.llm.apply_model(scales)]
    sampler.sleep()
    found["kept"] = held_gib() - start

    policy = models.make_policy(cfg)
    sync(sampler, policy)
    found["before"] = gap(sampler, policy, requests, cfg)
    generator = torch.Generator(policy.device).manual_seed(0)

    def add_noise(tensor):
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        # Biases and norms are constant in a random model. They must change too.
        std = tensor.float().std().item() or 0.5
        tensor.add_((0.1 * std * noise).to(tensor.dtype))

    change(policy, add_noise)
    found["stale"] = gap(sampler, policy, requests, cfg)
    found["asleep"] = [sync(sampler, policy) for _ in range(6)]
    found["synced"] = gap(sampler, policy, requests, cfg)
    change(policy, lambda tensor: tensor.mul_(1.5))
    sync(sampler, policy)
    found["scales"].append(sampler.llm.apply_model(scales))
    return found


# ---- an optimizer step ---------------------------------------------------------------------------


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference / the norm of what is expected."""
    difference = found.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


def make_batch(device, count: int, longest: int, vocab: int) -> ppo.Batch:
    """Random samples of 8 to `longest` tokens. A prompt has four tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(8, longest, count).int().tolist()
    ids = [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts = [sample[:4] for sample in ids]
    responses = [sample[4:] for sample in ids]
    groups = torch.arange(count) // 2  # (N,)
    rewards = (torch.arange(count) % 2).double()  # (N,)
    return ppo.Batch(prompts, responses, groups, rewards, device, {}, [])


def gradient_by_hand(policy, batch, cfg) -> torch.Tensor:
    """The fp32 sum of the bf16 gradients of the micro-batches, as one vector."""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in policy.parameters()]
    tokens = int(batch.response_lengths.sum())
    for micro, _ in ppo.micro_batches(batch, batch.all_indices(), cfg):
        losses = ppo.policy_losses(policy, batch, micro, cfg, {})
        ((losses * micro.real).sum() / tokens).backward()
        for total, parameter in zip(sums, policy.parameters()):
            total += parameter.grad.float()
            parameter.grad = None
    return torch.cat([total.flatten() for total in sums])


def find_of_step(model: str, row_len: str) -> dict:
    """Updates at ZeRO 2 and 3 against AdamW by hand, and with a NaN gradient."""
    device = start_distributed()[2]
    changes = {"bf16": True, "attention": "sdpa", "estimator": "grpo", "warmup_updates": 1}
    changes |= {"max_norm": 0.5, "micro_train_batch_size": 1, "packing_max_len": row_len}
    cfg = config(model=model, **changes)
    batch = make_batch(device, 8, cfg.packing_max_len, 60)
    ppo.compute_advantages(batch, cfg)
    plain = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.bfloat16)
    policy = models.Policy(plain.to(device).train(), cfg.model)
    gradient = gradient_by_hand(policy, batch, cfg)
    start = torch.cat([p.detach().float().flatten() for p in policy.parameters()])
    del policy, plain
    # With a small eps Adam's first update is the gradient's sign, which rounding can turn. In the
    # first update the corrected moments are the gradient and its square.
    eps = gradient.abs().mean().item()
    clipped = gradient * min(1.0, cfg.max_norm / gradient.norm().item())
    expected = -cfg.actor_learning_rate * clipped / (clipped.abs() + eps)
    found = {"device": device.type, "norm by hand": gradient.norm().item()}
    for stage in (2, 3):
        learner = models.make_policy(config(model=model, zero_stage=stage, **changes))
        learner.deepspeed.optimizer.param_groups[0]["eps"] = eps
        found[str(stage)] = steps_of(learner, batch, cfg, start, expected)
        del learner
        gc.collect()
        torch.cuda.empty_cache()
    return found


def steps_of(learner, batch, cfg, start, expected) -> dict:
    found = cfg.train_policy(learner, batch, step=0, total_steps=1)
    after = masters(learner)
    found["distance"] = distance(after - start, expected)
    found["sums"] = str(learner.deepspeed.optimizer.gradient_accumulation_dtype)
    batch = copy.deepcopy(batch)
    batch.per_token["advantages"][3] = float("nan")
    try:
        ppo.update(learner, ppo.policy_losses, batch, batch.all_indices(), 1e-3, cfg)
    except FloatingPointError:
        found["unchanged by NaN"] = torch.equal(masters(learner), after)
    return found


if __name__ == "__main__":
    kind, out, *words = sys.argv[1:]
    find = {"sampler": find_of_sampler, "step": find_of_step}[kind]
    Path(out).write_text(json.dumps(find(*words)))
    os._exit(0)
