"""tools/word_problems.py: its answers are right, and no held-out question is trained on."""

import json
import re
import subprocess
import sys

import pytest
import tiny as maker
from conftest import ROOT, clean_environment, jsonl

from tools import word_problems


def solve(question: str) -> int:
    """Reads the story from left to right, which the generator does not do."""
    total = 0
    boxes = None
    story = question.partition("How many")[0]
    for word, number in re.findall(r"(\w+) (\d+)", story):
        if word == "of":
            total += boxes * int(number)
        elif f"{word} {number} boxes" in story:
            boxes = int(number)
        elif word == "loses":
            total -= int(number)
        else:
            assert word in ("has", "buys", "finds"), question
            total += int(number)
    return total


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_right_and_not_negative(seed):
    train, held_out = word_problems.draw_problems(seed, 2000, 200)
    for problem in train + held_out:
        assert "\n" not in problem["question"]
        assert solve(problem["question"]) == int(problem["answer"]) > 0, problem


def test_held_out_problems_are_not_trained_on():
    train, held_out = word_problems.draw_problems(1, 4000, 200)
    questions = [problem["question"] for problem in train + held_out]
    assert len(set(questions)) == len(questions) == 4200


def test_the_files_are_a_function_of_the_seed(tmp_path):
    command = [sys.executable, ROOT / "tools/word_problems.py"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = [tmp_path / name, "--seed", seed, "--train", "50", "--held_out", "5"]
        subprocess.run([*command, *words], check=True)
    texts = {name: (tmp_path / name / "train.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    assert len(jsonl(tmp_path / "a" / "eval.jsonl")) == 5
    assert json.loads(texts["a"].splitlines()[0]).keys() == {"question", "answer"}


@pytest.mark.parametrize("flags", [["--train", "0"], ["--held_out", "-1"], ["--train", "1000000"]])
def test_sizes_that_cannot_be_made_are_refused_and_nothing_is_overwritten(flags, tmp_path):
    """The last one never came to an end."""
    command = [sys.executable, ROOT / "tools/word_problems.py", tmp_path / "words", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --train, --held_out: ")
    assert not (tmp_path / "words").exists()


@pytest.mark.parametrize("words", [[], ["nowhere"]])
def test_the_recipe_without_a_folder_starts_nothing(words, tmp_path):
    """torchrun's forty lines stood around the error."""
    command = ["bash", ROOT / "runs/smollm2_cpu.sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, ROOT / "tools/word_problems.py", tmp_path / "file" / "words"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_recipe_trains_a_folder(tmp_path):
    """One step, with a tiny random model whose tokenizer takes any text."""
    model = maker.make_model(tmp_path / "model", text_tokenizer=True, max_position_embeddings=1024)
    run = tmp_path / "run"
    flags = ["--run_dir", run, "--max_steps", "1", "--eval_interval", "0"]
    # This tokenizer needs more tokens for a text.
    flags += ["--prompt_max_len", "400", "--max_len", "450", "--packing_max_len", "450"]
    command = ["bash", ROOT / "runs/smollm2_cpu.sh", model, *flags]
    # With 0 the system chooses the port.
    environment = clean_environment() | {"MASTER_PORT": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(jsonl(run / "metrics.jsonl")) == 1
    assert jsonl(run / "eval.jsonl")[0]["problems"] == 200
