"""r - 1: only wrong responses are learnt from (NSR, arXiv 2506.01347, section 2).

The claim: it is nearly as good as learning from all.
Laboratory: accuracy 0.540, 0.570 with PPO (3 seeds), and it learns more slowly.
"""

from dataclasses import dataclass

import ppo


@dataclass
class Flags:
    estimator: str = "negative"  # How rewards become advantages.


def _negative(rewards, values, mask, groups, cfg):
    return rewards - 1


ESTIMATORS = {"negative": ppo.Estimator(_negative)}
