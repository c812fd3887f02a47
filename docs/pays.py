"""Prints the tables of "Does the critic pay?" in docs/laboratory.md.

    python tools/lab.py variants/plans/critic.txt --seeds 10             and the other critic plans
    python tools/lab.py variants/plans/critic.txt --seeds 1 --jobs 1 --out out/alone
    python docs/pays.py out/lab out/alone

docs/critic_runs.tar.xz has the numbers of the runs that the page is made from:

    mkdir -p out/runs && tar xf docs/critic_runs.tar.xz -C out/runs
    python docs/pays.py out/runs/critic out/runs/alone

A row is the difference of two settings in held-out accuracy, with its 95 % interval. Two runs of
one seed are a pair. Each step has the seconds of the same step in the runs of the second folder,
which were alone on the machine.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.compare import AXES, Run, accuracy_text, compare, difference_text, read_settings

# With a critic, without one.
TABLES = {
    "16 problems with 16 samples": [
        (setting, other)
        for setting in ("ppo", "lambda_95", "lambda_90", "lambda_80", "ppo_warm", "ppo_kept")
        for other in ("grpo_72_steps", "reinforce_72_steps", "rloo_72_steps")
    ],
    "256 problems with one sample": [
        (setting, "reinforce_single") for setting in ("ppo_single", "lambda_95_single")
    ],
    "long responses": [
        (setting, other)
        for setting in ("ppo_long", "lambda_95_long")
        for other in ("grpo_long", "reinforce_long")
    ],
    "PPO and PPO": [
        (setting, "ppo")
        for setting in ("lambda_95", "lambda_90", "lambda_80", "ppo_warm", "ppo_kept")
    ],
}
# These take the seconds of another setting, which does the same work in a step.
SECONDS = {"lambda_90": "lambda_95", "lambda_80": "lambda_95", "ppo_warm": "ppo", "ppo_kept": "ppo"}
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
    used = {name for pairs in TABLES.values() for pair in pairs for name in pair}
    settings = read_settings(sorted(folder / name for name in used if (folder / name).is_dir()), 10)
    times = read_settings(sorted(path for path in alone.iterdir() if (path / "seed1").is_dir()), 1)
    for name, runs in settings.items():
        single = times.get(SECONDS.get(name, name))
        for seed, run in runs.items():
            if not single:
                raise SystemExit(f"{name} has no run in {alone}, so its seconds are not known")
            runs[seed] = with_seconds(run, single[1])
        print(f"{name}: {accuracy_text(compare(runs, runs, 'step'))} after its last step")
    for title, pairs in TABLES.items():
        print(
            f"\n{title} | equal samples | equal tokens | equal seconds | seeds\n---|---|---|---|---"
        )
        for setting, other in pairs:
            if setting not in settings or other not in settings:
                continue
            seeds = settings[setting].keys() & settings[other].keys()
            ours, theirs = ({seed: settings[x][seed] for seed in seeds} for x in (setting, other))
            cells = [difference_text(compare(ours, theirs, axis)) for axis in AXES]
            print(f"{setting} - {other} | {' | '.join(cells)} | {len(seeds)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
