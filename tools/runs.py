"""A library of the other tools: it reads run folders, and holds the style of all pictures.

A run appends one JSON object a line to metrics.jsonl (one line a step) and to eval.jsonl (one line
a step and evaluation set). All tools read these files by the same rules:

- A file that does not exist has no lines. A line that is not a whole JSON object is skipped.
- In a table, a value that is not a finite number is missing (NaN).
- In a table, a line without a step is skipped. If two lines have one step, the later line counts.
"""

import errno
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from cycler import cycler

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
STYLE |= {"axes.grid": True, "grid.color": "#ececec"}


def read_lines(path: Path) -> Iterator[dict]:
    """The JSON objects of a .jsonl file, in the order of the file. Raises OSError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            try:
                # NaN and infinity become None, because a browser refuses them.
                line = json.loads(text, parse_constant=lambda constant: None)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


def describe(error: Exception, place: Path) -> str:
    """One line that names the file. place: where an OSError without a file name has happened."""
    if isinstance(error, OSError):
        return f"{error.filename or place}: {error.strerror}"
    return str(error)


def read_metrics(run: Path) -> pd.DataFrame:
    """The numbers of metrics.jsonl: one row a step, one column a metric. Raises OSError."""
    if not run.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(run))
    return make_table(read_lines(run / "metrics.jsonl"))


def read_evaluations(run: Path) -> dict[str, pd.DataFrame]:
    """The numbers of eval.jsonl by evaluation set, in the order of the file. Raises OSError."""
    lines_by_set = {}
    for line in read_lines(run / "eval.jsonl"):
        lines_by_set.setdefault(str(line.get("set")), []).append(line)
    return {name: make_table(lines) for name, lines in lines_by_set.items()}


def make_table(lines: Iterable[dict]) -> pd.DataFrame:
    """A row for each line, indexed by step. A column without any number is left out."""
    rows = {}
    for line in lines:
        numbers = {name: to_number(value) for name, value in line.items()}
        step = numbers.pop("step", math.nan)
        if 0 <= step < 1e9:
            rows[int(step)] = numbers
    table = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    return table.rename_axis("step").sort_index().dropna(axis="columns", how="all")


def to_number(value) -> float:
    """The value as a float. NaN if the value is no number, or is too large to draw."""
    if isinstance(value, int | float) and abs(value) < 1e30:
        return float(value)
    return math.nan


def save(figure, out: str | Path) -> None:
    """In the format of the ending, such as .pdf; without one as PNG. Raises OSError, ValueError."""
    figure.savefig(out, dpi=100, format=Path(out).suffix[1:] or "png")


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
