"""(r - group mean) / group mean: the rarer a right response, the more it counts (arXiv 2602.02710).

The advantage is 0 where all responses are wrong. Rewards must not be negative.
Laboratory: accuracy 0.578, 0.570 with PPO (3 seeds): no difference is seen.
"""

from dataclasses import dataclass

import torch

import ppo


@dataclass
class Flags:
    estimator: str = "maxrl"  # How rewards become advantages.


def _maxrl(rewards, values, mask, groups, cfg):
    mean, std, _ = ppo.group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, (rewards - mean) / mean, 0.0)


ESTIMATORS = {"maxrl": ppo.Estimator(_maxrl, least_samples=2)}
