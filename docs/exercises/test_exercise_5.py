"""Exercise 5: a small reward for the form. It fails until reward.py gives it."""

import os
import sys

# This folder has the reward.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import reward  # noqa: E402


def test_a_wrong_answer_in_the_right_form_is_worth_a_tenth():
    def boxed(answer):
        return f"so</think><answer>\\boxed{{{answer}}}</answer>"

    with reward.Grader() as grader:
        grader.submit("right", boxed(42), "stop", "42")
        grader.submit("wrong", boxed(41), "stop", "42")
        grader.submit("no box", "42</answer>", "stop", "42")
        grader.submit("truncated", boxed(41), "length", "42")
        assert grader.results() == {"right": 1.0, "wrong": 0.1, "no box": 0.0, "truncated": 0.0}
    assert reward.is_equiv("1/2", "0.5")
    assert not reward.is_equiv("1/2", "0.6"), "a tenth is not equality"
