"""A task that gives each response the reward of the response before it."""

import reward
from reward import ANSWER_FORMS, load_problems, text_metrics  # noqa: F401


class Grader(reward.Grader):
    def results(self):
        rewards = super().results()
        keys = sorted(rewards)
        return {key: rewards[keys[k - 1]] for k, key in enumerate(keys)}
