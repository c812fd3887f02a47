"""Makes runs of the demo that are sick on purpose, and two healthy ones, for tools/doctor.py.

    python tests/sick_runs.py FOLDER [NAME ...]    trains all runs, or those named
    python tests/sick_runs.py FOLDER --record      writes what they wrote into tests/doctor_runs

A run is FOLDER/NAME. What is recorded are the numbers that the doctor reads, to four digits.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "doctor_runs"

GRPO = ["--estimator", "grpo"]
SHARP = ["--temperature", "0.3", "--actor_learning_rate", "1e-3"]
# Two flags that are no illness: they leave out evaluations and logs.
COMMON = ["--eval_interval", "0", "--log_with", "none"]
# The flags behind those of the demo, which decide what a run is ill with.
RUNS = {
    "ppo": [],
    "grpo": GRPO,
    # Fifteen of sixteen problems get an impossible answer: see `make_base`.
    "flat_groups": [*GRPO, "--data", "hard.json"],
    # A worked answer has 24 tokens and a guess 9.
    "truncated_answers": [*GRPO, "--generate_max_len", "16"],
    # The tag that opens the answer stands in the prompt, so no response holds it.
    "format_never_met": [*GRPO, "--template", "{question}<think></think><answer>"],
    # The demo's rate is 3e-4.
    "steps_too_large": [*GRPO, "--actor_learning_rate", "3e-3"],
    "too_slow": [*GRPO, "--actor_learning_rate", "3e-5"],
    # Its script is tests/stale_train.py.
    "stale_sampler": [*GRPO, "--log_ratio", "true"],
    "entropy_collapse": [*GRPO, "--template", "{question}<think></think>", *SHARP],
    # A thousand times the demo's.
    "critic_explains_nothing": ["--critic_learning_rate", "1"],
}
HEALTHY = ("ppo", "grpo")
# What the doctor reads.
NUMBERS = ["step", "reward", "pass_at_n", "truncated", "response_length", "total_length", "entropy"]
NUMBERS += ["explained_variance", "approx_kl", "policy_grad_norm", "policy_tokens", "reward_lost"]
NUMBERS += ["seconds", "tokens_per_second"]


def make_base(folder: Path) -> Path:
    """The demo's base model of seed 42, with the problems of `flat_groups` beside its own."""
    base = folder / "base"
    subprocess.check_call([sys.executable, ROOT / "tools/demo.py", base, "--seed", "42"])
    problems = json.loads((base / "train.json").read_text())
    for number, (_, answer) in enumerate(problems):
        if number % 16:
            truth = answer["ground_truth"]
            truth["value"] = str(int(truth["value"]) + 50)
    (folder / "hard.json").write_text(json.dumps(problems))
    return base


def make_run(folder: Path, name: str) -> Path:
    """Trains FOLDER/NAME, from a copy of FOLDER/base."""
    run = folder / name
    shutil.copytree(folder / "base", run / "base")
    script = ROOT / "train.py"
    if name == "stale_sampler":
        script = ROOT / "tests" / "stale_train.py"
    flags = [*COMMON, *RUNS[name], "--run_dir", run]
    # As under accelerate launch, and relative paths are those of FOLDER.
    threads = {"OMP_NUM_THREADS": "1"}
    subprocess.check_call([sys.executable, script, *flags], cwd=folder, env=os.environ | threads)
    return run


def read_cut(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl with nothing but NUMBERS."""
    cut = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        cut.append({name: round_to_4(line[name]) for name in NUMBERS if name in line})
    return cut


def round_to_4(number):
    """To four digits where it is not whole."""
    if number == int(number):
        return number
    return float(f"{number:.4g}")


def record(folder: Path, name: str) -> None:
    target = RECORDED / name
    target.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for line in read_cut(folder / name)]
    (target / "metrics.jsonl").write_text("".join(lines))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    folder = args.folder.absolute()
    names = args.names or list(RUNS)
    if args.record:
        for name in names:
            record(folder, name)
        return
    make_base(folder)
    for name in names:
        make_run(folder, name)


if __name__ == "__main__":
    main()
