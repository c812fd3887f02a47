"""The advantage is r - 1, so the policy learns only from wrong responses (NSR).

The paper (arXiv 2506.01347, section 2) claims that this is nearly as good as learning from all
responses.
In the laboratory (3 seeds) the accuracy is 0.540 with negative and 0.570 with PPO.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag


def _negative(rewards, values, mask, groups, cfg):
    return rewards - 1


@dataclass
class Negative(ppo.Recipe):
    estimator: str = flag("negative", "How rewards become advantages.")

    estimators = {"negative": ppo.Estimator(_negative)}
