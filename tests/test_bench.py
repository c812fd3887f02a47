"""The benchmarks in tools/: what they measure is what they say. No figure is compared here."""

import pytest
from conftest import ROOT, config

import train
from tools import bench_gpu, memory


def test_every_token_of_a_made_tokenizer_has_a_text():
    """257 of them had one, and so hardly any text was searched for stop strings."""
    tokenizer = bench_gpu.make_tokenizer(5000)
    texts = tokenizer.batch_decode([[number] for number in range(1, 5000)])
    assert len(tokenizer) == 5000 and all(texts) and sum(map(len, texts)) > 3.8 * 5000
    assert tokenizer.decode(tokenizer.encode("12 + 30 = ?</answer>")) == "12 + 30 = ?</answer>"


def test_the_flops_of_an_update_are_those_counted_by_hand():
    """Of 4 samples of 32 tokens, of which 24 each pass through the head."""
    tiny = bench_gpu.TINY
    case = bench_gpu.Learning(bench_gpu.SMALL, "", tiny, row=64, sample=32, prompt=8)
    body = 2 * 64 * (64 + 32) + 3 * 64 * 128
    flops = 6 * 4 * (32 * body + 24 * 512 * 64) + 12 * 4 * 32 * 16 * 64
    found = bench_gpu.model_flops(memory.model_config(bench_gpu.SMALL, **tiny), case)
    assert found == pytest.approx(flops, rel=0.01)


def test_every_second_response_counts_as_right():
    """Graded by its answers, a random model has reward 0, and no policy update is measured."""
    task = train.find_task(config(task=ROOT / "tools" / "bench_task.py"))
    with task.Grader(1, "orz") as grader:
        for position in range(4):
            grader.submit(position, "nothing", "length", "1")
        assert grader.results() == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}


def test_a_step_without_an_update_is_no_measurement():
    step = {"policy_tokens": 640, "seconds": 9.0, "tokens_per_second": 100.0}
    assert bench_gpu.step_figures([step] * 4)["step_s"] == 9
    with pytest.raises(AssertionError, match="without a policy update"):
        bench_gpu.step_figures([step, step, step | {"policy_tokens": 0}, step])
