"""Logs each token's ratio: its probability in the trainer divided by that in the sampler.

If sampler and trainer have the same weights, `ratio` is 1 up to rounding. `ratio_max` is the
largest ratio of a token. `clipfrac` is the share of tokens whose ratio is beyond 1 +- 0.2.
`approx_kl` is the k3 estimate of the KL divergence (joschu.net/blog/kl-approx.html). The sampler
must return its log-probs, which costs time.
"""

from lib import check


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    advice = "choose 1 with --variant log_ratio, because the trainer cuts no distribution"
    check.require_all(cfg, {"top_p": (cfg.top_p == 1, advice)})


def sampling_params(original, request, cfg, stop_ids, with_logprobs):
    return original(request, cfg, stop_ids, True)


def token_loss(original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    sampled = batch.per_token["logprobs"][micro.flat_index]  # (M,)
    log_ratio = (logprobs.detach() - sampled) * micro.mask  # (M,)
    ratio = log_ratio.exp()  # (M,)
    stats["ratio"] = (ratio * micro.mask).sum()
    stats["ratio_max"] = ratio.max()
    stats["clipfrac"] = ((ratio - 1).abs() > 0.2).float().sum()
    stats["approx_kl"] = (ratio - 1 - log_ratio).sum()
    return original(logprobs, entropy, advantages, batch, micro, cfg, stats)
