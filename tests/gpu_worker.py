"""Real vLLM and DeepSpeed on one device, for test_gpu_kernels.py and test_gpu_sampler.py.

    gpu_worker.py sampler OUT FLAGS of train.py    sampling, sleep and sync
    gpu_worker.py step OUT MODEL STAGE ROW_LEN     one optimizer step in bf16

In a process of its own, so that the card is empty before it and after it. It writes what it found
to the JSON file OUT. On a CPU it does the same, without what is known of a GPU's memory.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from conftest import ROOT, clean_environment  # noqa: E402
from deepspeed.runtime.zero import GatheredParameters  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402
from ppo_worker import config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import ppo  # noqa: E402
import reward  # noqa: E402
import train  # noqa: E402
from lib import models  # noqa: E402
from lib.common import start_distributed  # noqa: E402
from rollout import Sampler, make_requests, problem_seeds  # noqa: E402
from tools import memory


def worker(kind: str, out: Path, *words) -> dict:
    """What this file finds, in a process of its own. For the tests."""
    command = [sys.executable, __file__, kind, str(out), *map(str, words)]
    env = clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def free_gib() -> float:
    """Of the card; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] / memory.GIB


def make_problems(tokenizer) -> list[reward.Problem]:
    problems = []
    for k in range(8):
        ids = tokenizer.encode(f"{10 + k}+{20 + k}<think>")
        problems.append(reward.Problem(k, "", str(30 + 2 * k), "", ids))
    return problems


def sampled(sampler, requests) -> list[list[int]]:
    """The ids of each request's response."""
    found = [[]] * len(requests)
    for position, sample in sampler.generate(requests):
        found[position] = sample.response_ids
    return found


def greedy(sampler, problems) -> list[list[int]]:
    return sampled(
        sampler,
        make_requests(problems, problem_seeds(0, 0, "greedy", len(problems)), 2, 32, 0.0, 1.0),
    )


def share_equal(one: list[list[int]], two: list[list[int]]) -> float:
    """Of the tokens at the same places; a response that has ended early differs there."""
    equal = 0
    for a, b in zip(one, two):
        equal += sum(x == y for x, y in zip(a, b))
    return equal / max(1, sum(map(len, one)))


def gap(sampler, policy, problems, cfg) -> dict:
    """As train.check_sampler: the mean difference of log-probs, and the worst response's."""
    requests = make_requests(
        problems, problem_seeds(cfg.seed, 0, "check", len(problems)), 4, 32, 1.0, 1.0
    )
    samples = [sample for _, sample in sampler.generate(requests, with_logprobs=True)]
    batch = ppo.make_batch(samples, policy.device, cfg)
    apart = (ppo.compute_logprobs(policy, batch, cfg) - batch.per_token["logprobs"]).abs()  # (T,)
    worst = max(part.mean().item() for part in batch.split(apart))
    return {"mean": apart.mean().item(), "worst": worst}


def seeds(sampler, problems) -> dict:
    """What a sample depends on."""
    requests = make_requests(problems, problem_seeds(1, 0, "train", len(problems)), 4, 32, 1.0, 1.0)
    others = [dataclasses.replace(request, seed=request.seed + 1) for request in requests]
    first = sampled(sampler, requests)
    return {
        "again": sampled(sampler, requests) == first,
        "reversed": sum(a == b for a, b in zip(sampled(sampler, requests[::-1])[::-1], first)),
        "other seeds": sum(a == b for a, b in zip(sampled(sampler, others), first)),
        "count": len(first),
    }


def sleeps(sampler, policy, before: float) -> dict:
    """What is free when it sleeps, six times, above what its start left; twice is no error."""
    free = []
    for _ in range(6):
        sampler.sleep()
        sampler.sleep()
        free.append(free_gib() - before)
        sampler.sync(models.named_weights(policy))
    return {"free": free}


@torch.no_grad()
def edit(policy, change) -> None:
    """Calls change(name, tensor) for each parameter, and keeps what it does under ZeRO-3 too."""
    for name, parameter in policy.module.named_parameters():
        is_sharded = hasattr(parameter, "ds_id")
        with GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded):
            change(name, parameter.data)


def syncs(sampler, policy, problems, cfg) -> dict:
    """Noise on every parameter reaches the sampler by a sync, and goes again by another one."""
    first = greedy(sampler, problems)
    found = {"before": gap(sampler, policy, problems, cfg)}
    old = {}
    generator = torch.Generator(policy.device).manual_seed(0)

    def disturb(name, tensor) -> None:
        old[name] = tensor.clone()
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        # Biases and norms are constant in a random model, and change too.
        std = tensor.float().std().item() or 0.5
        tensor.add_((0.1 * std * noise).to(tensor.dtype))

    def restore(name, tensor) -> None:
        tensor.copy_(old[name])

    edit(policy, disturb)
    found["stale"] = gap(sampler, policy, problems, cfg)
    sampler.sleep()
    sampler.sync(models.named_weights(policy))
    found["synced"] = gap(sampler, policy, problems, cfg)
    found["same ids with noise"] = share_equal(first, greedy(sampler, problems))
    edit(policy, restore)
    sampler.sleep()
    sampler.sync(models.named_weights(policy))
    found["same ids without"] = share_equal(first, greedy(sampler, problems))
    return found


