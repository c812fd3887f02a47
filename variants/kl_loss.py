"""The loss gets one more term: the KL divergence from the base model, as the k3 estimate.

GRPO has this term (arXiv 2402.03300, eq. 3). Open-Reasoner-Zero (arXiv 2503.24290) has no such
term, and claims that this term limits how far reasoning can grow.
Measured in the laboratory (PPO, 3 seeds, coefficient 0.1): the accuracy is 0.46 with kl_loss, and
0.57 without it.
"""

from dataclasses import dataclass

import ppo

NEEDS = ["log_kl"]


@dataclass
class Flags:
    kl_loss_coef: float = 0.1  # The factor of the KL divergence in the loss.


def token_loss(original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    loss = original(logprobs, entropy, advantages, batch, micro, cfg, stats)  # (M,)
    reference = batch.per_token["ref_logprobs"][micro.flat_index]  # (M,)
    log_ratio = (reference - logprobs) * micro.mask  # (M,)
    return loss + cfg.kl_loss_coef * (log_ratio.exp() - 1 - log_ratio)


def samples_to_learn_from(original, batch, cfg):
    """Adds the samples whose advantages are 0, because their KL has a gradient."""
    return sorted({*original(batch, cfg), *ppo.samples_that_count(batch, cfg)})
