"""tools/base_model.py: what its folders hold, and what its base models can do."""

import random
import re
import shlex
import subprocess
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


@pytest.fixture
def make(monkeypatch):
    """make(folder, seed) is the command in this process, with two updates, which take a second."""
    monkeypatch.setattr(base_model.Addition, "updates", 2)
    # With more cores the command would give this process more threads.
    monkeypatch.setattr(base_model.os, "sched_getaffinity", lambda _: {0})

    def run(folder, seed: int) -> dict:
        words = ["base_model.py", "addition", str(folder), "--seed", str(seed)]
        monkeypatch.setattr("sys.argv", words)
        base_model.main()
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return run


def test_no_held_out_addition_is_trained_on_and_the_seed_decides(make, tmp_path):
    """All 8,100 additions of two-digit numbers, without both orders of the held-out ones."""
    first = make(tmp_path / "base", 1)
    held_out = answer_of_question(tmp_path / "base" / "eval.json")
    train = answer_of_question(tmp_path / "base" / "train.json")
    assert len(held_out) == 256
    reversed_too = held_out.keys() | {"+".join(key.split("+")[::-1]) for key in held_out}
    assert not reversed_too & train.keys() and len(reversed_too) + len(train) == 90 * 90
    for question, answer in (train | held_out).items():
        assert sum(map(int, question.split("+"))) == int(answer)
    again = make(tmp_path / "again", 1)
    other = make(tmp_path / "other", 2)
    for name in ("model.safetensors", "train.json", "eval.json"):
        assert again[name] == first[name] != other[name]


@pytest.mark.parametrize("task, sizes", [("countdown", (658, 256)), ("chain", (4000, 128))])
def test_no_held_out_problem_is_trained_on(task, sizes):
    train, held_out = base_model.RECIPES[task].split_problems(random.Random(3))
    assert (len(train), len(held_out)) == sizes
    assert len({str(problem) for problem in train + held_out}) == sum(sizes)


@pytest.mark.parametrize("task", base_model.FLAGS)
def test_flags_are_read_by_xargs(tmp_path, task):
    folder = tmp_path / "a folder"
    folder.mkdir()
    base_model.write_flags(folder, task, 3)
    command = ["xargs", "printf", "%s\n"]
    text = (folder / "flags.txt").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    cfg = parse_flags(done.stdout.splitlines())
    assert (cfg.model, cfg.data) == (str(folder), [f"{folder}/train.json"])
    assert cfg.eval_data == [f"{folder}/eval.json"]
    assert cfg.template == ("demo" if task == "addition" else "mini")


def test_a_folder_is_complete_or_absent_and_has_one_seed(make, tmp_path, capsys):
    """Only flags.txt is written again, because its paths change when a folder is copied."""
    base = tmp_path / "base"
    interrupt = mock.patch.object(base_model.Addition, "record", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        make(base, 1)
    assert not base.exists()
    made = make(base, 1)
    (base / "flags.txt").write_text("--model /of/another/run\n")
    with mock.patch.object(base_model, "pretrain") as train:
        assert make(base, 1) == made and not train.called
    with pytest.raises(SystemExit, match="2"):
        make(base, 2)
    told = f"error: {base} was not made by base_model.py addition --seed 2; remove this folder"
    assert told in capsys.readouterr().err


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
def test_the_baseline_trains(task, variant, names, tmp_path, monkeypatch):
    """A base with few updates, and two steps with its own flags."""
    folder = tmp_path / "base"
    recipe = base_model.RECIPES[task]
    monkeypatch.setattr(recipe, "updates", 20)
    base_model.build(folder, recipe, 1)
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


def test_every_word_problem_is_right_and_different_and_the_seed_decides(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run_tool("base_model", "words", tmp_path / name, "--seed", seed)[0] == 0
    held_out = jsonl(tmp_path / "a" / "eval.jsonl")
    problems = jsonl(tmp_path / "a" / "train.jsonl") + held_out
    assert len({problem["question"] for problem in problems}) == 4200 and len(held_out) == 200
    for problem in problems:
        assert "\n" not in problem["question"]
        assert solve(problem["question"]) == int(problem["answer"]) > 0, problem
    texts = {name: (tmp_path / name / "train.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]


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
    """A right letter has a +, and another one a -. Some texts have a ? in place of all verdicts."""
    rng = random.Random(3)
    recipe = base_model.Chain()
    for number in range(200):
        prompt, *pieces = recipe.draw_text(number, [], rng)
        table, _, start = prompt.text.partition(":")
        record = {"table": table, "start": start.lower(), "steps": recipe.steps + 1}
        label = chain.parse_record(record)["label"]
        said = ""
        verdicts = set()
        for turn, answer in zip(pieces[::2], pieces[1::2]):
            told = chain.reply(said + turn.text, "stop", label)
            assert answer.text in (told, "?" + told[1:])
            said += turn.text + told
            verdicts.add(answer.text[0])
        assert verdicts <= {"+", "-"} or verdicts == {"?"}
