"""Logs `kl`: the KL divergence between the policy and the base model, as the k3 estimate.

k3 = q / p - 1 - log(q / p), where p is the policy's probability of a token, and q the base model's.
It is unbiased and never negative (joschu.net/blog/kl-approx.html). A copy of the base model, the
reference, stays in memory, and takes one more forward pass in each step.
"""

import ppo
from nanoorz import models


class LogKL(ppo.Recipe):
    def policy_model(self, model):
        """Makes the reference, too."""
        self._reference = models.make_frozen(self, "reference", self.model)
        return super().policy_model(model)

    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        batch.per_token["ref_logprobs"] = ppo.compute_logprobs(self._reference, batch, self)

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats):
        stats["kl"] = self._kl(logprobs, batch, micro)
        return super().token_loss(logprobs, entropy, advantages, batch, micro, stats)

    def _kl(self, logprobs, batch, micro):
        reference = batch.per_token["ref_logprobs"][micro.flat_index]  # (M,)
        log_ratio = (reference - logprobs) * micro.real  # (M,)
        return log_ratio.exp() - 1 - log_ratio
