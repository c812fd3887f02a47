"""Three steps of a run without engines, of two models of 23 numbers each.

Samples come from a hash of their requests. All other code is the product's.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from conftest import config

import ppo
import rollout
import train
from nanoorz import log as log_file
from nanoorz.ranks import hash64

STEPS = 3
SETTINGS = {"task": "countdown", "seed": 8, "n_samples_per_prompt": 8, "generate_max_len": 12}
SETTINGS |= {"max_len": 14, "prompt_max_len": 8, "packing_max_len": 40, "critic_updates": 3}
SETTINGS |= {"actor_learning_rate": 9, "critic_learning_rate": 9}

# Of each task: the responses with their value, the verifier's reward where that is the problem's
# target, whether a response has the form that is asked for, and what it claims.
TEXTS = {
    "countdown": {
        "8+5=13<\n9+8=17!": ("17", 1, 1, "17"),
        "8+9": ("17", 1, 0, ""),
        "9+8=16": ("17", 0, 1, "16"),
        "1+1=17!": ("2", 0, 1, "17"),
        "9*2=18>": ("18", 1, 1, "18"),
        "9+8=17!\n8-1": ("7", 0, 0, ""),
        "9+1=10<": ("10", 0, 1, "10"),
        "8/1=8": ("8", 0, 1, "8"),
        "nothing": (None, 0, 0, ""),
        "": (None, 0, 0, ""),
    },
    "math": {
        "<answer>\\boxed{18}</answer>": ("18", 1, 1, "18"),
        "<answer>\\boxed{17}</answer>": ("17", 1, 1, "17"),
        "Then <answer>\\boxed{17}</answer>": ("17", 1, 1, "17"),
        "perhaps 16, or 17": (None, 0, 0, "17"),
    },
    "code": {"half of the tests": ("17", 0.5, 1, ""), "no test": (None, 0, 0, "")},
}
TARGETS = [17, 18, 17, 18, 17]
# Of countdown few numbers are easy, and then large targets. In other tasks short questions are.
DIFFICULTY = [1, 2, 1, 0, 1]


def make_problems(cfg):
    problems = []
    for index, target in enumerate(TARGETS):
        pick = None if index == 1 else 2
        label = {"target": target, "numbers": [1, 8, 9, 9], "pick": pick}
        label = label if cfg.task == "countdown" else str(target)
        problem = {"index": index, "label": label, "question": "?" * DIFFICULTY[index]}
        problems.append(SimpleNamespace(**problem, prompt_ids=[1 + index, 2, 3]))
    return problems


def respond(cfg, request) -> rollout.Sample:
    """In place of vLLM and of the grader."""
    seed = hash64(request.seed, request.problem.index)
    # Most are short, so that a limit that follows them cuts the long ones.
    wanted = 2 + seed % 5 + (9 if seed % 13 == 0 else 0)
    ids = [7] * min(wanted, request.max_tokens)
    reason = "stop" if wanted <= request.max_tokens else "length"
    text = list(TEXTS[cfg.task])[hash64(seed, "text") % len(TEXTS[cfg.task])]
    value, reward, *_ = TEXTS[cfg.task][text]
    is_right = reason == "stop" and value == str(TARGETS[request.problem.index])
    logprobs = [-0.5 - (seed + k) % 3 / 2 for k in range(len(ids))]
    answer = value if reason == "stop" else None
    return rollout.Sample(
        request,
        ids,
        [True] * len(ids),
        logprobs,
        [text],
        reason,
        is_right * float(reward),
        {},
        answer,
    )


START = {
    "policy": torch.linspace(-2, -0.1, 23),
    "critic": torch.linspace(-0.5, 1, 23),
    "reference": torch.linspace(-1.7, -0.3, 23),
    "teacher": torch.linspace(-1.9, -0.2, 23).flip(0),
}


class Learner:
    """A model of 23 numbers: token k of a batch has number k modulo 23."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name = name
        self.numbers = START[name].clone().requires_grad_()

    def __call__(self, micro, temperature=None):
        # A filler's number must not matter.
        numbers = self.numbers[micro.flat_index % 23] + 1e4 * (1 - micro.real)  # (t,)
        return numbers if self.name == "critic" else (numbers, numbers.cos())

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        # The real engines average over the ranks too.
        dist.all_reduce(self.numbers.grad)
        with torch.no_grad():
            self.numbers -= lr * self.numbers.grad / dist.get_world_size()
        self.numbers.grad = None
        return 1.0


def take_steps(names, flags):
    """What the product makes of policy and critic, and each step's numbers to log."""
    cfg = config(variant=names or None, **SETTINGS | flags)
    policy, critic, cfg._reference, cfg._teacher = (Learner(name) for name in START)
    problems = make_problems(cfg)
    logs = []

    def draw(requests, clock):
        samples = [respond(cfg, request) for request in requests]
        params = cfg.sampling_params(SimpleNamespace(logprobs=None), requests[0])
        if params.logprobs is not None:
            return samples
        return [replace(x, logprobs=None) for x in samples]

    train.check_flags(cfg, 2)
    has_critic = cfg.estimators[cfg.estimator].needs_critic
    for step in range(STEPS):
        clock = log_file.Clock()
        requests = rollout.requests_of_step(problems, cfg, step)
        samples = cfg.draw_step(SimpleNamespace(draw=draw), requests, problems, step, clock)
        batch = ppo.make_batch(samples, policy.device, cfg)
        cfg.token_passes(policy, critic if has_critic else None, batch, step)
        log = ppo.compute_advantages(batch, cfg)
        if has_critic:
            log |= cfg.train_critic(critic, batch, step)
        log |= cfg.train_policy(policy, batch, step, STEPS)
        log |= clock.numbers | log_file.numbers_of_samples(step + 1, samples, batch)
        log = cfg.metrics(log | {"seconds": 2.0, "tokens_per_second": 500.0}, samples, batch)
        log["counted_tokens"] = log["tokens_per_second"] * log["seconds"]
        for memory in cfg.memory.values():
            log |= memory
        logs.append(log)
    return torch.cat([policy.numbers.detach(), critic.numbers.detach()]), logs
