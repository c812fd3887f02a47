"""The laboratory: plans, runs side by side, and what a table says differs."""

import contextlib
import fcntl
import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, arguments, jsonl, run_python, run_tool, start_python, wait_until

from nanoorz.ranks import UserError
from tools import base_model, lab

# ---- the table -----------------------------------------------------------------------------------


def write_run(run, length: int, accuracies: list[float]) -> None:
    """A finished run of 4 samples a step, evaluated every ten steps."""
    metrics = []
    for step in range(1, 10 * len(accuracies) - 9):
        line = {"step": step, "reward": 0.5, "response_length": length, "entropy": step}
        line |= {"total_length": length + 10, "truncated": 0.25, "seconds": 2.0}
        metrics.append(line | {"tokens_per_second": 4 * (length + 10) / 2.0})
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
    text = (tmp_path / "plan.json").read_text()
    rows = json.loads(text, parse_float=lambda x: round(float(x), 9))
    names = ("setting", "seeds", "response_length", "truncated", "entropy", "seconds_of_training")
    assert [[row[name] for name in names] for row in rows] == [
        ["plain", [1, 2], 10, 0.25, 19.5, 40],
        ["better", [1, 2], 16, 0.25, 19.5, 40],
        ["short", [2, 3], 15, 0.25, 10, 20],
    ]
    better = rows[1]["step"]
    assert better["differences"] == {"1": 0.1, "2": 0.2}
    # Student's t of one degree of freedom is above 12.706 or below -12.706 in 5 of 100 cases.
    ends = [0.15 - 12.706 * 0.05, 0.15 + 12.706 * 0.05]
    assert better["interval"] == pytest.approx(ends, abs=1e-4)
    axes = ("step", "tokens", "seconds")
    # where, accuracies as means of three evaluations, mean difference of pairs
    assert [[*row[axis].values()][:3] for row in rows for axis in axes] == [
        [20, [0.3, 0.4], None],
        [800, [0.3, 0.4], None],
        [40, [0.3, 0.4], None],
        [20, [0.4, 0.6], 0.15],
        [800, [0.325, 0.375], 0.0],
        [40, [0.4, 0.6], 0.15],
        [10, [0.35, 0.25], 0.05],
        [600, [0.35, 0.25], 0.0],
        [20, [0.35, 0.25], 0.05],
    ]
    # A picture may have another form. Steps after the end of the comparison do not count.
    with (tmp_path / "better" / "seed1" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 99, "truncated": 1, "seconds": 1000}\n')
    assert run_tool("compare", *folders[:2], "--seeds", 5, "--out", tmp_path / "b.pdf")[0] == 0
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert json.loads((tmp_path / "b.json").read_text())[1] == json.loads(text)[1]
    table = " ".join((tmp_path / "plan.md").read_text().split())
    assert "| +0.150 [-0.485, +0.785] |" in table
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    write_run(tmp_path / "odd" / "seedx", 10, [0.2])
    write_run(tmp_path / "math" / "seed1", 10, [0.2])
    evaluations = tmp_path / "math" / "seed1" / "eval.jsonl"
    evaluations.write_text(evaluations.read_text().replace('"eval"', '"math500"'))
    for names, told in (
        (["none"], "none: the baseline has no finished run"),
        (["plain", "gone"], "gone: no such folder"),
        (["odd"], "odd/seedx: the name has no seed"),
        (["plain", "math"], "the evaluation sets differ: eval in .*, math500 in "),
    ):
        code, _, errors = run_tool("compare", *[tmp_path / name for name in names])
        assert code == 2 and re.fullmatch(f"error: .*{told}.*\n", errors)


