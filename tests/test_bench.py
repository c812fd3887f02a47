"""tools/bench.py: it measures what it says. No figure is compared here."""

import pytest

from tools import bench


def test_every_token_of_a_made_tokenizer_has_a_text():
    """Once only 257 tokens had a text, so the sampler searched hardly any text."""
    tokenizer = bench.byte_tokenizer(5000)
    texts = tokenizer.batch_decode([[number] for number in range(1, 5000)])
    assert len(tokenizer) == 5000 and all(texts) and sum(map(len, texts)) > 3.8 * 5000
    assert tokenizer.decode(tokenizer.encode("12 + 30 = ?</answer>")) == "12 + 30 = ?</answer>"


def test_a_step_without_an_update_is_no_measurement():
    step = {"policy_tokens": 640, "seconds": 9.0}
    assert bench.median_of([step] * 4, "seconds") == 9
    with pytest.raises(AssertionError, match="without a policy update"):
        bench.median_of([step, step, step | {"policy_tokens": 0}, step], "seconds")
