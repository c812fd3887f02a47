"""The laboratory: plans, runs side by side, and what a table says differs."""

import fcntl
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, arguments, jsonl, run_python, run_tool, start_python, wait_until

from nanoorz.ranks import UserError
from tools import base_model, lab, runs

# ---- the table -----------------------------------------------------------------------------------


def write_run(run, length: int, accuracies: list[float]) -> None:
    """A finished run of 4 samples a step, evaluated every ten steps."""
    metrics = []
    for step in range(1, 10 * len(accuracies) - 9):
        line = {"step": step, "reward": 0.5, "response_length": length, "entropy": step}
        line |= {"truncated": 0.25, "seconds": 2.0, "drawn_tokens": 4 * length}
        metrics.append(line)
    evaluations = []
    for k, accuracy in enumerate(accuracies):
        line = {"step": 10 * k, "accuracy": accuracy}
        evaluations += [line | {"set": name} for name in ("eval", "other")]
    run.mkdir(parents=True, exist_ok=True)
    files = {"metrics.jsonl": metrics, "eval.jsonl": evaluations, "result.json": [{}]}
    for name, lines in files.items():
        (run / name).write_text("\n".join(map(json.dumps, lines)))


def test_the_table_is_the_one_worked_by_hand(tmp_path):
    """Runs of one seed are a pair. Unfinished runs and seeds above --seeds count nowhere."""
    for name, seed, length, accuracies in (
        ("plain", 1, 10, [0.2, 0.3, 0.4]),
        ("plain", 2, 10, [0.2, 0.4, 0.6]),
        ("plain", 9, 10, [0.2, 0.2]),
        ("better", 1, 16, [0.2, 0.4, 0.6]),
        ("better", 2, 16, [0.2, 0.4, 1.2]),
        ("short", 2, 15, [0.2, 0.5]),
        ("short", 3, 15, [0.2, 0.3]),
        ("none", 1, 10, [0.2]),
    ):
        write_run(tmp_path / name / f"seed{seed}", length, accuracies)
    (tmp_path / "none" / "seed1" / "result.json").unlink()
    folders = [tmp_path / name for name in ("plain", "better", "short", "none")]
    code, told, _ = run_tool("compare", *folders, "--seeds", 5, "--out", tmp_path / "plan")
    assert code == 0 and "none has no finished run" in told
    # Accuracies are means of three evaluations. Student's t of one degree of freedom is above
    # 12.706 or below -12.706 in 5 of 100 cases: 0.15 +- 12.706 * 0.05, 0 +- 12.706 * 0.025.
    rows = """
    plain | 0.350 (0.300 to 0.400) | - | - | - | 10.0 | 0.25 | 19.50 | 40 | 2
    better | 0.500 (0.400 to 0.600) | +0.150 [-0.485, +0.785] | +0.000 [-0.318, +0.318] \
    | +0.150 [-0.485, +0.785] | 16.0 | 0.25 | 19.50 | 40 | 2
    short | 0.300 (0.250 to 0.350) | +0.050 | +0.000 | +0.050 | 15.0 | 0.25 | 10.00 | 20 | 2
    """
    table = (tmp_path / "plan.md").read_text()
    cells = [" ".join(line.split()).strip("| ") for line in table.splitlines()[2:]]
    assert cells == [" ".join(row.split()) for row in rows.replace("\\\n", "").split("\n")[1:-1]]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    # At 800 tokens, where `plain` ends, `better` is between two evaluations.
    found = [runs.read_setting(folder, 5) for folder in folders[:2]]
    assert runs.end_of(*found, axis="tokens") == 800
    assert runs.accuracies_at(found[1], "tokens", 800).to_dict() == {1: 0.325, 2: 0.375}


