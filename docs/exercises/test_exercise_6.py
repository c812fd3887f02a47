"""Exercise 6: an answer without a box. It fails until reward.extract_answer takes it."""

import os
import sys

# This folder has the reward.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import reward  # noqa: E402


def test_an_answer_block_without_a_box_is_the_answer():
    assert reward.extract_answer("so</think> <answer> 42 </answer>") == "42"
    assert reward.extract_answer("<answer>1</answer> <answer>2</answer>") == "2", "the last counts"
    assert reward.extract_answer("<answer>it is \\boxed{42}.</answer>") == "42", "a box counts"
    assert reward.extract_answer("<answer>none: \\boxed{}</answer>") == "", "an empty one too"
    for nothing in ("42", "<answer> </answer>", "<answer>42", "<think>\\boxed{42}</think>"):
        assert reward.extract_answer(nothing) is None
