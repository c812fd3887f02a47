"""The policy has several updates in a step, with PPO's ratio and clip (arXiv 1707.06347, eq. 7).

Open-Reasoner-Zero has one update in a step, which is strictly on-policy. Then the ratio and the
clip do nothing. Several updates need one more forward pass, for the log-probs before the updates.
Measured in the laboratory (PPO, 3 seeds): the accuracy is 0.551 with eight updates, and 0.570 with
one update. The standard error of the difference is 0.025.
"""

from dataclasses import dataclass

import torch

import ppo
from lib import check


@dataclass
class Flags:
    policy_updates: int = 8  # Updates of the policy in a step. Each takes its part of the samples.
    policy_clip: float = 0.2  # The loss moves no ratio further from 1 than this number.
    policy_clip_high: float | None = None  # The clip above 1. Default: --policy_clip.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    check.require_all(cfg, {"policy_updates": (cfg.policy_updates >= 1, "must be at least 1")})


def token_passes(original, policy, critic, batch, cfg, step):
    original(policy, critic, batch, cfg, step)
    batch.per_token["old_logprobs"] = ppo.compute_logprobs(policy, batch, cfg)


def train_policy(_original, policy, batch, cfg, step, total_steps):
    samples = ppo.samples_that_count(batch, cfg)
    past = step * cfg.policy_updates
    total = total_steps * cfg.policy_updates
    rates = []
    for k in range(cfg.policy_updates):
        rates.append(ppo.policy_rate(cfg, past + k, total))
    return ppo.update_in_parts(policy, ppo.policy_loss, batch, samples, rates, cfg, step)


def token_loss(_original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    old = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
    # The ratio is 1 only in the first update.
    ratio = ((logprobs - old) * micro.mask).exp()  # (M,)
    high = cfg.policy_clip if cfg.policy_clip_high is None else cfg.policy_clip_high
    clipped = ratio.clamp(1 - cfg.policy_clip, 1 + high)  # (M,)
    return -torch.minimum(ratio * advantages, clipped * advantages)
