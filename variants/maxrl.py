"""The advantage is (reward - group mean) / group mean (MaxRL, arXiv 2602.02710).

The rarer a right response is in its group, the larger is its advantage. If all responses of a group
are wrong, their advantages are 0. Rewards must not be negative.
Measured in the laboratory (3 seeds): the accuracy is 0.578 with maxrl, and 0.570 with PPO. No
difference was seen.
"""

from dataclasses import dataclass

import torch

import ppo
from lib import check


@dataclass
class Flags:
    estimator: str = "maxrl"  # How rewards become advantages.


def raw_advantages(original, batch, cfg):
    advice = "choose another estimator, or leave out the variant that makes rewards negative"
    check.require(batch.rewards.min() >= 0, f"--estimator maxrl: a reward is negative; {advice}")
    return original(batch, cfg)


def _maxrl(rewards, values, mask, groups, cfg):
    mean, std, _ = ppo.group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, (rewards - mean) / mean, 0.0)


ESTIMATORS = {"maxrl": ppo.Estimator(_maxrl, least_samples=2)}
