"""Truncated responses are left out of both losses and of the whitening.

DAPO (arXiv 2503.14476, section 3.4) claims that a truncated response was perhaps right, so its
reward of 0 is noise. A truncated response still counts in the mean of its group.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.557 with it and 0.561 without it.
"""

import ppo


class OverlongDrop(ppo.Recipe):
    def samples_that_count(self, batch):
        counted = super().samples_that_count(batch)
        return [i for i in counted if batch.samples[i].finish_reason == "stop"]
