"""Real vLLM and DeepSpeed on one device, for test_gpu.py: `gpu_worker.py OUT FLAGS of train.py`.

In a process of its own, so that the card is empty before it and after it. It writes what it found
to the JSON file OUT. On a CPU it does the same, without what is known of a GPU's memory.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from deepspeed.runtime.zero import GatheredParameters  # noqa: E402

import ppo  # noqa: E402
import reward  # noqa: E402
import train  # noqa: E402
from lib import memory, models  # noqa: E402
from lib.common import start_distributed  # noqa: E402
from rollout import Sampler, make_requests  # noqa: E402


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
    return sampled(sampler, make_requests(problems, 2, (0, 0, "greedy"), (32, 0.0, 1.0)))


def share_equal(one: list[list[int]], two: list[list[int]]) -> float:
    """Of the tokens at the same places; a response that has ended early differs there."""
    equal = 0
    for a, b in zip(one, two):
        equal += sum(x == y for x, y in zip(a, b))
    return equal / max(1, sum(map(len, one)))


def gap(sampler, policy, problems, cfg) -> dict:
    """As train.check_sampler: the mean difference of log-probs, and the worst response's."""
    requests = make_requests(problems, 4, (cfg.seed, 0, "check"), (32, 1.0, 1.0))
    samples = [sample for _, sample in sampler.generate(requests, logprobs=True)]
    batch = ppo.Batch.of(samples, policy.device)
    apart = (ppo.logprobs(policy, batch, cfg) - batch.tokens["logprobs"]).abs()  # (T,)
    worst = max(part.mean().item() for part in batch.split(apart))
    return {"mean": apart.mean().item(), "worst": worst}


def seeds(sampler, problems) -> dict:
    """What a sample depends on."""
    requests = make_requests(problems, 4, (1, 0, "train"), (32, 1.0, 1.0))
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
        tensor.add_((0.5 * (tensor.float().std() + 0.05) * noise).to(tensor.dtype))

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


def main(out: str, *argv: str) -> None:
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
    Path(out).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
