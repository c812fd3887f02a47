"""A task for bench.py and bench_gpu.py: mathematics in which every second response counts as right.

It is given as `--task tools/bench_task.py`. Random models are never right, and from a group of
equal rewards nothing is learnt: such a step would be measured without its policy update. Responses
are graded all the same, so that their grading is measured too.
"""

from reward import ANSWER_FORMS, load_problems, text_metrics  # noqa: F401
from reward import Grader as MathGrader


class Grader(MathGrader):
    def results(self):
        """{key: 1.0 for every second one}. A key is a response's position in its step."""
        return {key: key % 2.0 for key in super().results()}
