"""The policy has several updates in a step. The variants updates, cispo and gspo bring this one.

The batch gets `old_logprobs`, (T,): the log-probs before the first update. A ratio needs them, so
there is one more forward pass. Alone this variant has no ratio: from the second update on its
gradient is not that of the policy which drew the samples.
"""

from dataclasses import dataclass

import ppo
from lib import check


@dataclass
class Flags:
    policy_updates: int = 8  # Updates of the policy in a step. Each takes its part of the samples.


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
