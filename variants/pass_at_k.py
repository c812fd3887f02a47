"""A set of k responses is right if one of its responses is right (arXiv 2508.10751, section 2.4).

Each set gets a GRPO score, and a response the mean score of all sets that contain it. With k = 1 it
is GRPO of 0 and 1. With m the share of right responses and q the chance that a set has none, the
paper's two cases are one: (r - m) / (1 - m) * sqrt(q / (1 - q)).
Laboratory: accuracy 0.571, 0.570 with PPO (3 seeds, k = 4): no difference is seen.
"""

from dataclasses import dataclass

import torch

import ppo
from lib import check


@dataclass
class Flags:
    estimator: str = "pass_at_k"  # How rewards become advantages.
    pass_k: int = 4  # Of so many responses one should be right.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    check.require_all(cfg, {"pass_k": (cfg.pass_k >= 1, "must be at least 1")})


def check_samples(original, cfg, estimator, flag):
    """k samples are one set of k, which has no other set to be compared with."""
    original(cfg, estimator, flag)
    is_enough = cfg.estimator != "pass_at_k" or getattr(cfg, flag) > cfg.pass_k
    advice = f"--estimator pass_at_k compares at least {cfg.pass_k + 1}"
    check.require_all(cfg, {flag: (is_enough, advice)})


def _pass_at_k(rewards, values, mask, groups, cfg):
    right = (rewards > 0).double()  # (N,)
    mean, std, count = ppo.group_stats(right, groups)  # (N,), (N,), (N,)
    wrong = ((1 - mean) * count).round()  # (N,)
    drawn = torch.arange(cfg.pass_k, device=right.device)[:, None]  # (k, 1)
    # With fewer than k wrong responses a factor is 0.
    none = ((wrong - drawn) / (count - drawn)).prod(0)  # (N,)
    scores = (right - mean) / (1 - mean) * (none / (1 - none)).sqrt()  # (N,)
    return torch.where(std > 0, scores, 0.0)


ESTIMATORS = {"pass_at_k": ppo.Estimator(_pass_at_k, least_samples=2)}
