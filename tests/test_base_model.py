"""tools/base_model.py: what its folders hold. No folder is overwritten or incomplete."""

import functools
import json
import random
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest
import tiny as maker
import torch
from conftest import ROOT, clean_environment, held_port, jsonl, run_python, run_tool
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
from tasks import chain
from tools import base_model
from train import parse_flags


def answer_of_question(path) -> dict:
    return {problem.question: problem.label for problem in reward.load_problems(str(path), "demo")}


def contents(folder) -> dict:
    """Every file of the folder with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def make(monkeypatch):
    """make(folder, seed) is the command in this process, with two updates, which take a second."""
    two = functools.partial(base_model.Addition, updates=2)
    monkeypatch.setitem(base_model.RECIPES, "addition", two)
    # With more cores the command would give this process more threads.
    monkeypatch.setattr(base_model.os, "sched_getaffinity", lambda _: {0})

    def run(folder, seed: int) -> None:
        words = ["base_model.py", "addition", str(folder), "--seed", str(seed)]
        monkeypatch.setattr("sys.argv", words)
        base_model.main()

    return run


def test_the_folder_holds_a_model_problems_and_flags_by_the_seed(make, tmp_path, capsys):
    """All 8,100 additions of two-digit numbers, without both orders of the held-out ones."""
    base = tmp_path / "new folder" / "base"
    make(base, 1)
    held_out = answer_of_question(base / "eval.json")
    train = answer_of_question(base / "train.json")
    assert len(held_out) == 256
    reversed_too = held_out.keys() | {"+".join(key.split("+")[::-1]) for key in held_out}
    assert not reversed_too & train.keys() and len(reversed_too) + len(train) == 90 * 90
    for question, answer in (train | held_out).items():
        assert sum(map(int, question.split("+"))) == int(answer)
    cfg = parse_flags(shlex.split((base / "flags.txt").read_text()))
    files = ([f"{base}/train.json"], [f"{base}/eval.json"])
    assert (cfg.model, cfg.data, cfg.eval_data) == (str(base), *files)
    assert "flags.txt has quotes, because of this path" in capsys.readouterr().out
    make(tmp_path / "again", 1)
    make(tmp_path / "other", 2)
    for name in ("model.safetensors", "train.json", "eval.json"):
        assert contents(tmp_path / "again")[name][1] == contents(base)[name][1]
        assert contents(tmp_path / "other")[name][1] != contents(base)[name][1]


@pytest.mark.parametrize("task", base_model.FLAGS)
@pytest.mark.parametrize("form", ['xargs "$@" < flags.txt', '"$@" $(cat flags.txt)'])
def test_flags_are_read_by_xargs_and_by_cat(tmp_path, task, form):
    """A shell does not remove the quotes of what `cat` prints."""
    base_model.write_flags(tmp_path, task, 3)
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    command = ["bash", "-c", form, "-", *show]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    cfg = parse_flags(json.loads(done.stdout))
    assert (cfg.model, cfg.data) == (str(tmp_path), [f"{tmp_path}/train.json"])
    stop = None if task == "chain" else []
    assert (cfg.stop, cfg.bf16, cfg.gradient_checkpointing) == (stop, False, False)
    assert cfg.template == ("demo" if task == "addition" else "mini")


def test_a_base_is_never_incomplete_and_never_overwritten(make, tmp_path, monkeypatch, capsys):
    """Only flags.txt is written again, because its paths change when a base model is copied."""
    base = tmp_path / "base"

    def start_another(*_):
        with pytest.raises(SystemExit, match="2"):
            make(base, 1)
        told = f"error: {base}: another run makes this model now; choose another folder"
        assert capsys.readouterr().err.startswith(told)
        raise KeyboardInterrupt

    interrupt = mock.patch.object(base_model.Addition, "record", start_another)
    with interrupt, pytest.raises(KeyboardInterrupt):
        make(base, 1)
    assert not base.exists()
    make(base, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    before = contents(base)
    _, flags = before.pop("flags.txt")
    (base / "flags.txt").write_text("--model /of/another/run\n")
    make(base, 1)
    assert (base / "flags.txt").read_bytes() == flags
    with pytest.raises(SystemExit, match="2"):
        make(base, 2)
    other = functools.partial(base_model.Addition, updates=3)
    monkeypatch.setitem(base_model.RECIPES, "addition", other)
    with pytest.raises(SystemExit, match="2"):
        make(base, 1)
    told = f"error: {base}: this is not the base model of this command and --seed %s; choose"
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(told % 2) and second.startswith(told % 1)
    assert before.items() <= contents(base).items()


@pytest.mark.parametrize("recipe", ["", '{"seed', "[1]"])
def test_a_folder_that_is_no_base_model_is_refused(recipe, make, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(recipe)
    before = contents(tmp_path)
    for path in (tmp_path, tmp_path / "recipe.json"):
        with pytest.raises(SystemExit, match="2"):
            make(path, 1)
        assert f"error: {path}: this is not the base model" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_base_model_works_some_answers_and_guesses_the_others(tmp_path):
    """About a quarter of the answers are worked, and nearly all of those are right."""
    base = tmp_path / "base"
    run_python("tools/base_model.py", "addition", base)
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    problems = [*answer_of_question(base / "eval.json").items()] * 4
    ids = torch.tensor(tokenizer([f"{question}<think>" for question, _ in problems])["input_ids"])
    torch.manual_seed(1)
    output = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=40)
    worked = []
    guessed = []
    for (_, answer), response in zip(problems, tokenizer.batch_decode(output[:, ids.shape[1] :])):
        kind = guessed if response.startswith("</think>") else worked
        kind.append(f"\\boxed{{{answer}}}" in response)
    assert 0.18 < len(worked) / len(problems) < 0.33
    assert sum(worked) / len(worked) > 0.9
    assert sum(guessed) / len(guessed) < 0.3


def test_no_held_out_problem_is_trained_on(tmp_path):
    folder = tmp_path / "base"
    recipe = base_model.Countdown(seed=3, updates=2, batch=2)
    base_model.build(folder, recipe)
    train = json.loads((folder / "train.json").read_text())
    held_out = json.loads((folder / "eval.json").read_text())
    assert len(held_out) == recipe.held_out
    different = {(*sorted(record["nums"]), record["target"]) for record in train + held_out}
    assert len(different) == len(train + held_out) == 914


EXERCISES = [f"docs/exercises/{name}.py" for name in ("no_verdict", "blame")]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    "task, variant, names",
    [
        ("countdown", [], {"tries", "checked", "backtracking", "slips"}),
        ("chain", ["--variant", *EXERCISES, "--blame", "wrong"], {"letters", "wrong", "stutter"}),
    ],
)
def test_the_baseline_trains(task, variant, names, tmp_path):
    """A base with few updates, and two steps with its own flags."""
    folder = tmp_path / "base"
    base_model.build(folder, base_model.RECIPES[task](seed=1, updates=20))
    base_model.write_flags(folder, task, 1)
    flags = shlex.split((folder / "flags.txt").read_text()) + variant
    flags += ["--run_dir", tmp_path / "run", "--max_steps", 2, "--eval_interval", 0, "--eval_n", 1]
    run_python("train.py", *flags)
    first, second = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert names <= first.keys() and second["step"] == 2
    assert not variant or (first["wrong"], first["letters"] > 1) == (0, True)


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
        code, told, _ = run_tool("base_model", "words", tmp_path / name, "--seed", seed)
        assert code == 0 and told.endswith(f"{name} holds eval.jsonl, train.jsonl\n")
    held_out = jsonl(tmp_path / "a" / "eval.jsonl")
    problems = jsonl(tmp_path / "a" / "train.jsonl") + held_out
    assert len({problem["question"] for problem in problems}) == 4200 and len(held_out) == 200
    for problem in problems:
        assert "\n" not in problem["question"]
        assert solve(problem["question"]) == int(problem["answer"]) > 0, problem
    texts = {name: (tmp_path / name / "train.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    (tmp_path / "file").write_text("")
    code, _, error = run_tool("base_model", "words", tmp_path / "file" / "words")
    assert code == 2 and "Not a directory; choose" in error and error.count("\n") == 1
    # A file of somebody else's is kept.
    (tmp_path / "c" / "train.jsonl").write_text("mine")
    assert run_tool("base_model", "words", tmp_path / "c")[0] == 2
    assert (tmp_path / "c" / "train.jsonl").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(make, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with mock.patch.object(base_model, "pretrain") as train, pytest.raises(SystemExit, match="2"):
        make(tmp_path / "file" / "base", 1)
    assert not train.called and "Not a directory; choose another" in capsys.readouterr().err


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


def test_the_base_model_is_shown_what_the_task_says():
    """A right letter has a +, another one a -, and half of the texts have no verdict."""
    recipe = base_model.Chain(1, updates=4)
    texts = recipe.draw_texts([], random.Random(3))
    silent = wrong = letters = 0
    for prompt, *pieces in texts:
        assert prompt.weight == 0
        table, _, start = prompt.text.partition(":")
        record = {"table": table, "start": start.lower(), "steps": recipe.steps}
        label = chain.parse_record(record)["label"]
        text = "".join(piece.text for piece in pieces)
        said = ""
        for turn, answer in zip(pieces[::2], pieces[1::2]):
            assert (turn.weight, answer.weight) == (1, 0)
            told = chain.reply(said + turn.text, "stop", label | {"letters": start.lower() * 99})
            assert answer.text in (told, "?" + told[1:])
            said += turn.text + told
            wrong += told[0] == "-"
        letters += recipe.steps
        is_silent = "?" in text
        assert not (is_silent and set(text) & {"+", "-"})
        silent += is_silent
    assert 0.35 < silent / len(texts) < 0.65
    # 0.16 of the letters are random, and one in ten of these is right.
    assert 0.11 < wrong / letters < 0.18


def test_the_problems_are_different_and_no_chain_is_short(tmp_path):
    recipe = base_model.Chain(1, problems=50, held_out=20)
    train, held_out = recipe.split_problems(random.Random(1))
    assert (len(train), len(held_out)) == (50, 20)
    assert len({str(problem) for problem in train + held_out}) == 70
    for problem in train:
        label = chain.parse_record(problem)["label"]
        assert len(set(label["letters"])) == recipe.steps + 1, "no letter comes twice"
