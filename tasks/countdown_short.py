"""The task countdown_short: is a response right, and is it short? These are two rewards.

    python tools/base_model.py countdown out/lab/base
    python train.py $(xargs < out/lab/base/flags.txt) --task countdown_short

By default the policy learns from `right` alone, and `short` is only logged. --reward_weights
short=0.5 pays for both. A wrong response may be short, too. The second reward suits the responses
of the laboratory: all else is as in the miniature of tasks/countdown.py, with the same base model.
"""

from tasks import countdown
from tasks.countdown import load_problems, text_metrics

__all__ = ["REWARDS", "Grader", "load_problems", "text_metrics"]

REWARDS = ("right", "short")
# Characters. In the laboratory the limit of a response is 63 tokens, and a number of two digits is
# one token. So a response of fewer tokens may have 0, too.
LIMIT = 63


class Grader(countdown.Grader):
    def submit(self, key, text, finish_reason, label):
        """short: 1.0 for an empty response, and 0.0 for a response of 63 characters or more."""
        answer = super().submit(key, text, finish_reason, label)
        short = max(0.0, 1 - len(text) / LIMIT)
        self.rewards[key] = {"right": self.rewards[key], "short": short}
        return answer
