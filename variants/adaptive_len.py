"""Each problem has its own limit of tokens: 1.5 times its longest finished response.

With this limit a few endless responses do not delay a batch. If more than a tenth of a problem's
responses are truncated, the variant doubles the problem's limit. A problem that was not drawn
before has a limit that follows in the same way from all samples of the last batch. No limit is
above --generate_max_len. All ranks have the same samples, so all ranks compute the same limits.
Measured on the demo: nothing changes, because no response of the demo is truncated.
"""

import dataclasses

# Maps a problem's index, as text, to its limit. "" maps to the limit of all other problems.
MEMORY = {}
_UNSEEN = ""
_MARGIN = 1.5  # A limit is this factor times the longest finished response.
_TRUNCATED_SHARE = 0.1  # If more responses than this share are truncated, a limit is doubled.


def draw_step(original, rollout, requests, problems, cfg, step, clock):
    most = cfg.generate_max_len
    limited = [dataclasses.replace(x, max_tokens=_limit(x.problem.index, most)) for x in requests]
    samples = original(rollout, limited, problems, cfg, step, clock)
    visits = {}
    for sample in samples:
        visits.setdefault(str(sample.request.problem.index), []).append(sample)
    limits = {key: _next_limit(_limit(key, most), visits[key], most) for key in visits}
    limits[_UNSEEN] = _next_limit(_limit(_UNSEEN, most), samples, most)
    MEMORY.update(limits)
    return samples


def _limit(key, most):
    return MEMORY.get(str(key), MEMORY.get(_UNSEEN, most))


def _next_limit(limit, samples, most):
    finished = [len(x.response_ids) for x in samples if x.finish_reason == "stop"]
    if len(samples) - len(finished) > _TRUNCATED_SHARE * len(samples):
        return min(most, 2 * limit)
    return min(most, int(_MARGIN * max(finished)))
