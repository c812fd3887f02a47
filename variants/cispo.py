"""The ratio weighs a token's gradient, at most by a cap, and is not clipped away (CISPO, eq. 4).

MiniMax-M1 (arXiv 2506.13585): a token beyond PPO's clip loses its gradient, and the rare tokens
that start a reflection are the first. Here each token keeps its gradient. As in the paper there is
no lower bound; the paper does not give its cap.
Laboratory: accuracy 0.03 with it, 0.53 with PPO's clip (GRPO, 8 updates, 3 seeds): all fell
between steps 9 and 18, and one came half of the way back.
"""

from dataclasses import dataclass

import ppo
from lib import check


@dataclass
class Flags:
    policy_updates: int = 8  # Updates of the policy in a step, each over its part of the samples.
    cispo_cap: float = 2.0  # A ratio weighs a token by at most this.


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
    old = batch.per_token["old_logprobs"][micro.flat_index]  # (t,)
    ratio = ((logprobs.detach() - old) * micro.mask).exp()  # (t,)
    return -(ratio.clamp(max=cfg.cispo_cap) * advantages * logprobs)
