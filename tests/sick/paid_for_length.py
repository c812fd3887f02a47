"""A response is paid for its length, right or wrong."""

import ppo


class PaidForLength(ppo.Recipe):
    def paid(self, samples):
        return [len(sample.response_ids) / 32 for sample in samples]
