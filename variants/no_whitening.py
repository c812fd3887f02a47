"""The advantages are not whitened.

ORZ scales the advantages of all response tokens of a step to mean 0 and standard deviation 1. So
the size of the policy's update does not depend on how many responses are right. This variant leaves
the estimator's advantages as they are.
The laboratory has not measured this variant.
"""

import ppo
from nanoorz.flags import require


class NoWhitening(ppo.Recipe):
    def check(self, world):
        super().check(world)
        is_whitened = self.estimators[self.estimator].is_whitened
        told = f"--variant no_whitening: {self.estimator} is not whitened anyway"
        require(is_whitened, told)

    def whiten(self, advantages, batch):
        return advantages
