"""Runs an entry of the race with five seeds, and checks it. studies/race.md has the rules.

    python studies/race.py PLAN NAME              such as: variants/plans/race.txt baseline
    python studies/race.py PLAN NAME --seeds 1    a first look: seed 1 alone, which is not judged

NAME is a line of the plan. All files go to out/race. All entries use the code that the first entry
copied to out/race/code. The same command goes on with what is not done. It ends with exit code 1 if
the entry is not valid: a seed does not reach the target, or the judged checkpoints are worse.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanoorz.ranks import UserError, one_line
from tools import lab
from tools.compare import limit_of_t
from tools.runs import read_evaluations, read_metrics

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = ROOT / "variants" / "plans" / "race.txt"
OUT = Path("out/race")
SEEDS = range(1, 6)
MOST_STEPS = 120
# Of three consecutive evaluations. The baseline's five seeds reach it in 14 to 18 steps.
TARGET = 0.5
# The race decides these. An entry may have all other flags of train.py.
EVALUATION = "--task countdown --template mini --stop= --prompt_max_len 16 --generate_max_len 63 "
EVALUATION += "--max_len 80"
FIXED = "--eval_interval 2 --eval_n 4 --eval_temperature 1 --eval_top_p 1 --save_interval 2 "
FIXED += "--keep_last 0"
ELSEWHERE = "--model --critic --data --eval_data --answer_form --num_episodes"


def find_entry(plan: Path, name: str) -> lab.Setting:
    """The line NAME of a plan. Raises OSError, and UserError if the race refuses the line."""
    settings = {setting.name: setting for setting in lab.read_plan(plan, OUT.resolve())}
    if name not in settings:
        raise UserError(f"{plan} has no line {name}; it has {', '.join(settings)}")
    if name == "baseline" and plan.resolve() != ENTRIES:
        told = f"the race's baseline is the line of {ENTRIES}; choose another name"
        raise UserError(f"{settings[name].place}: {told}")
    check_entry(settings[name])
    return settings[name]


def check_entry(setting: lab.Setting) -> None:
    """Raises UserError if the entry has a flag that the race decides."""
    decided = set(re.findall(r"--\w+", f"{EVALUATION} {FIXED} {ELSEWHERE}"))
    for k, word in enumerate(setting.flags):
        flag, _, value = word.partition("=")
        # train.py reads --max-steps as --max_steps.
        flag = flag[:2] + flag[2:].replace("-", "_")
        if flag in decided:
            raise UserError(f"{setting.place}: the race decides {flag}; leave it out")
        if flag == "--max_steps":
            steps = value or "".join(setting.flags[k + 1 : k + 2])
            if not (steps.isdigit() and int(steps) <= MOST_STEPS):
                raise UserError(f"{setting.place}: --max_steps takes a number up to {MOST_STEPS}")


def write_plan(setting: lab.Setting) -> Path:
    """Writes the entry as a plan of its own, with the flags of the race."""
    folder = OUT / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    variants = " +".join(f" {shlex.quote(str(path))}" for path in setting.variants.values())
    flags = shlex.join(["--max_steps", str(MOST_STEPS), *setting.flags, *shlex.split(FIXED)])
    plan = folder / f"{setting.name}.txt"
    plan.write_text(f"{setting.name}:{variants} {flags}\n")
    return plan


def find_end(run: Path) -> tuple[list[int], float] | None:
    """The steps of the first three evaluations that reach the target, and the tokens up to then."""
    [evaluations] = read_evaluations(run).values()
    means = evaluations.accuracy.rolling(3).mean()
    reached = np.flatnonzero(means >= TARGET)
    if len(reached) == 0:
        return None
    steps = means.index[reached[0] - 2 : reached[0] + 1].tolist()
    return steps, float(read_metrics(run).drawn_tokens.loc[: steps[-1]].sum())


def judge(run: Path, steps: list[int]) -> float:
    """The mean accuracy of these checkpoints, by tools/evaluate.py without variants."""
    found = []
    for step in steps:
        folder = run / "judged" / str(step)
        if not (folder / "result.json").exists():
            checkpoint = run / f"step_{step:06d}"
            shutil.rmtree(folder, ignore_errors=True)  # of a command that was stopped
            call("tools/convert.py", "export", checkpoint, folder / "model")
            data = OUT / "base" / "eval.json"
            words = [folder / "model" / "policy", "--data", data, "--n", 4, "--out", folder]
            call("tools/evaluate.py", *words, *shlex.split(EVALUATION), "--bf16", "false")
        result = json.loads((folder / "result.json").read_text())
        found.append(result["sets"][0]["accuracy"])
    return float(np.mean(found))


def minus_baseline(tokens: list[float]) -> str:
    """The mean difference over seeds in thousand tokens, with its 95 % interval."""
    runs = [OUT / "baseline" / f"seed{seed}" for seed in SEEDS]
    ends = [find_end(run) for run in runs if (run / "eval.jsonl").exists()]
    if len(ends) < len(SEEDS) or None in ends:
        return "run the baseline"
    gaps = np.array(tokens) - [end[1] / 1000 for end in ends]
    error = limit_of_t(len(gaps)) * gaps.std(ddof=1) / len(gaps) ** 0.5
    return f"{gaps.mean():+.0f} [{gaps.mean() - error:+.0f}, {gaps.mean() + error:+.0f}]"


def command_of(tool: str, *words) -> list[str]:
    code = OUT / "code" if (OUT / "code").exists() else ROOT
    return [sys.executable, str(code / tool), *map(str, words)]


def call(tool: str, *words) -> None:
    """Raises CalledProcessError."""
    subprocess.run(command_of(tool, *words), check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Raises OSError, UserError, CalledProcessError and KeyboardInterrupt."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a text file of entries")
    parser.add_argument("name", metavar="NAME", help="the entry's line")
    parser.add_argument("--seeds", type=int, choices=SEEDS, default=len(SEEDS), help="default: 5")
    args = parser.parse_args()
    entry = find_entry(args.plan, args.name)
    words = [write_plan(entry), "--seeds", args.seeds, "--out", OUT]
    if code := subprocess.call(command_of("tools/lab.py", *words)):
        print(f"the entry is {entry.place}", file=sys.stderr)
        return code
    tokens, judged = [], []
    for seed in SEEDS[: args.seeds]:
        run = OUT / args.name / f"seed{seed}"
        if not (end := find_end(run)):
            print(f"seed {seed} does not reach {TARGET} in its steps")
            continue
        steps, count = end
        told = f"seed {seed}: {count / 1000:.0f} thousand tokens, step {steps[-1]}"
        tokens.append(count / 1000)
        if args.seeds == len(SEEDS):
            judged.append(judge(run, steps))
            told += f", judged {judged[-1]:.3f}"
        print(told)
    if args.seeds < len(SEEDS):
        return int(len(tokens) < args.seeds)
    is_valid = len(tokens) == len(SEEDS) and np.mean(judged) >= TARGET - 0.02
    if is_valid:
        line = shlex.join([*(f"{name}.py" for name in entry.variants), *entry.flags])
        count = f"{np.mean(tokens):.0f} ({min(tokens):.0f} to {max(tokens):.0f})"
        gap = "-" if args.name == "baseline" else minus_baseline(tokens)
        row = [args.name, f"`{line}`", count, gap, f"{np.mean(judged):.3f}"]
        print(" | ".join([*row, time.strftime("%F")]))
    print("the entry is valid" if is_valid else "the entry is NOT valid")
    return int(not is_valid)


if __name__ == "__main__":
    # lab.py and its runs end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is not done", file=sys.stderr)
        sys.exit(130)
    except (OSError, UserError, subprocess.CalledProcessError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
