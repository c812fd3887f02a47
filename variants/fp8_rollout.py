"""The sampler keeps its weights in fp8, which takes half the memory.

The trainer keeps its dtype, so the log-probs of sampler and trainer differ more. The allowed
difference in this file is a guess. This variant has never run here, because fp8 needs a GPU of
compute capability 8.9 or more.
"""

import ppo


class Fp8Rollout(ppo.Recipe):
    def sampler_settings(self, settings):
        return super().sampler_settings(settings) | {"quantization": "fp8_per_channel"}

    def allowed_gap(self, of_mean, of_worst):
        return 0.2, 1.0  # of the mean, and of the worst sample
