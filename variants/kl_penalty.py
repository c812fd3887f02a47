"""The KL divergence from the base model is subtracted from the rewards, token by token.

A token loses coef times k1 = log p - log q, where q is the base model's probability (arXiv
1909.08593, 2203.02155). Without a critic the sample loses the sum over its tokens. In this way RLHF
keeps the policy near texts that its reward model can judge.
In the laboratory (PPO, 3 seeds, coefficient 0.1) the accuracy is 0.41 with it and 0.57 without it.
"""

import dataclasses
from dataclasses import dataclass

import torch

import ppo
from nanoorz.flags import flag
from variants.log_kl import LogKL


@dataclass
class KLPenalty(LogKL):
    kl_penalty_coef: float = flag(0.01, "The factor of the KL divergence in the rewards.")

    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        batch.per_token["old_logprobs"] = ppo.compute_logprobs(policy, batch, self)

    def raw_advantages(self, batch):
        kl = batch.per_token["old_logprobs"] - batch.per_token["ref_logprobs"]  # (T,)
        penalties = torch.zeros(batch.mask.shape, dtype=torch.float64)  # (N, S)
        penalties[batch.mask] = -self.kl_penalty_coef * kl.double().cpu()
        if not self.estimators[self.estimator].needs_critic:
            rewards = batch.rewards + penalties.sum(1)  # (N,)
            return super().raw_advantages(dataclasses.replace(batch, rewards=rewards))
        # GAE is linear: GAE(r + x, V) = GAE(r, V) + GAE(x, 0), where x are the penalties.
        later = ppo.add_later_(penalties, self.gamma * self.lambd)[batch.mask]  # (T,)
        return super().raw_advantages(batch) + later.to(batch.device)
