"""The laboratory: plans, runs side by side, and what a table says differs.

Runs here are mostly a stand-in for train.py of a few lines, which makes the same files.
"""

import json
import math
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, arguments, clean_environment, jsonl

from lib.common import UserError
from tools import compare, countdown, lab

PLANS = sorted((ROOT / "variants" / "plans").glob("*.txt"))

# ---- the table -----------------------------------------------------------------------------------


def write_run(setting: Path, seed: int, length: int, accuracies, steps: int = 4) -> Path:
    """A finished run with 4 samples a step, prompts of 10 tokens, and evaluations evenly spaced."""
    run = setting / f"seed{seed}"
    run.mkdir(parents=True)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "reward": 0.1 * step, "response_length": length}
            line |= {"total_length": length + 10, "entropy": 1 / step, "truncated": 0.25}
            line |= {"seconds": 2.0, "tokens_per_second": 4 * (length + 10) / 2.0}
            file.write(json.dumps(line) + "\n")
    with (run / "eval.jsonl").open("w") as file:
        for number, accuracy in enumerate(accuracies):
            step = number * steps // (len(accuracies) - 1)
            file.write(json.dumps({"step": step, "set": "eval", "accuracy": accuracy}) + "\n")
            file.write(json.dumps({"step": step, "set": "other", "accuracy": 9}) + "\n")
    (run / "result.json").write_text("{}")
    return run


@pytest.fixture
def settings(tmp_path):
    """Folders: the baseline has 40 response tokens a step, `long` 80, `short` 20."""
    table = {
        "plain": (10, [(0, 0.2, 0.4), (0, 0.3, 0.5), (0, 0.1, 0.3)]),
        "long": (20, [(0, 0.4, 0.6), (0, 0.4, 0.5), (0, 0.4, 0.6)]),
        "short": (5, [(0, 0.1, 0.2), (0, 0.2, 0.3), (0, 0.1, 0.1)]),
    }
    for name, (length, of_seeds) in table.items():
        for seed, accuracies in enumerate(of_seeds, start=1):
            write_run(tmp_path / name, seed, length, accuracies)
    return tmp_path


def test_the_table_s_numbers_are_those_worked_by_hand(settings):
    folders = [settings / name for name in ("plain", "long", "short")]
    runs = compare.read_settings(folders, None, [])
    plain, long, short = (compare.make_row(name, runs[name], runs["plain"]) for name in runs)
    assert plain["eval_step"] == {
        "at": 4,
        "accuracies": [0.4, 0.5, 0.3],
        "difference": None,
        "error": None,
        "differs": False,
    }
    # Equal steps: differences 0.2, 0, 0.3 have a standard deviation of 0.15275.
    cell = long["eval_step"]
    assert cell["at"] == 4 and cell["accuracies"] == [0.6, 0.5, 0.6]
    assert cell["difference"] == pytest.approx(0.5 / 3)
    assert cell["error"] == pytest.approx(0.152753 / math.sqrt(3), abs=1e-6)
    assert not cell["differs"]
    # Equal tokens: the baseline ends at 160, where `long` is at its second evaluation.
    cell = long["eval_tokens"]
    assert cell["at"] == 160
    assert cell["accuracies"] == pytest.approx([0.4, 0.4, 0.4])
    assert cell["difference"] == pytest.approx(0.0)
    assert cell["error"] == pytest.approx(0.1 / math.sqrt(3))
    # `short` ends at 80 tokens, where the baseline is at its second evaluation.
    cell = short["eval_tokens"]
    assert cell["at"] == 80
    assert cell["difference"] == pytest.approx((0 + 0 + 0) / 3)
    # At the last step the differences are all -0.2.
    cell = short["eval_step"]
    assert cell["difference"] == pytest.approx(-0.2) and cell["differs"]
    # The last tenth of four steps is the last one.
    assert long["response_length"] == 20 and long["entropy"] == 0.25 and long["truncated"] == 0.25
    assert long["seconds"] == 8.0 and long["seeds"] == [1, 2, 3]


