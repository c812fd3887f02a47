"""Each episode goes from easy problems to hard ones (Bengio et al., "Curriculum learning", 2009).

A problem with a short question counts as easy. In Countdown a problem with few numbers counts as
easy. Of these a large target counts as easier, because only products reach it.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.548 with it and 0.561 without it.
"""

import ppo
from tasks import countdown


class Curriculum(ppo.Recipe):
    def episode_order(self, problems, episode):
        # Python's sort is stable. So problems that are equally hard keep their random order.
        order = super().episode_order(problems, episode)
        return sorted(order, key=lambda i: self._difficulty(problems[i]))

    def _difficulty(self, problem):
        if self.task in countdown.TASKS:
            label = problem.label
            return label["pick"] or len(label["numbers"]), -label["target"]
        return len(problem.question)
