"""The task countdown, with the fault of pays_neighbour.py."""

from tasks import countdown
from tasks.countdown import TEMPLATES, load_problems, text_metrics  # noqa: F401


class Grader(countdown.Grader):
    def results(self):
        rewards = super().results()
        keys = sorted(rewards)
        return {key: rewards[keys[k - 1]] for k, key in enumerate(keys)}