def test_between_two_evaluations_accuracy_is_interpolated(tmp_path):
    """15 tokens a response: 160 tokens are a third of the way from 120 to 240."""
    write_run(tmp_path / "a", 1, 10, (0, 0.2, 0.4))
    write_run(tmp_path / "b", 1, 15, (0, 0.3, 0.6))
    runs = compare.read_settings([tmp_path / "a", tmp_path / "b"], None, [])
    cell = compare.make_row("b", runs["b"], runs["a"])["eval_tokens"]
    assert cell["accuracies"] == pytest.approx([0.4]) and cell["difference"] == pytest.approx(0.0)
    # One pair of runs has no standard error, and so no mark.
    assert cell["error"] is None and not cell["differs"]


def test_only_equal_seeds_are_paired_and_only_wanted_ones_read(tmp_path):
    for seed, accuracy in ((1, 0.5), (2, 0.6), (10, 0.9)):
        write_run(tmp_path / "a", seed, 10, (0, accuracy))
    for seed, accuracy in ((2, 0.7), (3, 0.1)):
        write_run(tmp_path / "b", seed, 10, (0, accuracy))
    runs = compare.read_settings([tmp_path / "a", tmp_path / "b"], 3, [])
    assert list(runs["a"]) == [1, 2]
    cell = compare.make_row("b", runs["b"], runs["a"])["eval_step"]
    assert cell["accuracies"] == [0.7, 0.1] and cell["difference"] == pytest.approx(0.1)


