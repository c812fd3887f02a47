"""Draws a run folder as one picture, or several runs over each other to compare them.

    python tools/plot.py RUN                       writes RUN/curves.png
    python tools/plot.py RUN RUN ... [--out PATH]  writes curves.png here

Strong lines are centred means over a twentieth of the run; a long run has its own values behind
them, in a pale line. The picture of several runs has a colour for each run and shows the first
curve of every panel. What is missing or broken in a file stays empty in the picture.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

BLUE = "#0072B2"
RED = "#D55E00"
BLACK = "#222222"
GREY = "#999999"
COLOURS = [BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK]
STYLE = {
    "text.parse_math": False,
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 14,
    "axes.edgecolor": GREY,
    "grid.color": "#ececec",
}


@dataclass(frozen=True)
class Curve:
    """One column of the metrics. Without a colour it has the colour of its run."""

    name: str
    label: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Panel:
    """One subject, with an optional low strip below it."""

    title: str
    curves: tuple[Curve, ...]
    strip: Curve | None = None
    never_below: float = 0.0  # a limit of the y axis
    always_up_to: float = 0.0  # the y axis reaches it
    log: bool = False
    stacked: bool = False  # seconds, phase upon phase


class Label(NamedTuple):
    """The text at the right end of a curve."""

    y: float
    text: str
    colour: str


PANELS = [
    Panel(
        "Reward and accuracy (dots)",
        (Curve("reward", "reward", BLUE),),
        never_below=-9,
        always_up_to=1,
    ),
    Panel(
        "Response length, tokens",
        (
            Curve("response_length", "all", BLACK),
            Curve("length_right_mean", "right", BLUE),
            Curve("length_wrong_mean", "wrong", RED),
        ),
        strip=Curve("truncated", "truncated\n", BLACK),
    ),
    Panel("Seconds per step", (Curve("seconds", "all", BLACK),), stacked=True),
    Panel(
        "Entropy, nats per token",
        (Curve("entropy", "", BLUE),),
        strip=Curve("kl", "KL to base\n", RED),
    ),
    Panel(
        "Explained variance of the critic",
        (Curve("explained_variance", "", RED),),
        never_below=-1,
        always_up_to=1,
    ),
    Panel(
        "Gradient norm",
        (Curve("policy_grad_norm", "policy", BLUE), Curve("critic_grad_norm", "critic", RED)),
        log=True,
    ),
]
# It takes the last place where a task counts these behaviours, as tasks/countdown.py does.
SEARCH = Panel(
    "Searches: share of traces",
    (
        Curve("checked", "checked", BLUE),
        Curve("backtracking", "goes on", BLACK),
        Curve("repetition", "repeats", GREY),
    ),
    always_up_to=1,
    strip=Curve("slips", "slips\n", RED),
)
# The seconds waited are part of the rollout.
NOT_STACKED = ["seconds_waited"]


def read(run: Path) -> dict[str, dict]:
    """Returns {name: {step: value}} of every finite number in the two files of a run folder.

    A name of metrics.jsonl stays as it is; one of eval.jsonl is followed by its set, as in
    "accuracy aime". Lines that are no JSON, such as the half line of a run that was killed, and
    lines without a step are left out. Raises OSError where a file cannot be read.
    """
    columns = {}
    for file in ("metrics.jsonl", "eval.jsonl"):
        path = run / file
        if path.is_file():
            for line in path.read_bytes().split(b"\n"):
                add_line(columns, line)
    return columns


def add_line(columns: dict[str, dict], line: bytes) -> None:
    """Adds the numbers of one line to the columns."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(row, dict):
        return
    step = row.get("step")
    if not is_number(step) or not 0 <= step < 1e9:
        return
    suffix = ""
    if "set" in row:
        suffix = f" {row['set']}"
    for name, value in row.items():
        if is_number(value):
            columns.setdefault(name + suffix, {})[step] = value


def is_number(value) -> bool:
    """Is it a finite number that can be drawn?"""
    return isinstance(value, (int, float)) and abs(value) < 1e30


