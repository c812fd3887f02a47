"""Logs the KL divergence between the policy and the base model, as the k3 estimate.

k3 is unbiased and never negative (joschu.net/blog/kl-approx.html). The variant needs a reference:
the base model is in memory a third time. The reference takes one more forward pass in each step.
This variant only logs the KL. It does not change what is learnt.
"""

from transformers import AutoModelForCausalLM

import ppo
from lib import models

_LEARNERS = {}


def make_policy(original, cfg):
    """Makes the reference too. The reference has no learning rate, so it has no optimizer."""
    body = models.load_model(cfg, AutoModelForCausalLM)
    _LEARNERS["reference"] = models.Learner("reference", models.Policy(body), cfg, lr=None)
    return original(cfg)


def token_passes(original, policy, critic, batch, cfg, step):
    original(policy, critic, batch, cfg, step)
    reference = _LEARNERS["reference"]
    batch.per_token["ref_logprobs"] = ppo.compute_logprobs(reference, batch, cfg)


def token_loss(original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    reference = batch.per_token["ref_logprobs"][micro.flat_index]  # (M,)
    log_ratio = (reference - logprobs.detach()) * micro.mask  # (M,)
    stats["kl"] = (log_ratio.exp() - 1 - log_ratio).sum()
    return original(logprobs, entropy, advantages, batch, micro, cfg, stats)