def test_table_numbers_and_picture_are_written(settings, monkeypatch, capsys):
    """A run that is not finished is in none of them."""
    (settings / "short" / "seed2" / "result.json").unlink()
    for seed in (1, 2, 3):
        (settings / "long" / f"seed{seed}" / "result.json").unlink()
    folders = [str(settings / name) for name in ("plain", "long", "short")]
    words = [*folders, "--out", str(settings / "plan"), "--show", "plain", "short"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    compare.main()
    told = capsys.readouterr().out
    assert "long has no finished run" in told
    table = (settings / "plan.md").read_text()
    assert "| plain | 0.400 (0.300 to 0.500) at 4 | - | 0.400" in table
    assert "| short | 0.150 (0.100 to 0.200) at 4 | -0.200 ± 0.000 * |" in table
    assert table.splitlines()[3] in told
    rows = json.loads((settings / "plan.json").read_text())
    assert [row["setting"] for row in rows] == ["plain", "short"]
    assert rows[1]["seeds"] == [1, 3]
    png = (settings / "plan.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1500, 850)


@pytest.mark.parametrize(
    "words", [["{}/none"], ["{}/plain", "{}/plain"], ["{}/plain", "--show", "x"]]
)
def test_what_cannot_be_compared_is_one_line(words, settings, monkeypatch, capsys):
    words = [word.format(settings) for word in words]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_one_run_is_shown_before_and_after(tmp_path, capsys):
    """The problem that took the most tries of those that only the last evaluation solves."""
    run = write_run(tmp_path / "a", 1, 10, (0, 0.5))
    numbers = {"accuracy": 0.25, "length": 7, "truncated": 0.5}
    lines = [{"step": 0, **numbers}, {"step": 4, **numbers, "accuracy": 0.75}]
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [(1, "a", 0), (2, "b", 0), (3, "cc", 1), (1, "dd\nee", 1), (2, "f", 1), (3, "g", 1)]
    with (run / "eval_samples.jsonl").open("w") as file:
        for problem, text, reward in answers:
            line = {"problem": problem, "question": f"q{problem}", "response": text}
            file.write(json.dumps(line | {"reward": reward, "length": len(text)}) + "\n")
    compare.show_run(run)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "held out: accuracy 0.250 -> 0.750"
    assert shown[3:] == ["before: q1:   a", "after:  q1:   dd   ee"]


# ---- plans ---------------------------------------------------------------------------------------


def plan_of(tmp_path, text: str) -> Path:
    path = tmp_path / "plan.txt"
    path.write_text(text)
    return path


OWN_VARIANT = """from dataclasses import dataclass


@dataclass
class Flags:
    flag: int = 1  # It does nothing.


def paid(original, samples, cfg):
    return original(samples, cfg)
"""


def test_a_plan_is_read(tmp_path):
    text = """# a comment
base: --max_steps 7   # of all

plain:
both: kl_loss + overlong_drop + --kl_loss_coef 0.5 --stop ''
few: --data "{base}/a b.json"
"""
    plain, both, few = lab.read_plan(plan_of(tmp_path, text), tmp_path / "out")
    assert (plain.name, plain.flags, plain.variants) == ("plain", ["--max_steps", "7"], {})
    assert list(both.variants) == ["kl_loss", "overlong_drop"]
    assert both.variants["kl_loss"] == (ROOT / "variants" / "kl_loss.py").read_text()
    assert both.flags == ["--max_steps", "7", "--kl_loss_coef", "0.5", "--stop", ""]
    assert both.folder == tmp_path / "out" / "both"
    files = [str(both.folder / "variants" / f"{name}.py") for name in both.variants]
    assert both.words() == [*both.flags, "--variant", *files]
    assert few.flags[2:] == ["--data", f"{tmp_path}/out/base/a b.json"]


def test_variants_of_the_line_base_come_before_those_of_a_setting(tmp_path):
    text = "base: kl_loss + --max_steps 7\nplain:\ndrop: overlong_drop\n"
    plain, drop = lab.read_plan(plan_of(tmp_path, text), tmp_path)
    assert list(plain.variants) == ["kl_loss"]
    assert list(drop.variants) == ["kl_loss", "overlong_drop"]


def test_a_variant_of_one_s_own_is_found_here_and_then_beside_the_plan(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plan = plan_of(tmp_path, "mine: my_idea.py + --flag 3\n")
    (tmp_path / "my_idea.py").write_text(OWN_VARIANT)
    (mine,) = lab.read_plan(plan, tmp_path / "out")
    assert mine.variants == {"my_idea": OWN_VARIANT} and mine.flags == ["--flag", "3"]
    (tmp_path / "here" / "my_idea.py").write_text("# here\n")
    (mine,) = lab.read_plan(plan, tmp_path / "out")
    assert mine.variants == {"my_idea": "# here\n"}


GOOD = "base: --model m --data d --eval_data e --max_steps 2 --bf16 false --zero_stage 0\nplain:\n"


def run_lab(monkeypatch, capsys, *words) -> tuple[int, str]:
    """Returns the exit code and what the user reads."""
    monkeypatch.setattr(sys, "argv", ["lab.py", *map(str, words)])
    code = lab.main()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "has no setting"),
        ("# nothing\nbase: --seed_of 1\n", "has no setting"),
        ("plain\n", "line 1: 'plain' cannot name a setting"),
        ("a/b: --bf16 false\n", "line 1: 'a/b:' cannot name a setting"),
        ("code: --bf16 false\n", "line 1: 'code:' cannot name a setting"),
        ("plain:\n\nplain: --bf16 false\n", "line 3: the name plain is there twice"),
        ("plain: --stop '\n", "line 1: No closing quotation"),
        (GOOD + "other: nothing + --lambd 1\n", "line 3: the variant ROOT/variants/nothing.py is"),
        (GOOD + "other: my.py\n", "line 3: the variant my.py or TMP/my.py is not there"),
        (GOOD + "other: kl_loss + kl_loss\n", "line 3: two variants are called kl_loss"),
        (GOOD + "other: --seed=3\n", "line 3: the laboratory gives --seed=3 itself"),
        (GOOD + "other: --variant kl_loss\n", "line 3: the laboratory gives --variant itself"),
        (GOOD + "other: --lambda 0.9\n", "other: unknown flag --lambda: did you mean --lambd?"),
        (GOOD + "other: --lambd x\n", "other: argument --lambd: invalid"),
        (GOOD + "other: --estimator nope\n", "other: --estimator nope: choose "),
        (GOOD + "other: --task nope\n", "other: --task nope: "),
        (
            GOOD + "other: kl_loss + --kl_loss_coeff 1\n",
            "other: unknown flag --kl_loss_coeff: did ",
        ),
        (GOOD + "other: updates + --policy_updates 0\n", "other: --policy_updates 0: must be at"),
        (
            GOOD + "other: --policy_updates 2\n",
            "other: --policy_updates is a flag of --variant cispo",
        ),
        (GOOD + "other: clip_higher\n", "other: --variant clip_higher.py needs updates"),
        (GOOD.replace("--max_steps 2", ""), "plain: give --max_steps and --eval_data"),
        (GOOD + "other: --data {base}/gone.json[:3]\n", "gone.json: No such file"),
    ],
)
def test_a_bad_plan_is_one_line_and_nothing_runs(text, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "run_all", None)
    plan = plan_of(tmp_path, text)
    code, error = run_lab(monkeypatch, capsys, plan, "--out", tmp_path / "out")
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert told.replace("ROOT", str(ROOT)).replace("TMP", str(tmp_path)) in error


