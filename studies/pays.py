"""Prints the tables of "Does the critic pay?" in docs/laboratory.md.

studies/critic_runs.tar.xz has the numbers of the runs that the page is made from:

    mkdir -p out/runs && tar xf studies/critic_runs.tar.xz -C out/runs
    python studies/pays.py out/runs/critic out/runs/alone

A row is the difference of two settings in held-out accuracy, with its 95 % interval. Two runs of
one seed are a pair. Each step has the seconds of the same step in the runs of the second folder,
which were alone on the machine (`tools/lab.py PLAN --seeds 1 --jobs 1`).
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanoorz.ranks import UserError
from tools.compare import AXES, Run, accuracy_text, compare, difference_text, read_settings

# label: (setting, other setting)
TABLES = {
    "README": {
        "PPO minus GRPO": ("ppo", "grpo_72_steps"),
        "PPO minus REINFORCE": ("ppo", "reinforce_72_steps"),
        "PPO, lambda 0.95, minus GRPO": ("lambda_95", "grpo_72_steps"),
        "PPO, lambda 0.95, minus REINFORCE": ("lambda_95", "reinforce_72_steps"),
    },
    "more settings": {
        f"`{setting}` minus RLOO": (setting, "rloo_72_steps")
        for setting in ("ppo", "lambda_95", "lambda_90", "lambda_80")
    },
    "PPO minus PPO": {
        f"`{setting}` minus `ppo`": (setting, "ppo")
        for setting in ("lambda_95", "lambda_90", "lambda_80", "ppo_warm", "ppo_kept")
    },
    "256 problems with one sample": {
        f"`{setting}` minus REINFORCE": (setting, "reinforce_single")
        for setting in ("ppo_single", "lambda_95_single")
    },
    "limit of 126 tokens": {
        "`ppo_long` minus GRPO": ("ppo_long", "grpo_long"),
        "`ppo_long` minus REINFORCE": ("ppo_long", "reinforce_long"),
        "`lambda_95_long` minus GRPO": ("lambda_95_long", "grpo_long"),
        "`lambda_95_long` minus REINFORCE": ("lambda_95_long", "reinforce_long"),
    },
}
# These take the seconds of another setting, which does the same work in a step.
SECONDS = {"lambda_90": "lambda_95", "lambda_80": "lambda_95", "ppo_kept": "ppo"}
SECONDS |= {"rloo_72_steps": "grpo_72_steps"}


def with_seconds(run: Run, alone: Run) -> Run:
    """The run with the seconds of the other run at each step."""
    steps, seconds = alone.metrics.index, alone.metrics.seconds.cumsum()
    evaluations = run.evaluations.copy()
    last = min(evaluations.step.max(), steps.max())
    evaluations = evaluations[evaluations.step <= last]
    evaluations["seconds"] = np.interp(evaluations.step, [0, *steps], [0, *seconds])
    return run._replace(evaluations=evaluations)


def main(folder: Path, alone: Path) -> None:
    used = {name for rows in TABLES.values() for pair in rows.values() for name in pair}
    settings = read_settings(sorted(folder / name for name in used), None)
    times = read_settings(sorted(path for path in alone.iterdir() if (path / "seed1").is_dir()), 1)
    for name, runs in settings.items():
        # No table has the seconds of ppo_warm.
        if name != "ppo_warm":
            if not (single := times.get(SECONDS.get(name, name))):
                raise UserError(f"{name} has no run in {alone}, so its seconds are not known")
            runs.update({seed: with_seconds(run, single[1]) for seed, run in runs.items()})
        print(f"{name}: {accuracy_text(compare(runs, runs, 'step'))} after its last step")
    for title, rows in TABLES.items():
        # Here the seconds say little: a step of both has nearly the same work.
        axes = AXES[:2] if title == "PPO minus PPO" else AXES
        names = {"step": "equal samples"}
        print(f"\n{title} |", " | ".join(names.get(x, f"equal {x}") for x in axes), "| seeds")
        print("---|" * len(axes) + "---|---")
        for label, (setting, other) in rows.items():
            seeds = settings[setting].keys() & settings[other].keys()
            ours, theirs = ({seed: settings[x][seed] for seed in seeds} for x in (setting, other))
            cells = [difference_text(compare(ours, theirs, axis)) for axis in axes]
            print(f"{label} | {' | '.join(cells)} | {len(seeds)}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the settings' folders")
    parser.add_argument("alone", type=Path, help="the same, of runs that were alone")
    args = parser.parse_args()
    try:
        main(args.folder, args.alone)
    except (OSError, ValueError, UserError) as error:
        parser.exit(2, f"error: {error}\n")