def test_two_settings_of_one_name_are_two_rows(tmp_path):
    for name, end in (("a", 0.3), ("b", 0.6)):
        write_run(tmp_path / name / "ppo" / "seed1", 10, [0.3, end])
    folders = [tmp_path / name / "ppo" for name in "ab"]
    told = run_tool("compare", *folders, "--out", tmp_path / "both")[1]
    assert f"| {folders[0]} | 0.300 " in told and f"| {folders[1]} | 0.450 " in told


def test_a_setting_with_its_own_model_has_no_flags_of_the_base(tmp_path):
    assert lab.make_base({"a": ["--model=m"], "b": ["--model", "m"]}, tmp_path / "base") == []
    assert not (tmp_path / "base").exists()
    assert lab.has_model(["--model=m"]) and not lab.has_model(["--model_x", "m"])


def test_runs_of_other_evaluation_sets_are_not_compared(tmp_path):
    for name in ("plain", "math"):
        write_run(tmp_path / name / "seed1", 10, [0.2, 0.3])
    evaluations = tmp_path / "math" / "seed1" / "eval.jsonl"
    evaluations.write_text(evaluations.read_text().replace('"eval"', '"math500"'))
    code, _, errors = run_tool("compare", tmp_path / "plain", tmp_path / "math")
    assert code == 2 and errors.startswith("error: the evaluation sets differ: eval, math500")
    code, _, errors = run_tool("compare", tmp_path)
    assert (code, errors) == (2, "error: no setting has a finished run, such as seed1\n")


def test_compare_says_what_one_run_has_learnt(tmp_path):
    write_run(tmp_path, 10, [0.2, 0.7])
    told = run_tool("compare", tmp_path)[1]
    assert told.startswith(f"{tmp_path}:\nevaluation set eval: accuracy 0.200 at step 0, 0.700 at")
    answers = []
    for step, reward in ((0, 0.0), (10, 1.0)):
        answer = {"step": step, "set": "eval", "problem": 7, "question": "q", "reward": reward}
        answers.append(json.dumps(answer | {"response": f"a\n{step}", "length": 2}))
        # A part of the full reward is no solution.
        partly = {"problem": 8, "reward": reward / 4, "response": "long", "length": 3}
        answers.append(json.dumps(answer | partly))
    (tmp_path / "eval_samples.jsonl").write_text("\n".join(answers))
    told = run_tool("compare", tmp_path)[1]
    assert told.endswith("has learnt to solve: q\nbefore: a 0\nafter:  a 10\n")


# ---- plans ---------------------------------------------------------------------------------------

GOOD = "base: --model m --data d --eval_data e --max_steps 2 --bf16 false --zero_stage 0\n"


