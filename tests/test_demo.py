"""The demo's base model: what its folder holds, that it overwrites nothing and is never half."""

import functools
import json
import re
import shlex

import pytest
import torch
from conftest import ROOT, run_python
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import demo


def contents(folder) -> dict:
    """Every file of the folder with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def make(monkeypatch, capsys):
    """make(folder, seed, updates=2): exit code, output and errors of the command, in this process.

    Two updates take a second; the model has learnt nothing. There is one thread, because OpenMP
    threads that spin get many times slower beside other work.
    """
    threads = torch.get_num_threads()

    def run(folder, seed: int, updates: int = 2) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["demo.py", str(folder), "--seed", str(seed)])
        code = 0
        with monkeypatch.context() as patch:
            patch.setattr(demo, "Recipe", functools.partial(demo.Recipe, updates=updates))
            patch.setattr(demo.os, "sched_getaffinity", lambda _: {0})
            try:
                demo.main()
            except SystemExit as left:
                code = left.code
        return code, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)


def test_the_folder_holds_a_model_problems_and_flags_by_the_seed(make, tmp_path):
    """All 8,100 additions of two-digit numbers, without both orders of the held-out ones."""
    base = tmp_path / "new folder" / "base"
    code, output, _ = make(base, 1)
    assert code == 0 and re.search(r"made in \d+\.\d s\n$", output)
    held_out = {}
    for record in json.loads((base / "eval.json").read_text()):
        held_out[record["prompt"][0]["value"]] = record["final_answer"]
    train = {}
    for question, answer in json.loads((base / "train.json").read_text()):
        train[question["value"]] = answer["ground_truth"]["value"]
    assert len(held_out) == 256
    reversed_too = held_out.keys() | {"+".join(key.split("+")[::-1]) for key in held_out}
    assert not reversed_too & train.keys() and len(reversed_too) + len(train) == 90 * 90
    for question, answer in (train | held_out).items():
        a, b = question.split("+")
        assert int(a) + int(b) == int(answer)
    # One flag a line, quoted as for a shell.
    lines = [shlex.split(line) for line in (base / "flags.txt").read_text().splitlines()]
    flags = {name: values for name, *values in lines}
    assert flags["--model"] == [str(base)] and flags["--data"] == [f"{base}/train.json"]
    assert flags["--eval_data"] == [f"{base}/eval.json"] and flags["--seed"] == ["1"]
    assert flags["--stop"] == [""] and flags["--bf16"] == ["false"] and len(flags) == len(lines)
    # The base is a function of the seed.
    make(tmp_path / "again", 1)
    make(tmp_path / "other", 2)
    for name in ("model.safetensors", "train.json", "eval.json"):
        assert contents(tmp_path / "again")[name][1] == contents(base)[name][1]
        assert contents(tmp_path / "other")[name][1] != contents(base)[name][1]


def test_a_base_is_never_half_and_never_overwritten(make, tmp_path, monkeypatch):
    """Only flags.txt is written again, because its paths change when a base model is copied."""
    base = tmp_path / "base"

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(demo, "write_problems", interrupt)
        make(base, 1)
    assert (tmp_path / "base.making" / "model.safetensors").is_file() and not base.exists()
    make(base, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    (base / "flags.txt").write_text("--model /of/another/run\n")
    before = contents(base)
    assert make(base, 1) == (0, "", "")
    after = contents(base)
    assert after.pop("flags.txt")[1].startswith(f"--model {base}\n".encode())
    before.pop("flags.txt")
    assert after == before
    told = "{}: choose another --run_dir, or remove it\n"
    held = f"error: {base} holds the demo of "
    assert make(base, 2) == (2, "", told.format(f"{held}--seed 1, not 2"))
    assert make(base, 1, updates=3) == (2, "", told.format(f"{held}another Recipe"))
    assert before.items() <= contents(base).items()


@pytest.mark.parametrize("recipe", [None, "", '{"seed', "[1]", "{}"])
def test_a_folder_that_is_no_demo_is_refused(recipe, make, tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    if recipe is not None:
        (tmp_path / "recipe.json").write_text(recipe)
    before = contents(tmp_path)
    for path in (tmp_path, tmp_path / "notes.txt"):
        code, _, errors = make(path, 1)
        assert code == 2 and re.fullmatch("error: .* is no base model of the demo: .*\n", errors)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_base_model_works_some_answers_and_guesses_the_others(tmp_path):
    """About a quarter of the answers are worked, and nearly all of those are right."""
    base = tmp_path / "base"
    passive = {"OMP_WAIT_POLICY": "passive"}
    run_python(ROOT / "tools" / "demo.py", base, "--seed", 1, env=passive)
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
