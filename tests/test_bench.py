"""The benchmarks in tools/: what they measure is what they say. No figure is compared here.

What needs no model is tried in milliseconds. The whole runs of train.py are `slow`.
"""

import gc
import json
import os
import select
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, clean_environment
from transformers import Qwen2ForCausalLM

import train
from lib import memory
from tools import bench, bench_gpu

TASK = str(ROOT / "tools" / "bench_task.py")
# The lines of metrics.jsonl that the benchmarks read.
STEP = {"policy_tokens": 640, "seconds": 9.0}
STEP |= {"seconds_rollout": 4.0, "seconds_policy": 3.0, "seconds_sync": 1.0}
STEP |= {"memory_rollout": 40.0, "memory_policy": 30.0, "memory_sync": 20.0}


# ---- the bench of a GPU --------------------------------------------------------------------------

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 512,
}
KNOWN = {name for names in bench_gpu.COLUMNS.values() for name in names}


def test_a_bench_fills_a_row_of_the_table_of_runs():
    """docs/scaling.md's table of runs on GPUs is filled by what the bench prints."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    heads = f"| {' | '.join(bench_gpu.COLUMNS)} |"
    assert heads in text
    row = bench_gpu.row({"card": "NVIDIA H100", "driver": "580.65", "step_s": 6.394})
    assert row.count("|") == heads.count("|")
    assert row.startswith("| NVIDIA H100, 580.65, failed |") and row.endswith("| 6.39 |")


def test_without_a_card_the_bench_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        bench_gpu.main()
    assert exit.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: torch finds no GPU, and this bench needs one\n"


@pytest.mark.slow
def test_the_bench_of_a_gpu_is_a_part_of_the_bench():
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "gpu"]
    env = clean_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: torch finds no GPU, and this bench needs one\n")


def test_the_parts_take_five_minutes_at_most():
    """Each had 200 s, and there are five."""
    assert set(bench_gpu.LIMITS) == set(bench_gpu.PARTS)
    assert sum(bench_gpu.LIMITS.values()) <= 300


def test_what_a_part_started_ends_with_it(tmp_path):
    """A train.py went on when the time of its part was up, and held the card."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    # It says something, so the pipe has had a writer, and holds it open until it ends.
    child = f"sh -c 'echo begun; exec sleep 1000' > {pipe} 2>&1"
    with pytest.raises(subprocess.TimeoutExpired):
        bench_gpu.figures_of(["sh", "-c", f"{child} & wait"], seconds=2)
    said = b""
    while select.select([reader], [], [], 60)[0]:
        said = os.read(reader, 100)
        if not said:
            break
    os.close(reader)
    assert said == b"", "it still runs"


def test_a_part_that_fails_says_why():
    """The others go on."""
    assert bench_gpu.figures_of(["sh", "-c", "echo 1; echo '{\"a\": 2}'"], 60) == {"a": 2}
    with pytest.raises(ValueError, match="^the last word$"):
        bench_gpu.figures_of(["sh", "-c", "echo first >&2; echo the last word >&2; exit 3"], 60)


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
    assert set(found) & KNOWN == {"varlen_vs_sdpa_7b", "mfu_7b", "head_share_7b"}
    assert all(value > 0 for value in found.values())
    # 4 samples of 32 tokens, of which 24 each pass through the head.
    body = 2 * 64 * (64 + 32) + 3 * 64 * 128
    flops = 6 * 4 * (32 * body + 24 * 512 * 64) + 12 * 4 * 32 * 16 * 64
    config = memory.model_config(bench_gpu.SMALL, **TINY)
    assert bench_gpu.model_flops(config, case) == pytest.approx(flops, rel=0.01)


def test_the_bench_of_advantages_runs(tmp_path, process_group):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = bench_gpu.bench_advantages(str(tmp_path), device, 64, 50)
    assert set(found) & KNOWN == {"advantages_s"}


# ---- whole steps ---------------------------------------------------------------------------------


def test_every_second_response_counts_as_right():
    """Rewards were patched into the module `reward`, and a run executes its task as another one:
    all were 0, groups were flat and no policy update was measured."""
    task = train.find_task(train.parse_flags(["--model", "m", "--data", "d", "--reward", TASK]))
    with task.Grader(1, "orz") as grader:
        for position in range(4):
            grader.submit(position, "nothing", "length", "1")
        assert grader.results() == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
        assert grader.results() == {}


def test_a_step_without_an_update_is_no_measurement():
    """Nothing told that every group was flat."""
    assert bench_gpu.step_figures([STEP] * 4, held=0.0)["step_s"] == 9
    with pytest.raises(AssertionError, match="without a policy update"):
        bench_gpu.step_figures([STEP, STEP, STEP | {"policy_tokens": 0}, STEP], held=0.0)


def test_what_was_held_before_a_run_is_not_the_runs():
    """A run's memory is read off the whole card, where the process that starts it has a part."""
    figures = bench_gpu.step_figures([STEP] * 4, held=2.0)
    assert figures["memory_rollout_gib"] == 38
    assert figures["memory_policy_gib"] == 28


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


SIZES = {
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "prompt_max_len": 64,
    "generate_max_len": 16,
    "max_len": 128,
    "packing_max_len": 128,
    "max_steps": 2,
    "kv_cache_gb": 0.25,
    "micro_rollout_batch_size": 8,
}


@pytest.mark.slow
def test_the_steps_on_a_gpu_update_the_policy(tmp_path, process_group):
    figures = bench_gpu.bench_step(str(tmp_path), None, bench_gpu.STEP_FLAGS | SIZES, **TINY)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.5]
    assert all(value > 0 for value in figures.values())