def test_a_variant_s_function_that_fits_nowhere_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "run_all", None)
    (tmp_path / "mine.py").write_text("def pay(original, samples, cfg):\n    original(samples)\n")
    plan = plan_of(tmp_path, GOOD + "other: mine.py\n")
    code, error = run_lab(monkeypatch, capsys, plan, "--out", tmp_path / "out")
    assert code == 2 and error.count("\n") == 1
    assert "other: --variant mine.py: pay is no function of a stage or of the task" in error


@pytest.mark.parametrize(
    "words, told",
    [
        (["gone.txt"], "gone.txt: No such file"),
        (["{plan}", "--show", "other"], "--show other"),
        (["{plan}", "--seeds", "0"], "--seeds 0"),
        (["{plan}", "--jobs", "0"], "--jobs 0: choose 1 to"),
    ],
)
def test_a_bad_argument_is_one_line(words, told, tmp_path, monkeypatch, capsys):
    plan = plan_of(tmp_path, GOOD)
    code, error = run_lab(monkeypatch, capsys, *(word.format(plan=plan) for word in words))
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert told in error


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the checkout, which a test can edit."""
    monkeypatch.setattr(lab, "ROOT", tmp_path / "checkout")
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("lib", "tasks", "tools", "variants"):
        shutil.copytree(ROOT / name, lab.ROOT / name, ignore=skip)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, lab.ROOT)
    return lab.ROOT


def finish_all(runs, cores, lock) -> int:
    """In place of lab.run_all."""
    for run in runs:
        if not run.is_done():
            write_run(run.setting.folder, run.seed, 10, (0, 0.5))
    return 0


def test_a_changed_checkout_is_refused_and_the_copy_goes_on(
    checkout, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lab, "run_all", finish_all)
    out = tmp_path / "my out"
    words = [plan_of(tmp_path, GOOD + "kl: kl_loss\n"), "--seeds", "1", "--out", out]
    assert run_lab(monkeypatch, capsys, *words) == (0, "")
    assert (out / "code" / "train.py").read_text() == (ROOT / "train.py").read_text()
    kept = json.loads((out / "code.record").read_text())

    # Each setting keeps the texts of its variants, so another variant may change.
    (checkout / "variants" / "overlong_drop.py").write_text("")
    assert run_lab(monkeypatch, capsys, *words) == (0, "")

    text = (checkout / "ppo.py").read_text()
    (checkout / "ppo.py").write_text(text + "# an edit\n")
    code, error = run_lab(monkeypatch, capsys, *words)
    assert code == 2 and error.count("\n") == 1
    assert f"a copy of commit {kept['commit'] or 'unknown'}, " in error
    assert "choose another --out" in error
    command = shlex.split(error.partition("go on with the copy: ")[2])
    assert command[:2] == ["python", str(out / "code" / "tools" / "lab.py")]
    (out / "plan.md").unlink()
    subprocess.run([sys.executable, *command[1:]], check=True, env=clean_environment())
    assert "| kl | 0.500" in (out / "plan.md").read_text()
    assert json.loads((out / "code.record").read_text()) == kept

    # An edit of the copy is refused too.
    (checkout / "ppo.py").write_text(text)
    lab.keep_code(out)
    (out / "code" / "ppo.py").write_text(text + "# an edit\n")
    with pytest.raises(UserError, match="choose another --out"):
        lab.keep_code(out)


def test_a_half_made_copy_is_made_again(checkout, tmp_path, monkeypatch):
    """A laboratory was killed while it copied."""
    out = tmp_path / "out"

    def copy_and_die(path, folder):
        assert not (out / "code").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lab.shutil, "copy", copy_and_die)
        lab.keep_code(out)
    assert (out / "code.part" / "lib").exists()
    # A file of that time which is gone now must not be in the copy.
    (out / "code.part" / "lib" / "old.py").touch()
    lab.keep_code(out)
    assert lab.code_hash(out / "code") == lab.code_hash(checkout)
    assert not (out / "code.part").exists()


def setting_of(tmp_path, variants=None) -> lab.Setting:
    flags = ["--data", "d", "--eval_data", "e", "--max_steps", "2", "--zero_stage", "0"]
    return lab.Setting("plain", variants or {}, [*flags, "--bf16", "false"], tmp_path / "plain")


def test_a_folder_is_of_one_setting(tmp_path):
    """The same line finds its folder. A line with other flags, or another text, is refused."""
    text = (ROOT / "variants" / "kl_loss.py").read_text()
    variants = {"kl_loss": text, "mine": OWN_VARIANT}
    assert lab.prepare(setting_of(tmp_path, variants)) == 2
    assert (tmp_path / "plain" / "variants" / "kl_loss.py").read_text() == text
    record = json.loads((tmp_path / "plain" / "setting.json").read_text())
    assert record["variants"] == variants and record["steps"] == 2
    assert lab.prepare(setting_of(tmp_path, variants)) == 2

    other = setting_of(tmp_path, variants)
    other.flags += ["--lambd", "0.9"]
    edited = setting_of(tmp_path, variants | {"mine": OWN_VARIANT + "\n"})
    turned = setting_of(tmp_path, {"mine": OWN_VARIANT, "kl_loss": text})
    fewer = setting_of(tmp_path, {"kl_loss": text})
    for setting in (other, edited, turned, fewer):
        with pytest.raises(UserError, match="has runs with other flags, or with another text"):
            lab.prepare(setting)
    assert (tmp_path / "plain" / "variants" / "mine.py").read_text() == OWN_VARIANT


def test_a_folder_of_the_time_of_patches_is_refused(tmp_path):
    setting = setting_of(tmp_path)
    setting.folder.mkdir()
    old = {"patches": {}, "flags": setting.flags, "code": 1, "steps": 2}
    (setting.folder / "setting.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="has runs with other flags"):
        lab.prepare(setting)


def test_the_first_problems_of_a_file(tmp_path):
    (tmp_path / "train.json").write_text("[1, 2, 3]")
    word = lab.cut_data(f"{tmp_path}/train.json[:2]", tmp_path)
    assert json.loads(Path(word).read_text()) == [1, 2]
    assert lab.cut_data("set?split=train[:2]", tmp_path) == "set?split=train[:2]"


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_of_ours_can_run(path, tmp_path):
    """train.py takes the flags of the baseline and those of each line, with its variants."""
    for setting in lab.read_plan(path, tmp_path):
        if "lora" in setting.variants and not find_spec("peft"):
            continue
        base = ["--model", "m", "--data", "d", "--eval_data", "e"]
        setting.flags = [*base, *shlex.split(countdown.FLAGS), *setting.flags]
        setting.flags = [word.partition("[:")[0] for word in setting.flags]
        assert lab.prepare(setting) > 0


def test_plans_share_names_only_for_equal_settings(tmp_path):
    """They share the folder of runs, so a setting of two plans must be the same in both."""
    seen = {}
    for path in PLANS:
        for setting in lab.read_plan(path, tmp_path):
            line = (setting.flags, list(setting.variants.items()))
            assert seen.setdefault(setting.name, line) == line, f"{path.name}: {setting.name}"
    assert {"orz", "algorithms", "estimators", "rewards"} <= {path.stem for path in PLANS}


# ---- runs ----------------------------------------------------------------------------------------

# A step waits until a file gives leave to it. A signal is noted and ends the run after the file
# `leave` has appeared beside it.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
signal.alarm(300)  # what a test that fails leaves behind ends too
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = Path(words["--run_dir"])
run.mkdir(exist_ok=True)
def stop(number, frame):
    (run / "stopping").touch()
    while not (run.parent / "leave").exists():
        time.sleep(0.01)
    print("stopped")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
metrics = run / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
print("from step", done, "with", os.environ["OMP_NUM_THREADS"], "on", os.sched_getaffinity(0))
if words.get("--fail") == words["--seed"]:
    sys.exit("ValueError: this seed fails")
for step in range(done, 2):
    while not (run.parent / f"step{step + 1}").exists():
        time.sleep(0.01)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step + 1}) + "\\n")
(run / "result.json").write_text("{}")
print("2 steps")
"""


