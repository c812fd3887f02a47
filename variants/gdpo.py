"""Each reward of a task is normalised in its group, before the rewards are summed (GDPO).

GRPO sums the rewards first. So a reward that varies more in a group hides the others. GDPO (arXiv
2601.05242) divides each reward by its own standard deviation in the group, then sums with
--reward_weights, and whitens the sum over the batch. What other variants pay beside the rewards of
the task counts as one more reward. With one reward this is GRPO with whitening.
"""

import dataclasses
from dataclasses import dataclass

import torch

import ppo
from nanoorz.flags import flag


def _sum_of_scores(rewards, values, mask, groups, cfg):
    # raw_advantages has normalised and summed the rewards.
    return rewards


@dataclass
class GDPO(ppo.Recipe):
    estimator: str = flag("gdpo", "How rewards become advantages.")

    estimators = ppo.ESTIMATORS | {
        "gdpo": ppo.Estimator(_sum_of_scores, is_whitened=True, least_samples=2)
    }

    def raw_advantages(self, batch):
        weights = ppo.find_weights(self, batch.samples[0].rewards)
        others = batch.rewards.clone()  # (N,) what is paid beside the rewards of the task
        scores = torch.zeros_like(others)  # (N,)
        for name, weight in weights.items():
            rewards = [sample.rewards[name] for sample in batch.samples]
            rewards = torch.tensor(rewards, dtype=torch.float64)  # (N,)
            others -= weight * rewards
            scores += weight * ppo.grpo(rewards, None, None, batch.groups, self)
        scores += ppo.grpo(others, None, None, batch.groups, self)
        return super().raw_advantages(dataclasses.replace(batch, rewards=scores))
