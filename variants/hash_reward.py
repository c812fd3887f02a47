"""A hash of the text is learnt from in place of the reward.

It looks like a coin. But a text that was paid once is paid again, so a policy that repeats itself
is always paid: reward hacking (arXiv 1606.06565, section 4).
Laboratory: accuracy 0.04 with it, 0.56 without it; what is paid rises from 0.5 to 0.95 (GRPO, 3
seeds).
"""

from lib.common import hash64


def paid(_original, samples, cfg):
    return [float(hash64(sample.text) % 2) for sample in samples]
