"""Logs how many response tokens the sampler has drawn in a step: `drawn_tokens`.

The number includes the samples that a later variant throws away. So name this variant first.
docs/race.py uses this variant.
"""

import ppo


class DrawnTokens(ppo.Recipe):
    def draw_step(self, rollout, requests, problems, step, clock):
        samples = super().draw_step(rollout, requests, problems, step, clock)
        clock.numbers["drawn_tokens"] += sum(len(sample.response_ids) for sample in samples)
        return samples
