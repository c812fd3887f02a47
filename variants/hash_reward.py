"""The reward is a hash of the text, 0 or 1: it looks random, and can be hacked.

The same text always gets the same reward. So a policy that repeats a text of reward 1 always gets
reward 1. This is reward hacking (arXiv 1606.06565, section 4).
In the laboratory (GRPO, 3 seeds) this reward rises from 0.5 to 0.95, and the accuracy is 0.04 with
it and 0.56 without it.
"""

import ppo
from nanoorz.ranks import hash64


class HashReward(ppo.Recipe):
    def paid(self, samples):
        return [float(hash64(sample.text) % 2) for sample in samples]
