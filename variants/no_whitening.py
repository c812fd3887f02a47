"""The advantages are not whitened.

ORZ scales the advantages of all response tokens of a step to mean 0 and standard deviation 1. So
the size of the policy's update does not depend on how many responses are right. This variant leaves
the estimator's advantages as they are.
In the chains it does not keep runs from breaking at a high learning rate: docs/lab.md.
"""

import ppo


class NoWhitening(ppo.Recipe):
    def whiten(self, advantages, batch):
        return advantages
