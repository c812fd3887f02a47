"""The sampler has its weights in fp8, which are half as large.

The trainer keeps its dtype, so sampler and trainer differ more. The allowed difference here is a
guess: fp8 needs a GPU of compute capability 8.9 or more, and has never run here.
"""

import torch

from lib import check


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    has_gpu = torch.cuda.is_available()
    check.require(has_gpu, "--variant fp8_rollout needs a GPU of compute capability 8.9 or more")


def sampler_settings(original, cfg, is_gpu):
    return original(cfg, is_gpu) | {"quantization": "fp8_per_channel"}


def allowed_gap(_original, cfg, is_gpu):
    return 0.2, 1.0