def test_compare_warns_of_other_intervals_and_refuses_a_run_beside_a_setting(tmp_path):
    """The mean of three evaluations is over other steps then. A run has no table for --out."""
    write_run(tmp_path / "often" / "seed1", 10, [0.2, 0.3, 0.4, 0.5])
    write_run(tmp_path / "seldom" / "seed1", 10, [0.2, 0.3, 0.5])
    evaluations = tmp_path / "seldom" / "seed1" / "eval.jsonl"
    lines = evaluations.read_text().splitlines()
    evaluations.write_text("\n".join(line for line in lines if '"step": 10,' not in line))
    folders = [tmp_path / "often", tmp_path / "seldom"]
    told = run_tool("compare", *folders, "--out", tmp_path / "plan")[1]
    assert re.search("warning: .*steps between two 10: often; 20: seldom", told)
    run = tmp_path / "often" / "seed1"
    code, _, errors = run_tool("compare", tmp_path / "seldom", run)
    assert code == 2 and f"seldom is no run, and {run} is one" in errors
    code, _, errors = run_tool("compare", run, "--out", tmp_path / "plan")
    assert code == 2 and "is a run; give folders of settings" in errors


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
        # A line of another shape is no sample.
        answers.append(json.dumps(answer | {"set": ["a"], "response": None, "reward": "1"}))
    (tmp_path / "eval_samples.jsonl").write_text("\n".join(answers))
    told = run_tool("compare", tmp_path)[1]
    assert told.endswith("has learnt to solve: q\nbefore: a 0\nafter:  a 10\n")


# ---- plans ---------------------------------------------------------------------------------------


MINE = "from variants.beside import Beside\n\n\nclass Mine(Beside):\n    pass\n"


