"""Prints the tables of docs/chain.md, and draws its picture.

    python tools/lab.py variants/plans/chain.txt --seeds 10 --out out/chain
    python studies/chain.py out/chain

studies/chain_runs.tar.xz has the numbers of the runs that the page is made from:

    mkdir -p out/chain && tar xf studies/chain_runs.tar.xz -C out/chain
    python studies/chain.py out/chain

A setting's folder is NAME_RATE, where RATE is the learning rate of the policy times 10,000. The
accuracy of a run is the mean of its last three evaluations up to step 60. A run is broken if its
last evaluation up to step 60 is below the first one, of the base model, or below half of the run's
best one. Intervals are 95 %: Student's t of a mean or of a mean difference over seeds, and Wilson's
of a share.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanoorz.ranks import UserError
from studies.pays import with_seconds
from tools.compare import Run, compare, difference_text, limit_of_t, read_run

STEPS = 60
RATES = (1, 2, 4, 6, 8, 16)
ESTIMATORS = {
    "ppo": "PPO, lambda 1",
    "l95": "PPO, lambda 0.95",
    "l90": "PPO, lambda 0.9",
    "zero": "lambda 0.95, values of 0",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "REINFORCE",
}
PAIRS = [("l95", "zero"), ("l95", "grpo"), ("l95", "rloo"), ("l95", "reinforce"), ("l95", "ppo")]
PAIRS += [("l90", "l95"), ("ppo", "grpo"), ("ppo", "reinforce"), ("zero", "grpo")]
# The lines of chain_breaks.txt, behind two of chain.txt.
ALREADY_RUN = ["grpo_8", "l95_8"]
BREAKS = ["blame_none", "blame_wrong", "blame_right", "blame_unsure", "positive", "samples_64"]
BREAKS += ["max_norm", "warmup", "kl_loss", "kl_penalty", "clip", "dr_grpo", "entropy"]
BREAKS += ["no_whitening", "l80", "l50", "zero_50", "first_100", "first_95", "first_80"]
BREAKS += ["first_50", "first_50_silent"]
NEW = range(3, 11)
CHOOSING, JUDGING = range(1, 11), range(11, 21)


def accuracy(run: Run, steps: int = STEPS) -> float:
    return run.evaluations.accuracy[run.evaluations.step <= steps].tail(3).mean()


def is_broken(run: Run, steps: int = STEPS) -> bool:
    accuracies = run.evaluations.accuracy[run.evaluations.step <= steps]
    return bool(accuracies.iloc[-1] < max(accuracies.iloc[0], accuracies.max() / 2))


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    share = count / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    margin = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + (z / 2 / total) ** 2)
    return centre - margin, centre + margin


def mean_text(numbers, sign="") -> str:
    """A mean with its interval."""
    numbers = pd.Series(list(numbers), dtype=float)
    text = f"{numbers.mean():{sign}.3f}"
    if len(numbers) > 1:
        margin = numbers.sem() * limit_of_t(len(numbers))
        text += f" [{numbers.mean() - margin:{sign}.3f}, {numbers.mean() + margin:{sign}.3f}]"
    return text


def share_text(flags) -> str:
    flags = list(flags)
    low, high = wilson(sum(flags), len(flags))
    return f"{sum(flags)} of {len(flags)} [{low:.2f}, {high:.2f}]"


def read_runs(folder: Path) -> dict[str, dict[int, Run]]:
    """The finished runs by setting and seed."""
    settings = {}
    for path in sorted(folder.glob("*/seed*/result.json")):
        seed = int(path.parent.name.removeprefix("seed"))
        settings.setdefault(path.parent.parent.name, {})[seed] = read_run(path.parent)
    if not settings:
        raise UserError(f"{folder} has no finished run")
    return settings


def row(*cells) -> None:
    print(" | ".join(map(str, cells)))


def cells(settings: dict, name: str) -> dict[int, dict[int, Run]]:
    """{rate: the runs of NAME_RATE by seed}."""
    return {rate: settings[key] for rate in RATES if (key := f"{name}_{rate}") in settings}


def best_rate(runs_of: dict[int, dict[int, Run]]) -> int:
    """The rate with the highest mean accuracy of the choosing seeds."""
    means = {
        rate: np.mean([accuracy(run) for seed, run in runs.items() if seed in CHOOSING])
        for rate, runs in runs_of.items()
    }
    return max(means, key=means.get)


def pick(runs: dict[int, Run], seeds) -> dict[int, Run]:
    return {seed: run for seed, run in runs.items() if seed in seeds}


def print_rates(settings: dict) -> None:
    """Accuracy and broken runs of the choosing seeds at each rate."""
    row("estimator", *(f"{rate}e-4" for rate in RATES))
    row("---", *("---" for _ in RATES))
    for name, title in ESTIMATORS.items():
        texts = []
        for runs in cells(settings, name).values():
            chosen = pick(runs, CHOOSING).values()
            broken = [is_broken(run) for run in chosen]
            texts.append(f"{mean_text(map(accuracy, chosen))}, {sum(broken)} of {len(broken)}")
        row(title, *texts)
    print("\nbroken runs of all estimators at a rate |")
    for rate in RATES:
        flags = []
        for name in ESTIMATORS:
            flags += map(is_broken, pick(cells(settings, name).get(rate, {}), CHOOSING).values())
        if flags:
            row(f"{rate}e-4", share_text(flags))


def print_best(settings: dict, alone: dict) -> None:
    """The judging seeds at each estimator's best rate."""
    best = {}
    for name in ESTIMATORS:
        rate = best_rate(cells(settings, name))
        runs = pick(settings[f"{name}_{rate}"], JUDGING)
        best[name] = {seed: with_seconds(run, alone[name][1]) for seed, run in runs.items()}
        print(f"the best rate of {ESTIMATORS[name]} is {rate}e-4")
    print()
    row("estimator", "equal samples", "broken", "equal seconds", "broken", "seeds")
    row(*["---"] * 6)
    longest = best["ppo"]
    for name, runs in best.items():
        at_seconds = compare(runs, longest, "seconds")["accuracies"]
        last = max(run.evaluations.step.max() for run in runs.values())
        row(
            ESTIMATORS[name],
            mean_text(map(accuracy, runs.values())),
            share_text(map(is_broken, runs.values())),
            mean_text(at_seconds),
            share_text(is_broken(run, last) for run in runs.values()),
            len(runs),
        )
    print()
    row("difference", "equal samples", "equal seconds", "seeds")
    row(*["---"] * 4)
    for name, other in PAIRS:
        ours, theirs = best[name], best[other]
        texts = [difference_text(compare(ours, theirs, axis)) for axis in ("step", "seconds")]
        seeds = len(ours.keys() & theirs.keys())
        row(f"{ESTIMATORS[name]}, minus {ESTIMATORS[other]}", *texts, seeds)


def print_breaks(settings: dict) -> None:
    """Broken runs and accuracy at the rate 8e-4, of the seeds that were not explored."""
    row("setting", "broken", "accuracy", "seconds of a step")
    row(*["---"] * 4)
    for name in (*ALREADY_RUN, *BREAKS):
        runs = pick(settings[name], NEW).values()
        steps = 120 if name.startswith("first") else STEPS
        broken = share_text(is_broken(run, steps) for run in runs)
        seconds = np.median([run.metrics.seconds.median() for run in runs])
        row(f"`{name}`", broken, mean_text(accuracy(run, steps) for run in runs), f"{seconds:.2f}")


def main(folder: Path) -> None:
    settings = read_runs(folder)
    alone = read_runs(folder / "alone")
    print_rates(settings)
    print()
    print_best(settings, alone)
    print()
    print_breaks(settings)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the settings' folders")
    args = parser.parse_args()
    try:
        main(args.folder)
    except (OSError, ValueError, UserError) as error:
        parser.exit(2, f"error: {error}\n")
