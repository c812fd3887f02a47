"""The benchmarks in tools/: what they measure is what they say. No figure is compared here.

What needs no model is tried in milliseconds. The whole runs of train.py are `slow`.
"""

import gc

import pytest
import torch
from conftest import ROOT
from transformers import Qwen2ForCausalLM

import train
from tools import bench, bench_gpu, card, memory

TASK = str(ROOT / "tools" / "bench_task.py")
# The lines of metrics.jsonl that the benchmarks read.
STEP = {"policy_tokens": 640, "seconds": 9.0, "tokens_per_second": 100.0}
STEP |= {"seconds_rollout": 4.0, "seconds_policy": 3.0, "seconds_sync": 1.0}
STEP |= {"memory_rollout": 40.0, "memory_policy": 30.0, "memory_sync": 20.0}
TINY = bench_gpu.TINY


# ---- the parts of make card ----------------------------------------------------------------------


def test_the_parts_are_those_of_make_card():
    measured = {name for name, part in card.PARTS.items() if not part.tests}
    assert set(bench_gpu.PARTS_ON_GPU) == set(bench_gpu.PARTS_ON_CPU) == measured


def test_every_token_has_a_text():
    """Of 151,936 numbers that a model samples 257 had one, and so hardly any text was searched for
    stop strings."""
    size = memory.model_config(bench_gpu.SMALL).vocab_size
    tokenizer = bench_gpu.make_tokenizer(size)
    assert len(tokenizer) == size
    texts = tokenizer.batch_decode([[number] for number in range(1, size)])
    assert all(texts) and sum(map(len, texts)) > 3.9 * size
    for text in ("12 + 30 = ?", "User:", "</answer>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_nothing_of_a_model_that_was_made_stays(tmp_path, monkeypatch):
    """The allocator kept a GiB of it, which was taken for memory of the run."""

    def alive() -> int:
        return sum(type(thing) is Qwen2ForCausalLM for thing in gc.get_objects())

    found = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(alive()))
    before = alive()
    bench_gpu.make_model(str(tmp_path), bench_gpu.SMALL, **TINY)
    assert found and found[-1] <= before


def test_the_bench_of_updates_runs(tmp_path, process_group):
    """At sizes of milliseconds, where torch finds no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = bench_gpu.Learning(bench_gpu.SMALL, "_7b", TINY, row=64, sample=32, prompt=8)
    found = bench_gpu.bench_attention(str(tmp_path), device, case)
    assert set(found) & set(card.FIGURES) == {"mfu_7b", "head_share_7b", "train_tokens_per_s_7b"}
    assert all(value > 0 for value in found.values())
    # 4 samples of 32 tokens, of which 24 each pass through the head.
    body = 2 * 64 * (64 + 32) + 3 * 64 * 128
    flops = 6 * 4 * (32 * body + 24 * 512 * 64) + 12 * 4 * 32 * 16 * 64
    config = memory.model_config(bench_gpu.SMALL, **TINY)
    assert bench_gpu.model_flops(config, case) == pytest.approx(flops, rel=0.01)


def test_the_bench_of_advantages_runs(tmp_path, process_group):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = bench_gpu.bench_advantages(str(tmp_path), device, 64, 50)
    assert set(found) & set(card.FIGURES) == {"advantages_s"}


# ---- whole steps ---------------------------------------------------------------------------------


def test_every_second_response_counts_as_right():
    """Rewards were patched into the module `reward`, and a run executes its task as another one:
    all were 0, groups were flat and no policy update was measured."""
    task = train.find_task(train.parse_flags(["--model", "m", "--data", "d", "--task", TASK]))
    with task.Grader(1, "orz") as grader:
        for position in range(4):
            grader.submit(position, "nothing", "length", "1")
        assert grader.results() == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
        assert grader.results() == {}


def test_a_step_without_an_update_is_no_measurement():
    """Nothing told that every group was flat."""
    assert bench_gpu.step_figures([STEP] * 4)["step_s"] == 9
    with pytest.raises(AssertionError, match="without a policy update"):
        bench_gpu.step_figures([STEP, STEP, STEP | {"policy_tokens": 0}, STEP])


def test_what_was_held_before_a_run_is_not_the_runs():
    """A run's memory is read off the whole card, where the process that starts it has a part."""
    plan = {"rollout": {"planned_gib": 40.0}, "policy": {"planned_gib": 30.0}}
    found = bench_gpu.phases([STEP] * 4, 2.0, plan)
    assert found["rollout"] == {"seconds": 4, "gib": 38, "planned_gib": 40}
    assert found["policy"] == {"seconds": 3, "gib": 28, "planned_gib": 30}


@pytest.mark.parametrize(
    "name, gb, expected",
    [
        ("NVIDIA H100 80GB HBM3", 80, "H100"),
        ("NVIDIA H100 PCIe", 80, "H100-PCIE"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100"),
        ("NVIDIA L40S", 48, "L40S"),
        ("NVIDIA GeForce RTX 4090", 24, "4090"),
        ("NVIDIA B200", 180, None),
    ],
)
def test_a_card_is_planned_by_its_data_sheet(name, gb, expected):
    card_of = bench_gpu.data_sheet(name, gb)
    assert (card_of and card_of.name) == expected


@pytest.mark.slow
def test_the_steps_beside_trl_update_the_policy(tiny, tmp_path):
    """Of a random model, which is never right."""
    data = tmp_path / "data.jsonl"
    bench.write_problems(str(data), range(10, 14))
    case = bench.TrlCase("tiny", tiny["model"], 2, 4, 16, 8)
    lines = bench.our_steps(case, str(data), str(tmp_path / "run"))
    assert [line["reward"] for line in lines] == [0.5] * 4
    # Every response takes part, and its prompt with it.
    assert all(line["policy_tokens"] >= 2 * 4 * 6 for line in lines)