def test_a_plan_is_read_and_a_folder_belongs_to_one_of_its_lines(tmp_path, monkeypatch):
    """A setting has the flags of `base` first. A variant is found here, then beside the plan."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "mine.py").write_text(MINE)
    for folder in (tmp_path, here):
        (folder / "beside.py").write_text("import ppo\n\n\nclass Beside(ppo.Recipe):\n    pass\n")
    (tmp_path / "train.json").write_text("[1, 2, 3]")
    flags = "--max_steps 2 --zero_stage 0 --bf16 false --eval_data '{base}/a b'"

    def prepare(line: str):
        text = f"# a comment\nbase: overlong_drop + {flags}   # of all\n\n{line}\n"
        (tmp_path / "plan.txt").write_text(text)
        [setting] = lab.read_plan(tmp_path / "plan.txt", tmp_path / "out")
        lab.prepare(setting)
        return setting

    def refuse(line: str, told: str):
        with pytest.raises(UserError, match=f"has runs with .*{told}"):
            prepare(line)

    line = "both: kl_loss + mine.py + --stop '' --data ../train.json[:2]"
    both = prepare(line)
    *words, data = both.flags
    assert words == [*shlex.split(flags.format(base=tmp_path / "out/base")), "--stop", "", "--data"]
    assert json.loads(Path(data).read_text()) == [1, 2]
    names = ["overlong_drop", "kl_loss", "mine"]
    files = [tmp_path / "out" / "both" / "variants" / f"{name}.py" for name in names]
    assert both.words() == [*both.flags, "--variant", *map(str, files)]
    texts = [(ROOT / "variants" / f"{name}.py").read_text() for name in names[:2]]
    assert [file.read_text() for file in files] == [*texts, MINE]
    prepare(line)
    # Without a saved step nothing is lost, so the setting may change.
    assert prepare(f"{line} --lambd 1").flags[-1] == "1" and prepare(line).flags == both.flags
    (tmp_path / "out" / "both" / "seed1" / "step_000001").mkdir(parents=True)
    for other, told in (
        (f"{line} --lambd 1", "the flags .* --stop '' --data"),
        (line.replace("kl_loss + ", ""), "the variants overlong_drop . .*kl_loss"),
        (line.replace("kl_loss + mine.py", "mine.py + kl_loss"), "the variants overlong_drop"),
        (line.replace("''", "x"), "the flags .* --stop '' --data"),
    ):
        refuse(other, told)
    (here / "mine.py").write_text(MINE + "# here\n")
    refuse(line, "another text of the variant mine;")
    (here / "mine.py").write_text(MINE)
    # An edit of what a variant is built on.
    (here / "beside.py").write_text((here / "beside.py").read_text() + "# here\n")
    refuse(line, "another text of the variant beside;")
    assert files[-1].read_text() == MINE


GOOD = "base: --model m --data d --eval_data e --max_steps 2 --bf16 false --zero_stage 0\nplain:\n"


@pytest.mark.parametrize(
    "text, words, told",
    [
        ("# nothing\nbase: --seed_of 1\n", "", "has no setting"),
        ("a/b: --bf16 false\n", "", "line 1: 'a/b:' cannot name a setting"),
        (GOOD, "--seeds 0", "--seeds 0: give 1 or a larger number"),
        ("plain:\n\nplain: --bf16 false\n", "", "line 3: the name plain is there twice"),
        ("plain: --stop '\n", "", "line 1: No closing quotation"),
        (GOOD + "other: my.py\n", "", "line 3: the variant my.py or /.*/my.py is not there"),
        (GOOD + "other: kl_loss + kl_loss\n", "", "line 3: two variants are called kl_loss"),
        (GOOD + "other: --seed=3\n", "", "line 3: the laboratory gives --seed=3 itself"),
        (GOOD + "other: log_ratio + --top_p 0.9\n", "", "other: --top_p 0.9: choose 1"),
        (GOOD.replace("--max_steps 2", ""), "", "plain: give --max_steps and --eval_data"),
        (GOOD + "other: --data {base}/gone.json[:3]\n", "", "line 3: other: .*/gone.json: No such"),
        (GOOD, "--show other", "--show other"),
        ("a: --task=chain\nb:\n", "", "settings of chain and countdown: each of them"),
    ],
)
def test_a_bad_plan_is_refused_in_one_line_and_nothing_runs(text, words, told, tmp_path):
    (tmp_path / "plan.txt").write_text(text)
    out = tmp_path / "out"
    code, _, errors = run_tool("lab", tmp_path / "plan.txt", "--out", out, *words.split())
    assert code == 2 and re.fullmatch(f"error: .*{told}.*\n", errors)
    assert not list(out.glob("*/seed*"))


def test_a_copy_of_the_code_is_kept_and_other_code_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "my out"
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(lab, "ROOT", checkout)
    for path in ("nanoorz/a.py", "tasks/a.py", "tools/a.py", "variants/a.py", "a.py"):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(path)
    # A laboratory was killed while it copied.
    (out / "code.part" / "nanoorz").mkdir(parents=True)
    (out / "code.part" / "nanoorz" / "old.py").touch()
    lab.keep_code(out)
    assert not list(out.rglob("old.py"))
    # Each setting keeps the texts of its variants.
    (checkout / "variants" / "a.py").write_text("# an edit")
    lab.keep_code(out)
    assert (out / "code" / "a.py").read_text() == "a.py"
    for path in (checkout / "nanoorz" / "a.py", out / "code" / "a.py"):
        text = path.read_text()
        path.write_text("# an edit")
        with pytest.raises(UserError, match="choose another --out, or go on with the copy: python"):
            lab.keep_code(out)
        path.write_text(text)


def test_a_setting_with_its_own_model_may_have_any_task(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text("a: --task chain\nb: --model m\n")
    assert lab.recipe_of(lab.read_plan(plan, tmp_path)) == "chain"


def test_a_folder_of_another_laboratory_or_of_another_task_is_refused(tmp_path):
    (tmp_path / "plan.txt").write_text("a: --task chain\n")
    out = tmp_path / "out"
    words = ["lab", tmp_path / "plan.txt", "--out", out]
    with lab.claim(out):
        assert f"another laboratory uses {out}; wait for it" in run_tool(*words)[2]
    (out / "base").mkdir()
    base_model.write_flags(out / "base", "countdown", 1)
    code, _, errors = run_tool(*words)
    assert code == 2 and f"{out}/base is not the base model of the task chain" in errors
    words[-1] = tmp_path / "plan.txt"
    assert re.fullmatch("error: .*plan.txt: .*; choose another --out\n", run_tool(*words)[2])


def test_our_plans_can_run_and_share_names_only_for_equal_settings(tmp_path):
    """train.py takes the flags of each line, with its variants. Plans share the folder of runs."""
    base = ["--model", "m", "--data", "d", "--eval_data", "e"]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "train.json").write_text("[]")
    plans = [*(ROOT / "variants" / "plans").glob("*.txt"), *ROOT.glob("docs/exercises/*.txt")]
    assert len(plans) > 10
    lines = {}
    for path in plans:
        settings = lab.read_plan(path, tmp_path)
        recipe = lab.recipe_of(settings)
        for setting in settings:
            # Countdown and the chains have folders of their own.
            setting.folder = tmp_path / recipe / setting.name
            line = (list(setting.variants), list(setting.flags))
            assert lines.setdefault(setting.folder, line) == line, setting.place
            setting.flags = [*base, *shlex.split(base_model.FLAGS[recipe]), *setting.flags]
            if find_spec("peft") or "lora" not in setting.variants:
                lab.prepare(setting)


# ---- runs ----------------------------------------------------------------------------------------

STAND_IN = """
import os, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("with", os.environ["OMP_NUM_THREADS"], "on", *os.sched_getaffinity(0))
print("colorsys" in sys.modules)
if words["--seed"] == "1":
    sys.exit("ValueError: this seed fails")
