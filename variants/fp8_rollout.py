"""The sampler keeps its weights in fp8, which takes half the memory.

The trainer keeps its dtype, so the log-probs of sampler and trainer differ more. The allowed
difference in this file is a guess. This variant has never run here, because fp8 needs a GPU of
compute capability 8.9 or more.
"""

import torch

from lib import check


def find_task(original, cfg):
    """Refuses a run without a GPU. A plan of memory does not need a GPU."""
    has_gpu = torch.cuda.is_available()
    check.require(has_gpu, "--variant fp8_rollout needs a GPU of compute capability 8.9 or more")
    return original(cfg)


def sampler_settings(original, cfg, is_gpu):
    return original(cfg, is_gpu) | {"quantization": "fp8_per_channel"}


def allowed_gap(_original, cfg, is_gpu):
    return 0.2, 1.0