def weight_bytes(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def scales(model) -> float:
    """A sum over the scales of quantized weights."""
    return sum(p.double().sum().item() for name, p in model.named_parameters() if "scale" in name)


def find_of_sampler(*argv: str) -> dict:
    cfg = train.parse_flags(list(argv))
    before = free_gib()
    start_distributed()
    sampler = Sampler(cfg)
    found = {"device": "cuda" if sampler.gpu else "cpu"}
    problems = make_problems(sampler.tokenizer)
    found["seeds"] = seeds(sampler, problems)
    found["bytes"] = sampler.llm.apply_model(weight_bytes)[0]
    found["scales"] = sampler.llm.apply_model(scales)
    sampler.sleep()
    found["asleep"] = free_gib() - before
    policy = models.make_policy(cfg)
    sampler.sync(models.named_weights(policy))
    found["sync"] = syncs(sampler, policy, problems, cfg)
    before = free_gib()
    found["sleep"] = sleeps(sampler, policy, before)
    found["gap"] = gap(sampler, policy, problems, cfg)
    edit(policy, lambda name, tensor: tensor.mul_(1.5))
    sampler.sleep()
    sampler.sync(models.named_weights(policy))
    found["scales"] += sampler.llm.apply_model(scales)
    return found


# ---- an optimizer step ---------------------------------------------------------------------------


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    difference = found.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


def make_batch(device, count: int, longest: int, vocab: int, alone: bool = False) -> ppo.Batch:
    """Random samples of 8 to `longest` tokens, of which 4 are the prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(8, longest, count).int().tolist()
    ids = [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts = [sample[:4] for sample in ids]
    responses = [sample[4:] for sample in ids]
    groups = torch.arange(count) // 2  # (N,)
    rewards = (torch.arange(count) % 2).double()  # (N,)
    return ppo.Batch(prompts, responses, groups, rewards, device, {}, [])


def with_estimator(cfg, name: str) -> SimpleNamespace:
    return SimpleNamespace(**vars(cfg) | {"estimator": name})


def masters(engine) -> torch.Tensor:
    """All fp32 master weights as one vector."""
    parts = [safe_get_full_fp32_param(p).flatten() for p in engine.module.parameters()]
    return torch.cat(parts).clone()


def gradients_by_hand(policy, batch, cfg) -> list[torch.Tensor]:
    """fp32 sums of the bf16 gradients of the micro-batches."""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in policy.parameters()]
    tokens = int(batch.response_lengths.sum())
    for micro in ppo.micro_batches(batch, batch.all_samples(), cfg):
        loss, _ = ppo.policy_loss(policy, batch, micro, cfg)
        (loss / tokens).backward()
        for total, parameter in zip(sums, policy.parameters()):
            total += parameter.grad.float()
            parameter.grad = None
    return sums


def adam_by_hand(start, gradient, cfg, eps: float) -> torch.Tensor:
    """The first step of AdamW with betas 0.9 and 0.95, after clipping at cfg.max_norm."""
    gradient = gradient * min(1.0, cfg.max_norm / gradient.norm().item())
    first = 0.1 * gradient / (1 - 0.9)
    second = 0.05 * gradient**2 / (1 - 0.95)
    return start - cfg.actor_learning_rate * first / (second.sqrt() + eps)


def find_of_step(model: str, stage: str, row_len: str) -> dict:
    """A step of the engine and one by hand, and then a step whose gradient is NaN."""
    _, _, device, _ = start_distributed()
    cfg = config(model, bf16=True, zero_stage=int(stage), temperature=1.0)
    cfg.actor_learning_rate = 1e-3
    cfg.max_norm = 0.5
    cfg.micro_train_batch_size = 1
    cfg.packing_max_len = int(row_len)
    batch = make_batch(device, 8, cfg.packing_max_len, 60)
    cfg = with_estimator(cfg, "grpo")
    ppo.compute_advantages(batch, cfg)
    found = {"device": device.type}
    found["rows"] = len(ppo.micro_batches(batch, batch.all_samples(), cfg))

    plain = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.bfloat16)
    policy = models.Policy(plain.to(device).train())
    sums = gradients_by_hand(policy, batch, cfg)
    gradient = torch.cat([total.flatten() for total in sums])
    start = torch.cat([p.detach().float().flatten() for p in policy.parameters()])
    # Without it the first step of Adam is the gradient's sign, which rounding can turn.
    eps = gradient.abs().mean().item()
    expected = adam_by_hand(start, gradient, cfg, eps)
    found["norm by hand"] = gradient.norm().item()
    del policy, plain, sums

    engine = models.make_policy(cfg, optimizer_class=functools.partial(models.ADAMW, eps=eps))
    found["starts equal"] = torch.equal(masters(engine), start)
    stats = ppo.train_policy(engine, batch, cfg, step=0, total_steps=1)
    found |= {name: stats[name] for name in ("policy_micro_batches", "policy_grad_norm")}
    after = masters(engine)
    found["distance"] = distance(after - start, expected - start)
    found["skipped"] = engine.deepspeed.skipped_steps
    found["sums"] = str(engine.deepspeed.optimizer.gradient_accumulation_dtype)

    batch.per_token["advantages"][3] = float("nan")
    found["NaN is refused"] = False
    try:
        ppo.update(engine, ppo.policy_loss, batch, batch.all_samples(), 1e-3, cfg)
    except FloatingPointError:
        found["NaN is refused"] = True
    found["unchanged by NaN"] = torch.equal(masters(engine), after)
    return found


def main(kind: str, out: str, *words: str) -> None:
    find = {"sampler": find_of_sampler, "step": find_of_step}[kind]
    Path(out).write_text(json.dumps(find(*words)))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
