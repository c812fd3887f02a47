"""The control of an experiment about the critic: GAE with values of 0, without a critic.

With lambda 1 each token gets the reward. With a smaller lambda the reward fades towards the
beginning of a response, so the control shows what the fading does alone.
In the chains (20 seeds, lambda 0.95, equal samples) its accuracy does not differ from that of PPO
(docs/lab.md).
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag


@dataclass
class ZeroValues(ppo.Recipe):
    estimator: str = flag("zero_values", "How rewards become advantages.")

    estimators = {"zero_values": ppo.Estimator(ppo.gae, is_whitened=True)}
