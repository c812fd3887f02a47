"""The policy's learning rate is 0 after three updates."""

import ppo


class RateEnds(ppo.Recipe):
    def policy_rate(self, past_updates, total_updates):
        return super().policy_rate(past_updates, total_updates) if past_updates < 3 else 0.0
