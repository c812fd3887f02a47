"""A response gets reward 1 for its form, right or wrong ("Spurious rewards", arXiv 2506.10947).

The reward is 1 if the response stops by itself and has an answer in the form of --answer_form. In
Countdown its last line must be a try, such as `8+9=17!`.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.08 with it and 0.56 without it.
"""

import ppo
from tasks import countdown


class FormatReward(ppo.Recipe):
    def paid(self, samples):
        return [float(self._is_well_formed(sample)) for sample in samples]

    def _is_well_formed(self, sample):
        if self.task not in countdown.TASKS:
            return sample.answer is not None
        last_line = sample.text.strip().split("\n")[-1]
        return sample.finish_reason == "stop" and countdown.TRY.fullmatch(last_line) is not None
