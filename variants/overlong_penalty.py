"""A response loses up to 1 of its reward near the limit of tokens (DAPO, arXiv 2503.14476, eq. 13).

DAPO claims that this penalty teaches the policy to stop before the limit. With this penalty rewards
can be negative, so the estimator maxrl is refused.
Measured in the laboratory (GRPO, 3 seeds, --overlong_cache 14): the accuracy is 0.39 with
overlong_penalty, and 0.56 without it. A search that stops early finds fewer solutions.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag, require, require_all


@dataclass
class OverlongPenalty(ppo.Recipe):
    overlong_cache: int = flag(
        1600, "The penalty rises over so many tokens. DAPO: a fifth of the limit."
    )

    def check(self, world):
        super().check(world)
        is_right = self.overlong_cache >= 1
        require_all(self, {"overlong_cache": (is_right, "must be at least 1")})
        told = "--estimator maxrl: --variant overlong_penalty makes rewards negative"
        require(self.estimator != "maxrl", told)

    def paid(self, samples):
        rewards = super().paid(samples)
        return [reward - self._penalty(sample) for reward, sample in zip(rewards, samples)]

    def _penalty(self, sample):
        """It rises from 0, at overlong_cache tokens before the limit, to 1 at the limit.

        A response that is truncated because its reply had no room loses 1, too.
        """
        if sample.finish_reason != "stop":
            return 1.0
        room = self.max_len - len(sample.request.problem.prompt_ids)
        limit = min(sample.request.max_tokens, room)
        excess = len(sample.response_ids) - (limit - self.overlong_cache)
        return max(0, excess) / self.overlong_cache
