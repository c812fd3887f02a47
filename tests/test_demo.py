"""The demo's base model: what its folder holds, that it overwrites nothing and is never half."""

import functools
import shlex
from unittest import mock

import pytest
import torch
from conftest import run_python
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
from tools import demo


def answer_of_question(path) -> dict:
    return {problem.question: problem.label for problem in reward.load_problems(str(path), "demo")}


def contents(folder) -> dict:
    """Every file of the folder with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def make(monkeypatch):
    """make(folder, seed) is the command in this process, with two updates, which take a second."""
    monkeypatch.setattr(demo, "Recipe", functools.partial(demo.Recipe, updates=2))
    # With more cores the command would give this process more threads.
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: {0})

    def run(folder, seed: int) -> None:
        monkeypatch.setattr("sys.argv", ["demo.py", str(folder), "--seed", str(seed)])
        demo.main()

    return run


def test_the_folder_holds_a_model_problems_and_flags_by_the_seed(make, tmp_path):
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
    # One flag a line, quoted as for a shell.
    lines = [tuple(shlex.split(line)) for line in (base / "flags.txt").read_text().splitlines()]
    expected = {("--model", str(base)), ("--data", f"{base}/train.json"), ("--stop", "")}
    expected |= {("--eval_data", f"{base}/eval.json"), ("--seed", "1")}
    assert expected <= set(lines) and len(dict(lines)) == len(lines)
    make(tmp_path / "again", 1)
    make(tmp_path / "other", 2)
    for name in ("model.safetensors", "train.json", "eval.json"):
        assert contents(tmp_path / "again")[name][1] == contents(base)[name][1]
        assert contents(tmp_path / "other")[name][1] != contents(base)[name][1]


def test_a_base_is_never_incomplete_and_never_overwritten(make, tmp_path, monkeypatch, capsys):
    """Only flags.txt is written again, because its paths change when a base model is copied."""
    base = tmp_path / "base"
    interrupt = mock.patch.object(demo, "write_problems", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        make(base, 1)
    assert (tmp_path / "base.making" / "model.safetensors").is_file() and not base.exists()
    make(base, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    before = contents(base)
    _, flags = before.pop("flags.txt")
    (base / "flags.txt").write_text("--model /of/another/run\n")
    make(base, 1)
    assert (base / "flags.txt").read_bytes() == flags
    with pytest.raises(SystemExit, match="2"):
        make(base, 2)
    monkeypatch.setattr(demo, "Recipe", functools.partial(demo.Recipe, updates=3))
    with pytest.raises(SystemExit, match="2"):
        make(base, 1)
    told = f"error: {base} holds the demo of %s: choose another --run_dir, or remove it\n"
    assert capsys.readouterr().err.endswith(told % "--seed 1, not 2" + told % "another Recipe")
    assert before.items() <= contents(base).items()


@pytest.mark.parametrize("recipe", ["", '{"seed', "[1]", "{}"])
def test_a_folder_that_is_no_demo_is_refused(recipe, make, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(recipe)
    before = contents(tmp_path)
    for path in (tmp_path, tmp_path / "recipe.json"):
        with pytest.raises(SystemExit, match="2"):
            make(path, 1)
        assert "is no base model of the demo: choose" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_base_model_works_some_answers_and_guesses_the_others(tmp_path):
    """About a quarter of the answers are worked, and nearly all of those are right."""
    base = tmp_path / "base"
    run_python("tools/demo.py", base, "--seed", 1, env={"OMP_WAIT_POLICY": "passive"})
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
