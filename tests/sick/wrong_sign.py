"""The advantages have the wrong sign."""

import ppo


class WrongSign(ppo.Recipe):
    def raw_advantages(self, batch):
        return -super().raw_advantages(batch)
