"""Form alone is paid, right or not ("Spurious rewards", arXiv 2506.10947).

A response is paid if it stops by itself with an answer in the form of --answer_form; in miniature
Countdown, with a try in its last line.
Laboratory: accuracy 0.08 with it, 0.56 without it (GRPO, 3 seeds).
"""

from tasks import countdown


def paid(_original, samples, cfg):
    return [float(_is_well_formed(sample, cfg)) for sample in samples]


def _is_well_formed(sample, cfg):
    if cfg.task != "countdown":
        return sample.answer is not None
    last_line = sample.text.strip().split("\n")[-1]
    return sample.finish_reason == "stop" and countdown.TRY.fullmatch(last_line) is not None
