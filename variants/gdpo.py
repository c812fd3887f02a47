"""Each reward of a task is normalised in its group, before the rewards are summed (GDPO).

The advantage is sum_k w_k (r_k - group mean) / group std, whitened over the batch (arXiv
2601.05242). The weights are --reward_weights. GRPO sums the rewards first, so different
combinations of rewards can get the same advantage. If the task names no rewards, this is GRPO with
whitening.
What the laboratory measured: docs/lab.md.
"""

import dataclasses
from dataclasses import dataclass

import torch

import ppo
from nanoorz.flags import flag, require


def _unchanged(rewards, values, mask, groups, cfg):
    # These `rewards` are the scores that raw_advantages has summed.
    return rewards


@dataclass
class GDPO(ppo.Recipe):
    estimator: str = flag("gdpo", "How rewards become advantages.")

    estimators = {"gdpo": ppo.Estimator(_unchanged, is_whitened=True, least_samples=2)}

    def check(self, world):
        super().check(world)
        told = "--variant gdpo normalises rewards itself; leave the flag out"
        require(self.estimator == "gdpo", f"--estimator {self.estimator}: {told}")
        # raw_advantages below reads the task's rewards, and not what another variant pays.
        told = "--variant gdpo: another variant pays something else; let the task name the rewards"
        require(type(self).paid is ppo.Recipe.paid, told)
        told = f"--variant gdpo: name it after {type(self).raw_advantages.__qualname__}"
        require(type(self).raw_advantages is __class__.raw_advantages, told)

    def raw_advantages(self, batch):
        weights = ppo.reward_weights_of(self, batch.samples[0].rewards)
        columns = {}  # {name: rewards (N,)}
        for name in weights:
            rewards = [sample.rewards[name] for sample in batch.samples]
            columns[name] = torch.tensor(rewards, dtype=torch.float64)
        if not weights:
            weights, columns = {"reward": 1.0}, {"reward": batch.rewards}
        scores = torch.zeros_like(batch.rewards)  # (N,)
        for name, weight in weights.items():
            scores += weight * ppo.grpo(columns[name], None, None, batch.groups, self)
        return super().raw_advantages(dataclasses.replace(batch, rewards=scores))
