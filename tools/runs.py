"""A library of the other tools: it reads run folders, computes intervals, and styles pictures.

A run appends one JSON object a line to metrics.jsonl (one line a step) and to eval.jsonl (one line
a step and evaluation set). The last line of a run that was killed may not be whole, and is skipped.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import mpmath
import numpy as np
import pandas as pd
from cycler import cycler


def refuse(told: str) -> None:
    """Ends the program because of a wrong command line, file or folder."""
    print(f"error: {told}", file=sys.stderr)
    sys.exit(2)


# ---- run folders ---------------------------------------------------------------------------------


def run_folder(text: str) -> Path:
    """The type of an argument that names a run. argparse refuses another folder."""
    folder = Path(text)
    if not any((folder / name).exists() for name in ("metrics.jsonl", "eval.jsonl")):
        raise argparse.ArgumentTypeError(f"{text} has no metrics.jsonl; give the folder of a run")
    return folder


def read_lines(path: Path) -> Iterator[dict]:
    """The JSON objects of a .jsonl file. A file that is absent has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            try:
                # NaN and infinity become None, because a browser refuses them.
                yield json.loads(text, parse_constant=lambda constant: None)
            except ValueError:
                continue


def read_metrics(run: Path) -> pd.DataFrame:
    """The numbers of metrics.jsonl: one row a step, one column a metric."""
    return make_table(read_lines(run / "metrics.jsonl"))


def read_evaluations(run: Path) -> dict[str, pd.DataFrame]:
    """The numbers of eval.jsonl by evaluation set, in the order of the file."""
    lines_by_set = {}
    for line in read_lines(run / "eval.jsonl"):
        lines_by_set.setdefault(line["set"], []).append(line)
    return {name: make_table(lines) for name, lines in lines_by_set.items()}


def make_table(lines: Iterable[dict]) -> pd.DataFrame:
    """A row for each step, of numbers alone. The last of two lines of a step counts."""
    table = pd.DataFrame(lines)
    if table.empty:
        return table
    table = table.drop_duplicates("step", keep="last").set_index("step").sort_index()
    return table.select_dtypes("number").astype(float).dropna(axis="columns", how="all")


class Run(NamedTuple):
    metrics: pd.DataFrame  # a row for each step; tokens: the response tokens drawn so far
    evaluations: pd.DataFrame  # a row for each evaluation: step, tokens, seconds, accuracy
    set: str  # the name of the evaluation set, the first of the run


def read_run(folder: Path) -> Run:
    metrics = read_metrics(folder)
    metrics["tokens"] = metrics.drawn_tokens.cumsum()
    name, table = next(iter(read_evaluations(folder).items()), ("no set", pd.DataFrame()))
    evaluations = table.reindex(columns=["accuracy"]).rename_axis("step").reset_index()
    steps = [0, *metrics.index]
    evaluations["tokens"] = np.interp(evaluations.step, steps, [0, *metrics.tokens])
    evaluations["seconds"] = np.interp(evaluations.step, steps, [0, *metrics.seconds.cumsum()])
    return Run(metrics, evaluations, name)


def read_setting(folder: Path, seeds: int | None = None) -> dict[int, Run]:
    """The finished runs of a setting, FOLDER/seed1 and so on. seeds: the last seed that counts."""
    runs = {}
    for result in folder.glob("seed*/result.json"):
        seed = int(result.parent.name.removeprefix("seed"))
        if seeds is None or seed <= seeds:
            runs[seed] = read_run(result.parent)
    return dict(sorted(runs.items()))


# ---- numbers over seeds --------------------------------------------------------------------------


def accuracies_at(runs: dict[int, Run], axis: str, at: float) -> pd.Series:
    """Of each seed the mean of three evaluations, interpolated between two evaluations.

    axis: step, tokens or seconds.
    """
    found = {}
    for seed, run in runs.items():
        means = run.evaluations.accuracy.rolling(3, min_periods=1).mean()
        found[seed] = np.interp(at, run.evaluations[axis], means)
    return pd.Series(found, dtype=float)


