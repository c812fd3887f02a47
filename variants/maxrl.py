"""The advantage is (r - the group's mean) / the group's mean (MaxRL, arXiv 2602.02710).

The rarer a right response is in its group, the larger is its advantage. If all responses of a group
are wrong, their advantages are 0.
In the laboratory (3 seeds) the last accuracy is 0.578 with maxrl and 0.570 with PPO.
"""

from dataclasses import dataclass

import torch

import ppo
from nanoorz.flags import flag


def _maxrl(rewards, values, mask, groups, cfg):
    # A negative mean would turn the signs around.
    assert (rewards >= 0).all(), "--estimator maxrl: a reward is negative"
    mean, std, _ = ppo.group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std == 0, 0.0, (rewards - mean) / mean)


@dataclass
class MaxRL(ppo.Recipe):
    estimator: str = flag("maxrl", "How rewards become advantages.")

    estimators = {"maxrl": ppo.Estimator(_maxrl, least_samples=2)}
