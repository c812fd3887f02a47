"""The sampler keeps its weights in fp8, which takes half the memory.

The trainer keeps its dtype, so the log-probs of sampler and trainer differ more. The allowed
difference in this file is a guess. This variant has never run here, because fp8 needs a GPU of
compute capability 8.9 or more.
"""

import torch

import ppo
from lib import check


class Fp8Rollout(ppo.Recipe):
    def sampler_settings(self, settings):
        """Refuses a run without a GPU. A plan of memory does not need a GPU."""
        has_gpu = torch.cuda.is_available()
        told = "--variant fp8_rollout needs a GPU of compute capability 8.9 or more"
        check.require(has_gpu, told)
        return super().sampler_settings(settings) | {"quantization": "fp8_per_channel"}

    def allowed_gap(self, mean, worst):
        return 0.2, 1.0
