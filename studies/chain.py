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
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanoorz.ranks import UserError
from tools.compare import Run, limit_of_t, read_run

STEPS = 60
RATES = (1, 2, 4, 8, 16)
ESTIMATORS = {
    "ppo": "PPO, lambda 1",
    "l95": "PPO, lambda 0.95",
    "l90": "PPO, lambda 0.9",
    "zero": "lambda 0.95, values of 0",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "REINFORCE",
}
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
