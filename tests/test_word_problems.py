"""tools/word_problems.py: its answers are right, and no held-out question is trained on."""

import re
import subprocess

import pytest
import tiny as maker
from conftest import ROOT, clean_environment, held_port, jsonl, run_python


def solve(question: str) -> int:
    """Reads the story from left to right, which the generator does not do."""
    total = 0
    story = question.partition("How many")[0]
    for verb, number, each in re.findall(r"(\w+) (\d+)(?: boxes of (\d+))?", story):
        assert verb in ("has", "buys", "finds", "loses"), question
        value = int(number) * int(each or 1)
        total += -value if verb == "loses" else value
    return total


def test_every_answer_is_right_no_question_comes_twice_and_the_seed_decides(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_python("tools/word_problems.py", tmp_path / name, "--seed", seed)
    held_out = jsonl(tmp_path / "a" / "eval.jsonl")
    problems = jsonl(tmp_path / "a" / "train.jsonl") + held_out
    assert len({problem["question"] for problem in problems}) == 4200 and len(held_out) == 200
    for problem in problems:
        assert "\n" not in problem["question"]
        assert solve(problem["question"]) == int(problem["answer"]) > 0, problem
    texts = {name: (tmp_path / name / "train.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]


# A million never came to an end.
COUNTS = ["words --train 0", "words --held_out -1", "words --train 1000000"]
REFUSED = dict.fromkeys(COUNTS, "--train, --held_out: ") | {"file/words": "[Errno 20]"}


@pytest.mark.parametrize("words, error", REFUSED.items())
def test_what_cannot_be_made_is_refused_in_one_line(words, error, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_python(ROOT / "tools" / "word_problems.py", *words.split(), code=2, cwd=tmp_path)
    assert done.stderr.startswith(f"error: {error}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "words").exists()


def test_the_recipe_without_a_folder_starts_nothing():
    """The launcher torchrun is never started, so the error is one line."""
    command = ["bash", ROOT / "runs/smollm2_cpu.sh", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.engine
def test_the_recipe_trains_a_folder(tmp_path):
    """One step, with a tiny random model whose tokenizer takes any text."""
    model = maker.make_model(tmp_path / "model", text_tokenizer=True, max_position_embeddings=1024)
    run = tmp_path / "run"
    flags = ["--run_dir", run, "--max_steps", "1", "--eval_interval", "0"]
    # This tokenizer needs more tokens for a text.
    flags += ["--prompt_max_len", "400", "--max_len", "450", "--packing_max_len", "450"]
    command = ["bash", ROOT / "runs/smollm2_cpu.sh", model, *flags]
    with held_port() as port:
        subprocess.run(command, env=clean_environment() | {"MASTER_PORT": port}, check=True)
    assert len(jsonl(run / "metrics.jsonl")) == 1
    assert jsonl(run / "eval.jsonl")[0]["problems"] == 200
