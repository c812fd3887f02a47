"""Wrong responses are paid and right ones are not ("Spurious rewards", arXiv 2506.10947).

The claim: it even helped some base models. On clean data only right rewards help (2507.10532).
Laboratory: accuracy 0.002 with it, 0.561 without it (GRPO, 3 seeds).
"""


def paid(original, samples, cfg):
    return [1 - reward for reward in original(samples, cfg)]
