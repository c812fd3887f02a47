"""Runs an entry of the race with five seeds, and checks it. docs/race.md has the rules.

    python docs/race.py PLAN NAME          such as: variants/plans/race.txt baseline

NAME is a line of the plan. All files go to out/race. The same command goes on with what is not
done. It ends with exit code 1 if a seed does not reach the target, or if a checkpoint is worse than
the run has said.
"""

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lib.common import UserError
from tools import lab
from tools.runs import read_evaluations, read_metrics

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("out/race")
SEEDS = range(1, 6)
MOST_STEPS = 120
# Of three consecutive evaluations. The baseline's five seeds reach it in 30 to 46 steps.
TARGET = 0.57
# The race decides these. An entry may have all other flags of train.py.
EVALUATION = "--task countdown --template mini --stop= --prompt_max_len 16 --generate_max_len 63 "
EVALUATION += "--max_len 80"
FIXED = "--eval_interval 2 --eval_n 4 --eval_temperature 1 --eval_top_p 1 --save_interval 2 "
FIXED += "--keep_last 0"
ELSEWHERE = "--model --critic --data --eval_data --answer_form --num_episodes"


def check_entry(setting: lab.Setting) -> None:
    """Raises UserError if the entry has a flag that the race decides."""
    decided = {word.partition("=")[0] for word in shlex.split(f"{EVALUATION} {FIXED} {ELSEWHERE}")}
    for k, word in enumerate(setting.flags):
        flag, _, value = word.partition("=")
        if flag in decided:
            raise UserError(f"{setting.place}: the race decides {flag}; leave it out")
        if flag == "--max_steps" and int(value or setting.flags[k + 1]) > MOST_STEPS:
            raise UserError(f"{setting.place}: --max_steps is at most {MOST_STEPS}")


def write_plan(setting: lab.Setting) -> Path:
    """Writes the entry as a plan of its own, with the flags of the race."""
    folder = OUT / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in setting.variants.items():
        (folder / f"{name}.py").write_text(text)
    variants = "".join(f" {name}.py +" for name in setting.variants)
    flags = shlex.join(["--max_steps", str(MOST_STEPS), *setting.flags, *shlex.split(FIXED)])
    plan = folder / f"{setting.name}.txt"
    plan.write_text(f"{setting.name}:{variants} drawn_tokens + {flags}\n")
    return plan


def find_end(run: Path) -> tuple[int, float] | None:
    """The step at which the last three evaluations reach the target, and the tokens up to it."""
    [evaluations] = read_evaluations(run).values()
    means = evaluations.accuracy.rolling(3).mean()
    reached = means.index[means >= TARGET]
    if len(reached) == 0:
        return None
    return int(reached[0]), float(read_metrics(run).drawn_tokens.loc[: reached[0]].sum())


def judge(run: Path, steps: list[int]) -> float:
    """The mean accuracy of these checkpoints, by tools/evaluate.py without variants."""
    found = []
    for step in steps:
        folder = run / "judged" / str(step)
        if not (folder / "result.json").exists():
            checkpoint = run / f"step_{step:06d}"
            call("tools/convert.py", "export", checkpoint, folder / "model")
            data = OUT / "base" / "eval.json"
            words = [folder / "model" / "policy", "--data", data, "--n", 4, "--out", folder]
            call("tools/evaluate.py", *words, *shlex.split(EVALUATION), "--bf16", "false")
        result = json.loads((folder / "result.json").read_text())
        found.append(result["sets"][0]["accuracy"])
    return float(np.mean(found))


def call(tool: str, *words) -> None:
    """Raises CalledProcessError."""
    command = [sys.executable, str(ROOT / tool), *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a text file of entries")
    parser.add_argument("name", metavar="NAME", help="the entry's line")
    args = parser.parse_args()
    try:
        settings = {setting.name: setting for setting in lab.read_plan(args.plan, OUT.resolve())}
        if args.name not in settings:
            raise UserError(f"{args.plan} has no line {args.name}; it has {', '.join(settings)}")
        check_entry(settings[args.name])
        plan = write_plan(settings[args.name])
    except (OSError, UserError) as error:
        parser.exit(2, f"error: {error}\n")
    # All entries share the base model and the code in OUT.
    words = ["tools/lab.py", plan, "--seeds", len(SEEDS), "--out", OUT]
    if subprocess.call([sys.executable, *map(str, [ROOT / words[0], *words[1:]])]) != 0:
        return 1
    tokens, judged = [], []
    for seed in SEEDS:
        run = OUT / args.name / f"seed{seed}"
        if not (end := find_end(run)):
            print(f"seed {seed} does not reach {TARGET} in its steps")
            continue
        step, count = end
        accuracy = judge(run, [step - 4, step - 2, step])
        print(
            f"seed {seed}: {count / 1000:.0f} thousand tokens, step {step}, judged {accuracy:.3f}"
        )
        tokens.append(count / 1000)
        judged.append(accuracy)
    is_valid = len(tokens) == len(SEEDS) and np.mean(judged) >= TARGET - 0.02
    if tokens:
        text = f"{np.mean(tokens):.0f} ({min(tokens):.0f} to {max(tokens):.0f})"
        print(f"| {args.name} | {text} | {np.mean(judged):.3f} | {len(tokens)} of {len(SEEDS)} |")
    print("the entry is valid" if is_valid else "the entry is NOT valid")
    return int(not is_valid)


if __name__ == "__main__":
    sys.exit(main())