def is_evaluation(name: str) -> bool:
    return name.startswith("accuracy ")


def smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean, (n,) -> (n,). The window shrinks at both ends and is 1 below 40 steps."""
    window = np.ones(2 * (len(y) // 40) + 1)
    sums = np.convolve(y, window, "same")
    return sums / np.convolve(np.ones(len(y)), window, "same")


def panels_for(runs: list[dict]) -> list[Panel]:
    """PANELS with the accuracy on every evaluation set in the first one.

    Of several runs each panel keeps its first curve and the accuracies, in the runs' own colours.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    evaluated = [name for name in names if is_evaluation(name)]
    accuracies = []
    for number, name in enumerate(evaluated):
        label = name.removeprefix("accuracy ")[:8]
        accuracies.append(Curve(name, label, COLOURS[1 + number % 6]))
    reward = PANELS[0]
    panels = [replace(reward, curves=(*reward.curves, *accuracies)), *PANELS[1:]]
    if "checked" in names:
        panels[-1] = SEARCH
    if len(runs) == 1:
        return panels
    return [in_run_colours(panel) for panel in panels]


def in_run_colours(panel: Panel) -> Panel:
    """The same subject for several runs: fewer curves, without labels or colours of their own."""
    kept = [panel.curves[0].name]
    kept += [curve.name for curve in panel.curves if is_evaluation(curve.name)]
    curves = tuple(Curve(name) for name in kept)
    strip = panel.strip
    if strip is not None:
        strip = Curve(strip.name)
    return replace(panel, curves=curves, strip=strip, stacked=False)


def stack(ax, run: dict) -> list[Label]:
    """Draws the seconds of the phases upon each other; phases below 3 % together are "other"."""
    seconds = run["seconds"]
    steps = sorted(seconds)
    total = np.array([seconds[step] for step in steps])  # (n,)
    phases = {}
    for name, column in run.items():
        if not name.startswith("seconds_") or name in NOT_STACKED:
            continue
        values = np.array([column.get(step, 0) for step in steps])  # (n,)
        if values.sum() > 0.03 * total.sum():
            phases[name.removeprefix("seconds_")] = smooth(values)
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(phases))] + [GREY]
    phases["other"] = np.maximum(smooth(total) - sum(phases.values()), 0)
    ax.stackplot(steps, list(phases.values()), colors=colours, alpha=0.85, linewidth=0)
    labels = []
    height = 0.0
    for (phase, values), colour in zip(phases.items(), colours):
        last = values[-1]
        height += last
        labels.append(Label(height - last / 2, f"{phase} {last:.2f}", colour))
    return labels


def plot_curve(ax, column: dict, curve: Curve, run_number: int) -> Label:
    """Draws one curve of one run: its mean, and behind it the values where they differ."""
    steps = sorted(column)
    values = np.array([column[step] for step in steps])  # (n,)
    means = smooth(values)  # (n,)
    colour = curve.colour or COLOURS[run_number % len(COLOURS)]
    if len(values) >= 40:
        ax.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    marker = ""
    if len(values) < 3 or is_evaluation(curve.name):
        marker = "o"
    style = "-"
    if marker and not curve.label:
        style = ":"
    elif run_number >= len(COLOURS):
        style = "--"
    ax.plot(steps, means, color=colour, linestyle=style, marker=marker, markersize=5, linewidth=2.2)
    last = means[-1]
    digits = 2 if abs(last) < 10 else 0
    separator = "" if curve.label.endswith("\n") else " "
    text = f"{curve.label}{separator}{last:.{digits}f}"
    return Label(last, text.strip(), colour)


