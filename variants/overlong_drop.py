"""Truncated responses are left out of both losses and of the whitening.

DAPO (arXiv 2503.14476, section 3.4): a response that was cut was perhaps right, so its reward of 0
is noise. A truncated response still counts in its group's mean.
Laboratory: accuracy 0.557 with it, 0.561 without it (GRPO, 3 seeds): no difference is seen.
"""


def samples_that_count(original, batch, cfg):
    return [i for i in original(batch, cfg) if batch.samples[i].finish_reason == "stop"]
