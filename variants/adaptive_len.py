"""Each problem has its own limit of tokens: 1.5 times its longest finished response.

So a few endless responses do not delay a batch. If more than a tenth of a problem's responses are
truncated, its limit is doubled, up to --generate_max_len. A problem that was not drawn before has
the limit that follows in the same way from all samples of the last batch.
In the demo hardly a response reaches its limit, so hardly anything changes.
"""

import dataclasses

import ppo


class AdaptiveLen(ppo.Recipe):
    _margin = 1.5  # A limit is this factor times the longest finished response.
    _truncated_share = 0.1  # If more responses than this share are truncated, a limit is doubled.

    def draw_step(self, rollout, requests, problems, step, clock):
        # Maps a problem's index, as text, to its limit, and "" to the limit of all other problems.
        limits = self.memory.setdefault("AdaptiveLen", {})
        limited = []
        for request in requests:
            limit = min(request.max_tokens, self._limit(request.problem.index))
            limited.append(dataclasses.replace(request, max_tokens=limit))
        samples = super().draw_step(rollout, limited, problems, step, clock)
        visits = {"": samples}
        for sample in samples:
            visits.setdefault(str(sample.request.problem.index), []).append(sample)
        limits |= {key: self._next_limit(key, drawn) for key, drawn in visits.items()}
        return samples

    def _limit(self, key):
        limits = self.memory["AdaptiveLen"]
        return limits.get(str(key), limits.get("", self.generate_max_len))

    def _next_limit(self, key, samples):
        finished = [len(x.response_ids) for x in samples if x.finish_reason == "stop"]
        if len(samples) - len(finished) > self._truncated_share * len(samples):
            return min(self.generate_max_len, 2 * self._limit(key))
        return min(self.generate_max_len, int(self._margin * max(finished)))
