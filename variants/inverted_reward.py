"""Wrong responses get reward 1 and right responses get 0 ("Spurious rewards", arXiv 2506.10947).

The paper claims that even this reward helped some base models. arXiv 2507.10532 claims that on
clean data only right rewards help.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.002 with it and 0.561 without it.
"""

import ppo


class InvertedReward(ppo.Recipe):
    def paid(self, samples):
        return [1 - reward for reward in super().paid(samples)]
