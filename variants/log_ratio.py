"""Logs each token's ratio: its probability in the trainer divided by that in the sampler.

If sampler and trainer have the same weights, `ratio` is 1 up to rounding. `clipfrac` is the share
of tokens whose ratio is more than 0.2 from 1. `ratio_far` is the share of tokens whose ratio is
above 2 or below 1/2. `approx_kl` is the k3 estimate of KL(sampler, trainer)
(joschu.net/blog/kl-approx.html). The sampler must return its log-probs, which costs time.
"""

import ppo
from nanoorz.flags import require


class LogRatio(ppo.Recipe):
    def check(self, world):
        super().check(world)
        told = f"--top_p {self.top_p}: choose 1 with log_ratio, because the trainer ignores it"
        require(self.top_p == 1, told)

    def sampling_params(self, params, request):
        params = super().sampling_params(params, request)
        # The log-prob of the sampled token, and of no other token.
        params.logprobs = 0
        return params

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats):
        sampled = batch.per_token["logprobs"][micro.flat_index]  # (M,)
        log_ratio = (logprobs.detach() - sampled) * micro.real  # (M,)
        ratio = log_ratio.exp()  # (M,)
        stats["ratio"] = ratio
        stats["ratio_far"] = (ratio > 2) | (ratio < 0.5)
        stats["clipfrac"] = (ratio - 1).abs() > 0.2
        stats["approx_kl"] = ratio - 1 - log_ratio
        return super().token_loss(logprobs, entropy, advantages, batch, micro, stats)
