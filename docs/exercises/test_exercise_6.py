"""Exercise 6: an answer without a box. Red until reward.extract_answer takes it."""
import os
import sys

sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))  # where the reward.py under test lies
import reward  # noqa: E402


def test_an_answer_block_without_a_box_is_the_answer():
    assert reward.extract_answer("so</think> <answer> 42 </answer>") == "42"
    assert reward.extract_answer("<answer>1</answer> no: <answer>2</answer>") == "2", "the last block counts"
    assert reward.extract_answer("<answer>it is \\boxed{42}.</answer>") == "42", "where there is a box, it counts"
    for nothing in ("42", "<answer> </answer>", "<answer>42", "<think>\\boxed{42}</think>"):
        assert reward.extract_answer(nothing) is None
