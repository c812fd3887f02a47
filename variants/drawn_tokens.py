"""Logs how many response tokens the sampler has drawn in a step: `drawn_tokens`.

The number includes the samples that another variant throws away. docs/race.py uses this variant.
"""


def draw(original, rollout, requests, clock):
    samples = original(rollout, requests, clock)
    clock.numbers["drawn_tokens"] += sum(len(sample.response_ids) for sample in samples)
    return samples
