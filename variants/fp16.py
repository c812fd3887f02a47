"""--bf16 true means fp16, in the trainer and in the sampler (arXiv 2510.26788).

fp16 has three bits more than bf16 and rounds eight times finer, so the sampler's log-probs are
nearer to the trainer's. But in fp16 a gradient below 6e-8 is 0 and one above 65,504 is infinite. So
the loss is multiplied by 2^16, which is divided out of the fp32 sums. If they overflow, no step is
taken, `policy_grad_norm` is 0, and the factor is halved. It needs a GPU, and has not run on one.
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
        # The loss was multiplied by too much. DeepSpeed raises an error once the factor is 1.
        if engine.fp16_enabled() and engine.skipped_steps > skipped:
            return 0.0
        raise
