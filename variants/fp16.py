"""--bf16 true means fp16 in the trainer and in the sampler (arXiv 2510.26788).

fp16 has three more bits of precision than bf16, so it rounds eight times finer. The paper claims
that the sampler's log-probs are then nearer to the trainer's log-probs. In fp16 a gradient below
6e-8 becomes 0, and a gradient above 65,504 becomes infinite. So the loss is multiplied by a factor,
at first 2^16, and the fp32 sums of the gradients are divided by this factor. If the sums overflow,
no update is made, `policy_grad_norm` is 0, and the factor is halved.
This variant needs a GPU. It has not run on a GPU.
"""

import torch


def training_dtype(original, cfg):
    return torch.float16 if cfg.bf16 else original(cfg)


def engine_config(original, cfg, stage):
    settings = original(cfg, stage)
    settings["fp16"] = settings.pop("bf16") | {"initial_scale_power": 16, "hysteresis": 1}
    return settings


def sampler_settings(original, cfg, is_gpu):
    settings = original(cfg, is_gpu)
    if cfg.bf16:
        settings["dtype"] = "float16"
    return settings


def optimizer_step(original, learner, lr):
    engine = learner.deepspeed
    skipped = engine.skipped_steps
    try:
        return original(learner, lr)
    except FloatingPointError:
        # The factor was too large. If the factor is 1 already, DeepSpeed raises its own error.
        if engine.fp16_enabled() and engine.skipped_steps > skipped:
            return 0.0
        raise