def end_of(*settings: dict[int, Run], axis: str) -> float:
    """The end of the shortest run of these settings on this axis."""
    return min(run.evaluations[axis].max() for runs in settings for run in runs.values())


def differences(runs: dict[int, Run], baseline: dict[int, Run], axis: str) -> pd.Series:
    """The difference in accuracy of each seed that both have, where the shortest run ends."""
    at = end_of(runs, baseline, axis=axis)
    return (accuracies_at(runs, axis, at) - accuracies_at(baseline, axis, at)).dropna()


def mean_text(numbers: Iterable[float], form: str = ".3f") -> str:
    """A mean with its 95 % interval (Student's t): `0.570 [0.545, 0.595]`. form: of each number."""
    numbers = pd.Series(list(numbers), dtype=float)
    text = f"{numbers.mean():{form}}"
    if len(numbers) > 1:
        margin = numbers.sem() * limit_of_t(len(numbers))
        text += f" [{numbers.mean() - margin:{form}}, {numbers.mean() + margin:{form}}]"
    return text


def limit_of_t(count: int) -> float:
    """Student's t of so many numbers is beyond this limit, in size, in 5 % of cases."""
    freedom = count - 1

    def excess(limit):
        share = freedom / (freedom + limit**2)
        return mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True) - 0.05

    return float(mpmath.findroot(excess, (0, 1000), solver="bisect"))


# ---- pictures ------------------------------------------------------------------------------------

BLACK, GREY, BLUE = "#222222", "#999999", "#0072B2"
RED, GREEN, PINK = "#D55E00", "#009E73", "#CC79A7"
COLOURS = [BLACK, BLUE, RED, GREEN, PINK, "#E69F00", "#56B4E9", "#7F5539"]
# Of two equal curves, the dashes of one show the other. After eight curves the colours repeat.
LINES = ["-", "--"] * 4 + ["--", "-"] * 4
# The settings of matplotlib for every picture.
STYLE = {"axes.prop_cycle": cycler(color=COLOURS * 2, linestyle=LINES)}
STYLE |= {"text.parse_math": False, "font.size": 13, "lines.linewidth": 2.2, "lines.markersize": 5}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 14, "axes.edgecolor": GREY}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.xmargin": 0.0}
STYLE |= {"axes.grid": True, "grid.color": "#ececec", "savefig.dpi": 100}


def draw_band(ax, curves: pd.DataFrame, label: str, **style) -> None:
    """The mean of the seeds, and a band from the lowest seed to the highest.

    curves: a column for each seed.
    """
    marker = "o" if len(curves) < 3 else ""
    [line] = ax.plot(curves.mean(axis=1), label=label, marker=marker, **style)
    band = (curves.index, curves.min(axis=1), curves.max(axis=1))
    ax.fill_between(*band, color=line.get_color(), alpha=0.15, linewidth=0)


def scale(ax, least: float | None = 0.01) -> None:
    """Sets the axes. y ends at `least` or above, and is logarithmic if `least` is None."""
    lowest, highest = ax.dataLim.intervaly
    ax.set_xlim(left=0)
    ax.xaxis.get_major_locator().set_params(integer=ax.get_xlabel() == "step")
    if not math.isfinite(highest):
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color=GREY)
    elif least is None and highest > 0:
        ax.set_yscale("log")
        ax.yaxis.get_major_locator().set_params(subs=(1, 3))
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    else:
        # y begins at 0 or below, but not below -1, where outliers are.
        ax.set_ylim(max(-1, min(0, lowest)), 1.04 * max(least or 0.01, highest))


def smooth(curves, rows: int):
    """Centred means over a twentieth of so many rows. Below 40 the curves stay as they are."""
    return curves.rolling(2 * (rows // 40) + 1, center=True, min_periods=1).mean()
