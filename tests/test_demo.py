"""The demo's base model: what its folder holds, that it overwrites nothing and is never half."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import demo

# A recipe of two updates takes a second; its model has learnt nothing.
QUICK = functools.partial(demo.Recipe, updates=2)
QUICK_PROCESS = f"""
import functools, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from tools import demo
demo.Recipe = functools.partial(demo.Recipe, updates=2)
"""


def contents(folder) -> dict:
    """Every file of the folder with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def command(folder, seed: int, start=(str(ROOT / "tools" / "demo.py"),)):
    """A finished `python tools/demo.py FOLDER --seed N`."""
    words = [sys.executable, *start, folder, "--seed", str(seed)]
    # OpenMP threads that spin get many times slower beside other work.
    env = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(words, capture_output=True, text=True, env=env)


def quick_command(folder, seed: int):
    """The same with two updates."""
    return command(folder, seed, ("-c", QUICK_PROCESS + "demo.main()"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model of two updates, seed 1, made by the command in a folder with a space."""
    folder = tmp_path_factory.mktemp("demo") / "new folder" / "base"
    done = quick_command(folder, 1)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"made in \d+\.\d s", done.stdout.splitlines()[-1])
    return folder


@pytest.fixture
def quick(monkeypatch):
    """demo.build makes two updates."""
    monkeypatch.setattr(demo, "Recipe", QUICK)


def test_the_folder_holds_model_problems_and_flags(base):
    """All 8,100 additions of two-digit numbers, without both orders of the held-out ones."""
    assert {path.name for path in base.parent.iterdir()} == {"base"}
    assert json.loads((base / "recipe.json").read_text())["seed"] == 1
    assert float((base / "seconds.txt").read_text()) > 0
    asked = json.loads((base / "eval.json").read_text())
    held_out = {record["prompt"][0]["value"]: record["final_answer"] for record in asked}
    train = {}
    for question, answer in json.loads((base / "train.json").read_text()):
        train[question["value"]] = answer["ground_truth"]["value"]
    assert len(held_out) == 256
    reversed_too = held_out.keys() | {"+".join(key.split("+")[::-1]) for key in held_out}
    assert not reversed_too & train.keys() and len(reversed_too) + len(train) == 90 * 90
    for question, answer in (train | held_out).items():
        a, b = question.split("+")
        assert int(a) + int(b) == int(answer)


def test_flags_are_one_a_line(base):
    """The paths come first and are quoted; an empty --stop list is an empty text."""
    lines = [shlex.split(line) for line in (base / "flags.txt").read_text().splitlines()]
    assert lines[:4] == [
        ["--model", str(base)],
        ["--data", f"{base}/train.json"],
        ["--eval_data", f"{base}/eval.json"],
        ["--seed", "1"],
    ]
    assert all(line[0].startswith("--") for line in lines)
    assert not [word for line in lines for word in line[1:] if word.startswith("--")]
    flags = {name: values for name, *values in lines}
    assert len(flags) == len(lines)
    assert flags["--stop"] == [""] and flags["--bf16"] == ["false"]
    assert flags["--template"] == ["demo"] and flags["--actor_learning_rate"] == ["3e-4"]
    assert "--run_dir" not in flags


def test_the_same_recipe_makes_nothing_anew(base):
    """Only flags.txt is written again, because its paths change when a base model is copied."""
    (base / "flags.txt").write_text("--model /of/another/run\n")
    before = contents(base)
    done = quick_command(base, 1)
    after = contents(base)
    assert done.returncode == 0 and "made in" not in done.stdout
    assert f"--model {shlex.quote(str(base))}\n" in after.pop("flags.txt")[1].decode()
    before.pop("flags.txt")
    assert after == before


def test_a_base_of_another_seed_is_refused(base):
    before = contents(base)
    done = command(base, 2)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {base} holds the demo of --seed 1, not 2: choose another --run_dir, or remove it\n"
    )
    assert contents(base) == before


def test_a_base_of_another_recipe_is_refused(base):
    """The whole recipe here finds a base model of two updates."""
    before = contents(base)
    with pytest.raises(demo.UserError, match="the demo of another Recipe: choose another"):
        demo.build(str(base), 1)
    assert contents(base) == before


@pytest.mark.parametrize("recipe", [None, "", '{"seed', "[1]", "{}"])
def test_a_folder_that_is_no_demo_is_refused(tmp_path, recipe):
    (tmp_path / "notes.txt").write_text("keep me")
    if recipe is not None:
        (tmp_path / "recipe.json").write_text(recipe)
    before = contents(tmp_path)
    with pytest.raises(demo.UserError, match="is no base model of the demo: choose another"):
        demo.build(str(tmp_path), 1)
    assert contents(tmp_path) == before


def test_a_file_is_refused_by_the_command(tmp_path):
    (tmp_path / "base").write_text("keep me")
    done = command(tmp_path / "base", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert (tmp_path / "base").read_text() == "keep me"


def test_a_base_is_a_function_of_the_seed(quick, tmp_path):
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        demo.build(str(tmp_path / name), seed)
    for name in ("model.safetensors", "train.json", "eval.json"):
        data = (tmp_path / "one" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == data
        assert (tmp_path / "other" / name).read_bytes() != data


@pytest.mark.engine
def test_killed_in_the_middle_leaves_nothing_under_the_name(quick, tmp_path):
    """It is killed when the model is written and the problems are not; the next call makes both."""
    kill = "demo.write_problems = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    code = QUICK_PROCESS + kill + "demo.build(sys.argv[1], 1)"
    folder = tmp_path / "base"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "base.making" / "model.safetensors").is_file()
    assert not folder.exists()
    assert demo.build(str(folder), 1) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert demo.build(str(folder), 1) == 0


@pytest.mark.slow
def test_the_base_model_works_some_answers_and_guesses_the_others(tmp_path):
    """About a quarter of the answers are worked, and nearly all of those are right."""
    base = tmp_path / "base"
    assert command(base, 1).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = json.loads((base / "eval.json").read_text())
    questions = [record["prompt"][0]["value"] for record in asked] * 4
    ids = torch.tensor(tokenizer([f"{question}<think>" for question in questions])["input_ids"])
    torch.manual_seed(1)
    with torch.no_grad():
        output = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=40)
    worked = []
    guessed = []
    for question, response in zip(questions, tokenizer.batch_decode(output[:, ids.shape[1] :])):
        a, b = question.split("+")
        is_right = f"\\boxed{{{int(a) + int(b)}}}" in response
        kind = guessed if response.startswith("</think>") else worked
        kind.append(is_right)
    assert 0.18 < len(worked) / len(questions) < 0.33
    assert sum(worked) / len(worked) > 0.9
    assert sum(guessed) / len(guessed) < 0.3
