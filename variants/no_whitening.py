"""The advantages are not whitened.

ORZ scales the advantages of all response tokens of a step to mean 0 and standard deviation 1. So
the size of the policy's update does not depend on how many responses are right. This variant leaves
the estimator's advantages as they are.
The laboratory has not measured this variant.
"""

from lib import check


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    is_whitened = estimators[cfg.estimator].is_whitened
    check.require(is_whitened, f"--variant no_whitening: {cfg.estimator} is not whitened anyway")


def whiten(_original, advantages, batch, cfg):
    return advantages
