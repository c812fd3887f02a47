"""Each token's advantage is multiplied by its ratio of trainer to sampler, at most by a cap.

The sampler's log-probs differ from the trainer's log-probs by rounding, so samples are slightly
off-policy. The ratio corrects this. The method is called truncated importance sampling. Source: Yao
et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
Measured on the demo: nothing is corrected, because on a CPU in fp32 sampler and trainer agree to
1e-6.
"""

from dataclasses import dataclass

from lib import check

NEEDS = ["log_ratio"]


@dataclass
class Flags:
    tis_cap: float = 2.0  # The largest factor of a token's advantage.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    check.require_all(cfg, {"tis_cap": (cfg.tis_cap >= 1, "choose at least 1")})


def token_loss(original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    sampled = batch.per_token["logprobs"][micro.flat_index]  # (M,)
    trainer = logprobs.detach()  # (M,)
    if "old_logprobs" in batch.per_token:
        # With several updates the samples come from the policy before the first update.
        trainer = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
    log_ratio = (trainer - sampled) * micro.mask  # (M,)
    weighed = advantages * log_ratio.exp().clamp(max=cfg.tis_cap)  # (M,)
    return original(logprobs, entropy, weighed, batch, micro, cfg, stats)
