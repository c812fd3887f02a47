"""A task that pays 0.5 for each response."""

import reward
from reward import ANSWER_FORMS, load_problems, text_metrics  # noqa: F401


class Grader(reward.Grader):
    def results(self):
        return dict.fromkeys(super().results(), 0.5)
