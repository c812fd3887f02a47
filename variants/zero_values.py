"""The control of an experiment about the critic: GAE with values of 0, without a critic's updates.

With lambda 1 each token gets the reward. With a smaller lambda the reward fades towards the
beginning of a response, so the control shows what the fading does alone.
"""

from dataclasses import dataclass

import ppo


@dataclass
class ZeroValues(ppo.Recipe):
    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        if critic:
            batch.per_token["values"].zero_()

    def train_critic(self, critic, batch, step):
        return {}
