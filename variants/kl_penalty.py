"""The KL divergence from the base model is subtracted from the rewards, token by token.

The penalty of a token is the k1 estimate of the KL (arXiv 1909.08593; for each token as in arXiv
2203.02155). If an estimator scores a whole sample, the sum of the penalties is subtracted from the
sample's reward. RLHF has this penalty to keep the policy where the reward model is right.
Open-Reasoner-Zero has no such penalty.
Measured in the laboratory (PPO, 3 seeds, coefficient 0.1): the accuracy is 0.41 with kl_penalty,
and 0.57 without it.
"""

import dataclasses
from dataclasses import dataclass

import torch

import ppo
from lib import check
from lib.flags import flag
from variants.log_kl import LogKL


@dataclass
class KLPenalty(LogKL):
    kl_penalty_coef: float = flag(0.01, "The factor of the KL divergence in the rewards.")

    def check(self, world):
        super().check(world)
        told = "choose another, --variant kl_penalty makes rewards negative"
        is_right = self.estimator not in ("maxrl", "pass_at_k")
        check.require(is_right, f"--estimator {self.estimator}: {told}")

    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        batch.per_token["old_logprobs"] = ppo.compute_logprobs(policy, batch, self)

    def raw_advantages(self, batch):
        kl = batch.per_token["old_logprobs"] - batch.per_token["ref_logprobs"]  # (T,)
        mask = batch.mask.to(batch.device)  # (N, S)
        rewards = torch.zeros_like(mask, dtype=torch.float64)  # (N, S)
        rewards[mask] = -self.kl_penalty_coef * kl.double()
        if self.estimators[self.estimator].needs_critic:
            # GAE is linear in the rewards. So the GAE of the penalties, without values, is added.
            for t in reversed(range(rewards.shape[1] - 1)):
                rewards[:, t] += self.gamma * self.lambd * rewards[:, t + 1]
            return super().raw_advantages(batch) + rewards[mask]
        last = batch.response_lengths - 1  # (N,)
        rewards[torch.arange(len(rewards)), last] += batch.rewards.to(batch.device)
        return super().raw_advantages(dataclasses.replace(batch, rewards=rewards.sum(1).cpu()))