pathlib.Path(words["--run_dir"], "result.json").write_text("{}")
"""


def test_runs_have_a_core_each_and_a_failed_one_is_named_while_the_others_go_on(tmp_path, capsys):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(STAND_IN)
    runs = {tmp_path / "plain" / f"seed{seed}": ["--seed", str(seed)] for seed in (1, 2, 3)}
    for folder in runs:
        folder.mkdir(parents=True)
    (tmp_path / "plain" / "seed3" / "result.json").write_text("{}")
    core = min(os.sched_getaffinity(0))
    assert lab.run_all(runs, [core], ["colorsys"]) == 1
    told = capsys.readouterr().out
    log = tmp_path / "plain" / "seed1.log"
    assert f"plain seed1 FAILED, see {log}: ValueError: this seed fails\n" in told
    assert "2 of 3: plain seed2 is done\n" in told
    assert (tmp_path / "plain" / "seed2.log").read_text() == f"with 1 on {core}\nTrue\n"
    assert not (tmp_path / "plain" / "seed3.log").exists(), "it is done already"


def test_a_sigterm_between_two_runs_starts_no_other_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    server = lab.start_server(script, min(os.sched_getaffinity(0)), [])
    with server:
        server.stdin.write(json.dumps([str(tmp_path / "first")]) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "\n"
        server.terminate()
        # Without a buffer, which `close` would write once more.
        with contextlib.suppress(BrokenPipeError):
            os.write(server.stdin.fileno(), json.dumps([str(tmp_path / "second")]).encode() + b"\n")
        assert server.wait(60) == 0
    assert (tmp_path / "first").read_text() == "ran\n"
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_a_lab_that_is_killed_goes_on_later(tiny, tmp_path):
    """If a laboratory is killed, its runs save and end. The same command resumes the runs."""
    flags = SMALL | tiny | {"max_steps": 8, "estimator": "grpo"}
    plan = tmp_path / "plan.txt"
    plan.write_text(f"base: {shlex.join(arguments(flags))}\nkl: kl_loss + --kl_loss_coef 0.2\n")
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
    run_python(out / "code" / "tools" / "lab.py", *words)
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert [line["step"] for line in jsonl(run / "metrics.jsonl")] == [*range(1, 9)]
    config = json.loads((run / "config.json").read_text())
    assert (config["kl_loss_coef"], config["seed"]) == (0.2, 1)
    assert config["variant"] == [str(out / "kl" / "variants" / "kl_loss.py")]
    assert "| kl |" in (out / "plan.md").read_text() and not (out / "base").exists()