def stand_in_runs(tmp_path, seeds: int, *flags, allowed: int = 2) -> list[lab.Run]:
    """Runs of one setting, the first steps of which may be made."""
    setting = lab.Setting("plain", {}, list(flags), tmp_path / "plain")
    setting.folder.mkdir(exist_ok=True)
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code" / "train.py").write_text(STAND_IN)
    for step in range(1, allowed + 1):
        (setting.folder / f"step{step}").touch()
    return [lab.Run(setting, seed, 2) for seed in range(1, seeds + 1)]


def wait_for(*paths: Path) -> None:
    """Ends as soon as they are there; only a test that fails takes its two minutes."""
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.01)


CORES = sorted(os.sched_getaffinity(0))[:2]


def test_runs_have_one_core_and_one_thread_each(tmp_path, capsys):
    runs = stand_in_runs(tmp_path, 3)
    assert lab.run_all(runs, CORES, lab.claim(tmp_path)) == 0
    told = capsys.readouterr().out
    for run in runs:
        line = run.log.read_text().splitlines()[0]
        assert line in [f"from step 0 with 1 on {{{core}}}" for core in CORES]
        assert f"plain seed {run.seed}: 2 steps" in told
    assert "3 of 3: " in told and "FAILED" not in told


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path, capsys):
    runs = stand_in_runs(tmp_path, 3, "--fail", "1")
    assert lab.run_all(runs, CORES[:1], lab.claim(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"FAILED, see {runs[0].log}: plain seed 1: ValueError: this seed fails" in told
    assert [run.is_done() for run in runs] == [False, True, True]


def test_what_is_done_is_skipped_and_what_is_half_done_goes_on(tmp_path):
    runs = stand_in_runs(tmp_path, 2)
    for run in runs:
        run.folder.mkdir()
        (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (runs[0].folder / "result.json").write_text("{}")
    assert lab.run_all(runs, CORES, lab.claim(tmp_path)) == 0
    assert not runs[0].log.exists()
    assert runs[1].log.read_text().startswith("from step 1 ")
    assert len(jsonl(runs[1].folder / "metrics.jsonl")) == 2


LAB = f"""
import signal, sys
signal.alarm(300)
# Whoever runs the tests in the background of a shell hands on that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tools import lab
folder, *cores = sys.argv[1:]
setting = lab.Setting("plain", {{}}, [], Path(folder) / "plain")
runs = [lab.Run(setting, seed, 2) for seed in (1, 2, 3)]
lab.run_plan = lambda args: lab.run_all(runs, list(map(int, cores)), lab.claim(Path(folder)))
sys.argv[1:] = ["a plan"]
sys.exit(lab.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_a_lab_that_ends_stops_its_runs_and_goes_on_later(number, tmp_path):
    """However it ends its runs are told to save. While they do, they hold its lock, so that no
    other laboratory runs into them."""
    runs = stand_in_runs(tmp_path, 3, allowed=1)
    command = [sys.executable, "-c", LAB, str(tmp_path), *map(str, CORES)]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **options)
    started = runs[: len(CORES)]
    wait_for(*(run.folder / "metrics.jsonl" for run in started))
    # Like the Ctrl-C of a terminal, which reaches the whole group.
    os.killpg(process.pid, number)
    wait_for(*(run.folder / "stopping" for run in started))
    if number != signal.SIGINT:
        process.wait()
    with pytest.raises(UserError, match="still save; wait for them"):
        lab.claim(tmp_path)
    (runs[0].setting.folder / "leave").touch()
    _, errors = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert errors.splitlines()[-1] == "stopped; the same command goes on from there"
    lock = None
    while lock is None:
        try:
            lock = lab.claim(tmp_path)
        except UserError:
            time.sleep(0.01)
    assert lab.run_all(stand_in_runs(tmp_path, 3), CORES, lock) == 0
    for run in started:
        assert "from step 1 with" in run.log.read_text()
        assert len(jsonl(run.folder / "metrics.jsonl")) == 2


def lab_py(*words, script=ROOT / "tools" / "lab.py"):
    command = [sys.executable, str(script), *map(str, words)]
    env = clean_environment()
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)


@pytest.mark.slow
def test_a_whole_lab_of_two_settings(tiny, tmp_path):
    """It has a model of its own, and a setting with two variants. Then one of the runs is cut back
    to its first step, and the same command goes on."""
    flags = SMALL | tiny | {"max_steps": 2, "save_interval": 1, "keep_last": 0}
    base = shlex.join(arguments(flags))
    (tmp_path / "my_idea.py").write_text(OWN_VARIANT)
    line = "kl: kl_loss + my_idea.py + --kl_loss_coef 0.2 --flag 3 --estimator grpo"
    plan = plan_of(tmp_path, f"base: {base}\nplain:\n{line}\n")
    out = tmp_path / "out"
    done = lab_py(plan, "--seeds", 1, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (out / "base").exists()
    assert "| kl |" in (out / "plan.md").read_text() and (out / "plan.png").exists()
    config = json.loads((out / "kl" / "seed1" / "config.json").read_text())
    assert (config["kl_loss_coef"], config["flag"]) == (0.2, 3)
    kept = out / "kl" / "variants"
    assert config["variant"] == [str(kept / "kl_loss.py"), str(kept / "my_idea.py")]
    assert json.loads((out / "plain" / "seed1" / "config.json").read_text())["seed"] == 1
    run = out / "plain" / "seed1"
    before = (run / "samples.jsonl").read_text()
    (run / "result.json").unlink()
    subprocess.run(["rm", "-r", str(run / "step_000002")], check=True)
    log = (out / "kl" / "seed1.log").read_text()
    done = lab_py(plan, "--seeds", 1, "--out", out, script=out / "code" / "tools" / "lab.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "kl" / "seed1.log").read_text() == log
    assert "from step 1, ready" in (out / "plain" / "seed1.log").read_text()
    assert (run / "samples.jsonl").read_text() == before
