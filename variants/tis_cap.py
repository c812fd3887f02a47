"""Each token's advantage is multiplied by its ratio of trainer to sampler, at most by a cap.

A becomes min(p / p_sampler, cap) A. The log-probs of sampler and trainer differ by rounding, so
samples are slightly off-policy. The ratio corrects this (truncated importance sampling; Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training", 2025).
In the demo nothing is corrected, because on a CPU in fp32 sampler and trainer agree to 1e-6.
"""

from dataclasses import dataclass

from nanoorz.flags import flag
from variants.log_ratio import LogRatio


@dataclass
class TisCap(LogRatio):
    tis_cap: float = flag(2.0, "The largest factor of a token's advantage.")

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats):
        sampled = batch.per_token["logprobs"][micro.flat_index]  # (M,)
        trainer = logprobs.detach()  # (M,)
        if "old_logprobs" in batch.per_token:
            # With several updates the samples come from the policy before the first update.
            trainer = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
        log_ratio = (trainer - sampled) * micro.real  # (M,)
        weighed = advantages * log_ratio.exp().clamp(max=self.tis_cap)  # (M,)
        return super().token_loss(logprobs, entropy, weighed, batch, micro, stats)
