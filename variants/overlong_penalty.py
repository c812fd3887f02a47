"""A response loses up to 1 of its reward near the limit of tokens (DAPO, arXiv 2503.14476, eq. 13).

The penalty rises linearly from 0, at --overlong_cache tokens before the limit, to 1 at the limit. A
truncated response loses 1. DAPO claims that this teaches the policy to stop before the limit.
In the laboratory (GRPO, 3 seeds, --overlong_cache 14) the accuracy is 0.39 with it and 0.56 without
it: a search that stops early finds fewer solutions.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag, require


@dataclass
class OverlongPenalty(ppo.Recipe):
    overlong_cache: int = flag(
        1600, "The penalty rises over so many tokens. DAPO: a fifth of the limit."
    )

    def check(self, world):
        super().check(world)
        limit = min(self.generate_max_len, self.max_len)
        told = f"--overlong_cache {self.overlong_cache}: a response has at most {limit} tokens"
        require(self.overlong_cache <= limit, told)

    def paid(self, samples):
        rewards = super().paid(samples)
        return [reward - self._penalty(sample) for reward, sample in zip(rewards, samples)]

    def _penalty(self, sample):
        if sample.finish_reason != "stop":
            return 1.0
        room = self.max_len - len(sample.request.problem.prompt_ids)
        limit = min(sample.request.max_tokens, room)
        # The limit of a request may be below that of the run, as with adaptive_len.
        cache = min(self.overlong_cache, limit)
        excess = len(sample.response_ids) - (limit - cache)
        return max(0, excess) / cache
