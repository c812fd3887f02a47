"""Each sample is paid for the sample before it."""

import ppo


class PaidNeighbour(ppo.Recipe):
    def paid(self, samples):
        rewards = super().paid(samples)
        return rewards[-1:] + rewards[:-1]
