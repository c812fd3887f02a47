"""The laboratory: plans, runs side by side, and what a table says differs."""

import json
import os
import random
import re
import shlex
import statistics
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, arguments, jsonl, run_python, run_tool, start_python, wait_until

from lib.common import UserError
from tools import countdown, lab

PLANS = sorted((ROOT / "variants" / "plans").glob("*.txt"))

# ---- the table -----------------------------------------------------------------------------------


def write_run(setting, seed: int, steps: int = 20, shift: float = 0.0) -> dict:
    """A finished run of 4 samples a step, with random lengths and accuracies.

    Returns its mean length at the end, and its points (steps or response tokens, accuracy).
    """
    rng = random.Random(f"{setting.name} {seed}")
    lengths = [rng.randrange(10, 100) for _ in range(steps)]
    by_steps = [(step, shift + rng.random() / 5) for step in range(0, steps + 1, 5)]
    by_tokens = [(4 * sum(lengths[:step]), accuracy) for step, accuracy in by_steps]
    lines = []
    for step, length in enumerate(lengths, start=1):
        line = {"step": step, "reward": 0.5, "response_length": length, "entropy": 1.0}
        line |= {"total_length": length + 10, "truncated": 0.25, "seconds": 2.0}
        lines.append(line | {"tokens_per_second": 4 * (length + 10) / 2.0})
    write_lines(setting / f"seed{seed}" / "metrics.jsonl", lines)
    lines = []
    for step, accuracy in by_steps:
        lines += [{"step": step, "set": name, "accuracy": accuracy} for name in ("eval", "other")]
    write_lines(setting / f"seed{seed}" / "eval.jsonl", lines)
    (setting / f"seed{seed}" / "result.json").write_text("{}")
    length = statistics.mean(lengths[-max(1, steps // 10) :])
    return {"length": length, "eval_step": by_steps, "eval_tokens": by_tokens}


def write_lines(path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def height(points, x: float) -> float:
    """On the straight line between two points."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def slow_cell(ours: dict, theirs: dict, axis: str) -> dict:
    """A setting beside the baseline, where the shortest run of both ends."""
    x = min(run[axis][-1][0] for run in [*ours.values(), *theirs.values()])
    accuracies = [height(run[axis], x) for run in ours.values()]
    cell = {"at": x, "accuracies": accuracies, "difference": None, "error": None, "differs": False}
    if ours is theirs:
        return cell
    pairs = []
    for seed, accuracy in zip(ours, accuracies):
        if seed in theirs:
            pairs.append(accuracy - height(theirs[seed][axis], x))
    cell["difference"] = statistics.mean(pairs)
    # One pair of runs has no standard error, and so no mark.
    if len(pairs) > 1:
        cell["error"] = statistics.stdev(pairs) / len(pairs) ** 0.5
        cell["differs"] = abs(cell["difference"]) > 2 * cell["error"]
    return cell


def test_the_table_is_that_of_a_slow_reference(tmp_path):
    """A run that is not finished counts nowhere, nor does a seed above --seeds."""
    runs = {}
    expected = []
    for name, seeds, steps, shift in (
        ("plain", (1, 2, 3), 20, 0.0),
        ("better", (1, 2, 3), 20, 0.0367),
        ("short", (2, 3, 4), 10, 0.0),
        ("alone", (2,), 5, 0.0),
    ):
        runs[name] = {seed: write_run(tmp_path / name, seed, steps, shift) for seed in seeds}
        lengths = [run["length"] for run in runs[name].values()]
        row = {"setting": name, "seeds": list(seeds), "response_length": statistics.mean(lengths)}
        row |= {"truncated": 0.25, "entropy": 1, "seconds": 2 * steps}
        for axis in ("eval_step", "eval_tokens"):
            row[axis] = slow_cell(runs[name], runs["plain"], axis)
        expected.append(row)
    write_run(tmp_path / "plain", 9)
    write_run(tmp_path / "none", 1)
    (tmp_path / "none" / "seed1" / "result.json").unlink()
    folders = [tmp_path / name for name in (*runs, "none")]
    code, told, _ = run_tool("compare", *folders, "--seeds", 5, "--out", tmp_path / "plan")
    assert code == 0 and "none has no finished run" in told
    texts = [(tmp_path / "plan.json").read_text(), json.dumps(expected)]
    found, rows = (json.loads(text, parse_float=lambda x: round(float(x), 9)) for text in texts)
    assert found == rows
    assert [row["eval_step"]["differs"] for row in rows] == [False, True, False, False]
    cell = rows[1]["eval_step"]
    table = (tmp_path / "plan.md").read_text()
    assert f"| {cell['difference']:+.3f} ± {cell['error']:.3f} * |" in table
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    code, _, errors = run_tool("compare", tmp_path / "none")
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1


def test_one_run_is_shown_before_and_after(tmp_path):
    """Of the problems that only the last evaluation solves the one with the longest answer."""
    lines = [{"accuracy": x, "length": 7, "truncated": 0.5} for x in (0.25, 0.75)]
    write_lines(tmp_path / "eval.jsonl", lines)
    lines = []
    for question, text in (("q1", ""), ("q2", ""), ("q3", "ccc"), ("q1", "aa"), ("q2", "b")):
        line = {"problem": question, "question": question, "response": text}
        lines.append(line | {"reward": len(text) > 0, "length": len(text)})
    write_lines(tmp_path / "eval_samples.jsonl", lines)
    shown = run_tool("compare", tmp_path)[1].splitlines()
    assert shown[0] == "held out: accuracy 0.250 -> 0.750"
    assert shown[3:] == ["before: q1:   ", "after:  q1:   aa"]


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_is_read_and_a_folder_is_of_one_line(tmp_path, monkeypatch):
    """What the line `base` has comes before a setting's own. A variant of one's own is found here
    and then beside the plan. A line with other flags, or another text, is refused."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "mine.py").write_text("# mine\n")
    (tmp_path / "train.json").write_text("[1, 2, 3]")
    flags = "--max_steps 2 --zero_stage 0 --bf16 false --eval_data '{base}/a b'"

    def prepare(line: str):
        text = f"# a comment\nbase: overlong_drop + {flags}   # of all\n\n{line}\n"
        (tmp_path / "plan.txt").write_text(text)
        [setting] = lab.read_plan(tmp_path / "plan.txt", tmp_path / "out")
        assert lab.prepare(setting) == 2
        return setting

    line = "both: kl_loss + mine.py + --stop '' --data ../train.json[:2]"
    both = prepare(line)
    *words, data = both.flags
    assert words[:8] == shlex.split(flags.format(base=tmp_path / "out" / "base"))
    assert words[8:] == ["--stop", "", "--data"] and json.loads(Path(data).read_text()) == [1, 2]
    names = ["overlong_drop", "kl_loss", "mine"]
    files = [tmp_path / "out" / "both" / "variants" / f"{name}.py" for name in names]
    assert both.words() == [*both.flags, "--variant", *map(str, files)]
    texts = [(ROOT / "variants" / f"{name}.py").read_text() for name in names[:2]]
    assert [file.read_text() for file in files] == [*texts, "# mine\n"]
    prepare(line)
    other_order = line.replace("kl_loss + mine.py", "mine.py + kl_loss")
    for other in (f"{line} --lambd 1", line.replace("kl_loss + ", ""), other_order):
        with pytest.raises(UserError, match="has runs with other flags, or with another text"):
            prepare(other)
    (tmp_path / "here" / "mine.py").write_text("# here\n")
    with pytest.raises(UserError, match="has runs with other flags, or with another text"):
        prepare(line)
    assert files[-1].read_text() == "# mine\n"


GOOD = "base: --model m --data d --eval_data e --max_steps 2 --bf16 false --zero_stage 0\nplain:\n"


@pytest.mark.parametrize(
    "text, words, told",
    [
        ("# nothing\nbase: --seed_of 1\n", "", "has no setting"),
        ("a/b: --bf16 false\n", "", "line 1: 'a/b:' cannot name a setting"),
        ("plain:\n\nplain: --bf16 false\n", "", "line 3: the name plain is there twice"),
        ("plain: --stop '\n", "", "line 1: No closing quotation"),
        (GOOD + "other: my.py\n", "", "line 3: the variant my.py or /.*/my.py is not there"),
        (GOOD + "other: kl_loss + kl_loss\n", "", "line 3: two variants are called kl_loss"),
        (GOOD + "other: --seed=3\n", "", "line 3: the laboratory gives --seed=3 itself"),
        (GOOD + "other: --lambda 0.9\n", "", "other: unknown flag --lambda: did you mean --lambd"),
        (GOOD + "other: updates + --policy_updates 0\n", "", "other: --policy_updates 0: must be"),
        (GOOD + "other: clip_higher\n", "", "other: --variant clip_higher.py needs updates"),
        (GOOD.replace("--max_steps 2", ""), "", "plain: give --max_steps and --eval_data"),
        (GOOD + "other: --data {base}/gone.json[:3]\n", "", "gone.json: No such file"),
        (GOOD, "--show other", "--show other"),
        (GOOD, "--jobs 0", "--jobs 0: choose 1 to"),
    ],
)
def test_a_bad_plan_is_one_line_and_nothing_runs(text, words, told, tmp_path):
    (tmp_path / "plan.txt").write_text(text)
    out = tmp_path / "out"
    code, _, errors = run_tool("lab", tmp_path / "plan.txt", "--out", out, *words.split())
    assert code == 2 and re.fullmatch(f"error: .*{told}.*\n", errors)
    assert not list(out.glob("*/seed*"))


def test_a_copy_of_the_code_is_kept_and_other_code_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "my out"
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(lab, "ROOT", checkout)
    for name in ("lib", "tasks", "tools", "variants", "."):
        (checkout / name).mkdir(parents=True, exist_ok=True)
        (checkout / name / "a.py").write_text(name)
    # A laboratory was killed while it copied.
    (out / "code.part" / "lib").mkdir(parents=True)
    (out / "code.part" / "lib" / "old.py").touch()
    lab.keep_code(out)
    assert not (out / "code" / "lib" / "old.py").exists() and not (out / "code.part").exists()
    # Each setting keeps the texts of its variants.
    (checkout / "variants" / "a.py").write_text("# an edit")
    lab.keep_code(out)
    assert (out / "code" / "a.py").read_text() == "."
    for path in (checkout / "lib" / "a.py", out / "code" / "a.py"):
        text = path.read_text()
        path.write_text("# an edit")
        with pytest.raises(UserError, match="choose another --out, or go on with the copy: python"):
            lab.keep_code(out)
        path.write_text(text)


def test_our_plans_can_run_and_share_names_only_for_equal_settings(tmp_path):
    """train.py takes the flags of each line, with its variants. Plans share the folder of runs."""
    seen = {}
    for path in PLANS:
        for setting in lab.read_plan(path, tmp_path):
            line = (setting.flags, list(setting.variants.items()))
            is_new = setting.name not in seen
            assert seen.setdefault(setting.name, line) == line, f"{path.name}: {setting.name}"
            if is_new and not ("lora" in setting.variants and not find_spec("peft")):
                base = ["--model", "m", "--data", "d", "--eval_data", "e"]
                words = [*base, *shlex.split(countdown.FLAGS), *setting.flags]
                setting.flags = [word.partition("[:")[0] for word in words]
                assert lab.prepare(setting) > 0


# ---- runs ----------------------------------------------------------------------------------------

STAND_IN = """
import os, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("with", os.environ["OMP_NUM_THREADS"], "on", *os.sched_getaffinity(0))
if words["--seed"] == "1":
    sys.exit("ValueError: this seed fails")
pathlib.Path(words["--run_dir"], "result.json").write_text("{}")
"""


def test_runs_have_a_core_each_and_a_failed_one_is_named_while_the_others_go_on(tmp_path, capsys):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(STAND_IN)
    setting = lab.Setting("plain", {}, [], tmp_path / "plain")
    runs = [lab.Run(setting, seed, 2) for seed in (1, 2, 3)]
    for run in runs:
        run.folder.mkdir(parents=True)
    (runs[2].folder / "result.json").write_text("{}")
    core = min(os.sched_getaffinity(0))
    assert lab.run_all(runs, [core], lab.claim(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"FAILED, see {runs[0].log}: plain seed 1: ValueError: this seed fails" in told
    assert f"2 of 3: plain seed 2: with 1 on {core}\n" in told
    assert not runs[2].log.exists(), "it is done already"


@pytest.mark.slow
def test_a_lab_that_is_killed_goes_on_later(tiny, tmp_path):
    """Its run saves. While it does, it holds the laboratory's lock, so that no other laboratory
    runs into it."""
    flags = SMALL | tiny | {"max_steps": 8, "estimator": "grpo"}
    (tmp_path / "mine.py").write_text((ROOT / "variants" / "kl_loss.py").read_text())
    plan = tmp_path / "plan.txt"
    plan.write_text(f"base: {shlex.join(arguments(flags))}\nkl: mine.py + --kl_loss_coef 0.2\n")
    out = tmp_path / "out"
    run = out / "kl" / "seed1"
    words = [plan, "--seeds", 1, "--out", out]
    process = start_python(ROOT / "tools" / "lab.py", *words, output=tmp_path / "log")
    wait_until((run / "metrics.jsonl").exists, process)
    process.kill()
    process.wait()
    with pytest.raises(UserError, match="still save; wait for them"):
        lab.claim(out)

    def is_free() -> bool:
        try:
            return bool(lab.claim(out))
        except UserError:
            return False

    wait_until(is_free)
    before = (run / "metrics.jsonl").read_text()
    assert not (run / "result.json").exists()
    run_python(out / "code" / "tools" / "lab.py", *words)
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert [line["step"] for line in jsonl(run / "metrics.jsonl")] == [*range(1, 9)]
    config = json.loads((run / "config.json").read_text())
    assert (config["kl_loss_coef"], config["seed"]) == (0.2, 1)
    assert config["variant"] == [str(out / "kl" / "variants" / "mine.py")]
    assert "| kl |" in (out / "plan.md").read_text() and not (out / "base").exists()