def fill(ax, panel: Panel, runs: list[dict]) -> None:
    """Draws the curves of all runs, scales the y axis and labels the ends of the curves."""
    labels = []
    for number, run in enumerate(runs):
        for curve in panel.curves:
            if curve.name not in run:
                continue
            if panel.stacked:
                labels += stack(ax, run)
            else:
                labels.append(plot_curve(ax, run[curve.name], curve, number))
    ax.xaxis.get_major_locator().set_params(integer=True)
    highest = ax.dataLim.y1
    if not labels or (panel.log and highest <= 0):
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color=GREY)
    elif panel.log:
        ax.set_yscale("log")
        ax.yaxis.get_major_locator().set_params(subs=(1, 3))
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    else:
        lowest = max(panel.never_below, min(ax.dataLim.y0, 0))
        ax.set_ylim(lowest, 1.04 * max(panel.always_up_to, highest, 0.01))
    # The curves of many runs end too close together for labels; the names above have their colours.
    if len(labels) < 8:
        write_labels(ax, sorted(labels))


def write_labels(ax, labels: list[Label]) -> None:
    """Writes the labels beside the ends of their curves, from the lowest up, 20 pixels apart."""
    to_axes = ax.transData + ax.transAxes.inverted()
    lowest = 0.0
    for label in labels:
        height = max(to_axes.transform((0, label.y))[1], lowest)
        lowest = height + 20 / ax.bbox.height
        if height < 1.01:
            text = ax.text(1.02, height, label.text, color=label.colour, fontsize=10)
            text.set(transform=ax.transAxes, verticalalignment="center")


def draw_panel(figure: Figure, place: int, panel: Panel, runs: list[dict]) -> None:
    """Draws a panel at one of the six places, which are counted row by row."""
    row, column = divmod(place, 3)
    left = 0.04 + 0.33 * column
    bottom = 0.515 - 0.465 * row
    last_step = max((step for run in runs for column in run.values() for step in column), default=1)
    limits = (0, last_step or 1)
    room = 0.0
    if panel.strip is not None and any(panel.strip.name in run for run in runs):
        room = 0.13
        ax = figure.add_axes((left, bottom, 0.22, 0.085), xlim=limits)
        fill(ax, Panel("", (panel.strip,)), runs)
    ax = figure.add_axes((left, bottom + room, 0.22, 0.36 - room), title=panel.title, xlim=limits)
    fill(ax, panel, runs)


def write_header(figure: Figure, run_dirs: list[Path], runs: list[dict]) -> None:
    """Writes the names of the runs, and of a single run its accuracies before and after."""
    for number, path in enumerate(run_dirs):
        row, column = divmod(number, 5)
        title = path.resolve().name
        if number >= len(COLOURS):
            title = f"- - {title}"
        colour = BLACK
        if len(runs) > 1:
            colour = COLOURS[number % len(COLOURS)]
        x = 0.04 + 0.19 * column
        y = 0.96 - 0.03 * row
        figure.text(x, y, title, color=colour, weight="bold", fontsize=15)
    if len(runs) > 1:
        return
    facts = []
    for name, accuracies in runs[0].items():
        if is_evaluation(name):
            before = accuracies[min(accuracies)]
            after = accuracies[max(accuracies)]
            facts.append(f"{name.removeprefix('accuracy ')} {before:.2f} \u2192 {after:.2f}")
    figure.text(0.98, 0.96, "   ".join(facts), ha="right")


def draw(run_dirs: list[Path], out: Path) -> None:
    """Writes the picture of one run, or of several over each other. Raises OSError."""
    runs = [read(path) for path in run_dirs]
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 9))
        for place, panel in enumerate(panels_for(runs)):
            draw_panel(figure, place, panel, runs)
        write_header(figure, run_dirs, runs)
        figure.savefig(out, dpi=100, format="png")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out
    if out is None:
        folder = args.runs[0] if len(args.runs) == 1 else Path()
        out = folder / "curves.png"
    try:
        for run in args.runs:
            if not read(run):
                message = "has no number in metrics.jsonl or eval.jsonl; name the folder of a run"
                parser.exit(2, f"error: {run} {message}\n")
        draw(args.runs, out)
    except OSError as error:
        parser.exit(2, f"error: {error.filename or out}: {error.strerror}; no picture is written\n")


if __name__ == "__main__":
    main()
