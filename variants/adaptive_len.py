"""A problem's limit of tokens follows its longest finished response: 1.5 times as many.

So a few endless responses do not hold up a batch. Where more than a tenth of a problem's responses
are cut, its limit is doubled. A problem that was not seen yet has the limit of the last batch. No
limit is above --generate_max_len. All ranks compute the same limits from the same samples.
Measured on the demo: nothing changes, because no response of the demo runs away.
"""

import dataclasses

# By the problem's index, as text: its limit. Under "": the limit of problems not seen yet.
MEMORY = {}
_UNSEEN = ""
_MARGIN = 1.5  # room over the longest finished response
_TRUNCATED_SHARE = 0.1  # above it a limit grows


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
