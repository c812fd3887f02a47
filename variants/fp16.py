"""--bf16 true means fp16 in the trainer and in the sampler (arXiv 2510.26788).

fp16 rounds eight times finer than bf16, so the paper claims that the log-probs of sampler and
trainer are nearer. A gradient below 6e-8 becomes 0 in fp16, and one above 65,504 becomes infinite.
So the loss is multiplied by a factor, at first 2^16, and the fp32 sums of the gradients are divided
by it. If the sums overflow, no update is made, the logged norm is 0, and the factor is halved.
This variant has not run on a GPU.
"""

import torch

import ppo


class Fp16(ppo.Recipe):
    def training_dtype(self, dtype):
        return torch.float16 if self.bf16 else super().training_dtype(dtype)

    def engine_settings(self, settings):
        settings = super().engine_settings(settings)
        # The entry "enabled" stays.
        settings["fp16"] = settings.pop("bf16") | {"initial_scale_power": 16, "hysteresis": 1}
        return settings

    def sampler_settings(self, settings):
        settings = super().sampler_settings(settings)
        if self.bf16:
            settings["dtype"] = "float16"
        return settings
