"""The task calculator: Countdown, and the policy has a calculator.

    python tools/base_model.py countdown out/lab/base
    python train.py $(xargs < out/lab/base/flags.txt) --task calculator

The policy writes `9+3=`. The calculator replies with the value and its comparison with the target,
`12<`. All else is as in the miniature of tasks/countdown.py, with the same base model. So a line
`9+8=`, to which the calculator has replied `17!`, is an answer: the policy has drawn `9+8`. The
base model knows no other numbers than 0 to 99. If the value is another one, the reply is `0<`, and
the metric `slips` counts it.
"""

from tasks.countdown import Grader, load_problems, read_expression, text_metrics

__all__ = ["STOP", "Grader", "load_problems", "reply", "text_metrics"]

STOP = ["="]


def reply(text, finish_reason, label):
    """The value of the last expression, or None if the response does not end with one and =."""
    if finish_reason != "stop" or not text.endswith("="):
        return None
    value, _ = read_expression(text.split("\n")[-1][:-1])
    if value is None or value.denominator != 1 or not 0 <= value <= 99:
        return "0<"
    verdict = "!"
    if value != label["target"]:
        verdict = "<" if value < label["target"] else ">"
    return f"{value}{verdict}"
