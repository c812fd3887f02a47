"""A response loses up to 1 of its reward near the limit of tokens (DAPO, arXiv 2503.14476, eq. 13).

DAPO claims that this penalty teaches the policy to stop before the limit. With this penalty rewards
can be negative, so the estimator maxrl is refused.
Measured in the laboratory (GRPO, 3 seeds, --overlong_cache 14): the accuracy is 0.39 with
overlong_penalty, and 0.56 without it. A search that stops early finds fewer solutions.
"""

from dataclasses import dataclass

from lib import check


@dataclass
class Flags:
    overlong_cache: int = 1600  # The penalty rises over so many tokens. DAPO: a fifth of the limit.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    check.require_all(cfg, {"overlong_cache": (cfg.overlong_cache >= 1, "must be at least 1")})
    check.require(
        cfg.estimator != "maxrl",
        "--estimator maxrl: --variant overlong_penalty makes rewards negative",
    )


def paid(original, samples, cfg):
    rewards = original(samples, cfg)
    return [reward - _penalty(sample, cfg) for reward, sample in zip(rewards, samples)]


def _penalty(sample, cfg):
    """The penalty rises from 0, at overlong_cache tokens before the limit, to 1 at the limit."""
    room = cfg.max_len - len(sample.request.problem.prompt_ids)
    limit = min(sample.request.max_tokens, room)
    excess = len(sample.response_ids) - (limit - cfg.overlong_cache)
    return max(0, excess) / cfg.overlong_cache