def test_a_setting_has_the_flags_of_base_first(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text(
        "# a comment\nbase: --max_steps 2  # of all\n\none: --data '{base}/a b' --stop ''\n"
    )
    flags = ["--max_steps", "2", "--data", "/out/base/a b", "--stop", ""]
    assert lab.read_plan(plan, "/out/base") == {"one": flags}


def test_two_files_of_a_setting_are_cut_apart(tmp_path):
    words = []
    for number, name in enumerate(("train.json", "eval.json", "more/eval.json")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([number, 8, 9]))
        words.append(lab.cut_data(f"{path}[:1]", tmp_path / "setting"))
    assert [json.loads(Path(word).read_text()) for word in words] == [[0], [1], [2]]
    assert [Path(word).stem for word in words] == ["train", "eval", "eval"]


def test_a_folder_belongs_to_one_line_and_to_the_texts_of_its_variants(tmp_path):
    variant = tmp_path / "mine.py"
    variant.write_text("import ppo\n\n\nclass Mine(ppo.Recipe):\n    pass\n")
    (tmp_path / "train.json").write_text("[1, 2, 3]")
    line = [
        *shlex.split(GOOD)[1:],
        "--data",
        f"{tmp_path}/train.json[:2]",
        "--variant",
        str(variant),
    ]
    folder = tmp_path / "mine"
    flags = lab.prepare(folder, line)
    assert flags[:-3] == line[:-3]
    assert json.loads(Path(flags[-3]).read_text()) == [1, 2]
    # Without a saved step nothing is lost, so the setting may change.
    lab.prepare(folder, [*line, "--lambd", "0.95"])
    assert lab.prepare(folder, line) == flags
    (folder / "seed1" / "step_000001").mkdir(parents=True)
    lab.prepare(folder, line)
    with pytest.raises(UserError, match="has runs of other flags or variants"):
        lab.prepare(folder, [*line, "--lambd", "0.95"])
    variant.write_text(variant.read_text() + "# an edit\n")
    with pytest.raises(UserError, match="has runs of other flags or variants"):
        lab.prepare(folder, line)


@pytest.mark.parametrize(
    "text, told",
    [
        ("plain:\n\nplain: --bf16 false\n", "line 3: a line begins with a new name"),
        ("a/b: --bf16 false\n", "line 1: a line begins with a new name"),
        (GOOD + "other: --top_p 2\n", "other: --top_p 2.0: give a number from"),
        (GOOD.replace("--max_steps 2", "") + "a:\n", "a: give --max_steps and --eval_data"),
    ],
)
def test_a_bad_plan_is_refused_in_one_line_and_nothing_runs(text, told, tmp_path):
    (tmp_path / "plan.txt").write_text(text)
    out = tmp_path / "out"
    code, _, errors = run_tool("lab", tmp_path / "plan.txt", "--out", out)
    assert code == 2 and re.fullmatch(f"error: .*{told}.*\n", errors)
    assert not list(out.glob("*/seed*"))


def test_our_plans_can_run_and_share_names_only_for_equal_settings(tmp_path):
    """train.py takes the flags of each line, with its variants. Plans share the folder of runs."""
    base = ["--model", "m", "--data", "d", "--eval_data", "e"]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "train.json").write_text("[]")
    plans = [*(ROOT / "variants" / "plans").glob("*.txt"), *ROOT.glob("docs/exercises/*.txt")]
    assert len(plans) > 10
    lines = {}
    for path in plans:
        settings = lab.read_plan(path, tmp_path / "base")
        is_chain = any("chain" in flags for flags in settings.values())
        task = "chain" if is_chain else "countdown"
        for name, flags in settings.items():
            # Countdown and the chains have folders of their own.
            folder = tmp_path / task / name
            assert lines.setdefault(folder, flags) == flags, name
            if find_spec("peft") or "lora" not in flags:
                lab.prepare(folder, [*base, *shlex.split(base_model.FLAGS[task]), *flags])


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lab_that_is_killed_goes_on_later(tiny, tmp_path):
    """If a laboratory is killed, its runs save and end. The same command resumes the runs."""
    flags = SMALL | tiny | {"max_steps": 8, "estimator": "grpo"}
    plan = tmp_path / "plan.txt"
    plan.write_text(
        f"base: {shlex.join(arguments(flags))}\nkl: --variant kl_loss --kl_loss_coef 0.2\n"
    )
    out = tmp_path / "out"
    run = out / "kl" / "seed1"
    words = [plan, "--seeds", 1, "--out", out]
    process = start_python(ROOT / "tools" / "lab.py", *words, output=tmp_path / "log")
    wait_until((run / "metrics.jsonl").exists, process)
    process.kill()
    process.wait()
    with (run / ".lock").open() as lock:
        # The run holds this lock until the run has saved.
        fcntl.flock(lock, fcntl.LOCK_EX)
    before = (run / "metrics.jsonl").read_text()
    assert not (run / "result.json").exists()
    run_python(ROOT / "tools" / "lab.py", *words)
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert [line["step"] for line in jsonl(run / "metrics.jsonl")] == [*range(1, 9)]
    config = json.loads((run / "config.json").read_text())
    assert (config["kl_loss_coef"], config["seed"]) == (0.2, 1)
    assert "| kl |" in (out / "plan.md").read_text() and not (out / "base").exists()
