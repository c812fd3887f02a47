"""Draws the curves of a run folder as one picture, or compares several runs in one picture.

    python tools/plot.py RUN                       writes RUN/curves.png
    python tools/plot.py RUN RUN ... [--out PATH]  writes curves.png here, or beside a first RUN
                                                   that is outside of the current folder

A strong line is a centred mean over a twentieth of the run, or of the longest of several runs. If
a run has 40 steps or more, a pale line shows the single steps. The picture of several runs has a
colour for each run, and the accuracy on each run's first evaluation set. A curve without data is
left out.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import runs
from tools.compare import draw, read_run

# The panels of one run: {title: {metric: (its label, its colour)}}.
REWARD = "Reward, accuracy (dots), truncated"
VARIANCE = "Explained variance of the critic"
NORM = "Gradient norm"
PANELS = {
    REWARD: {"reward": ("reward", runs.BLUE), "truncated": ("truncated", runs.GREY)},
    "Response length, tokens": {
        "response_length": ("all", runs.BLACK),
        "length_right_mean": ("right", runs.BLUE),
        "length_wrong_mean": ("wrong", runs.RED),
    },
    "Seconds per step": {
        "seconds": ("all", runs.BLACK),
        "seconds_rollout": ("rollout", runs.BLUE),
        "seconds_policy": ("policy", runs.PINK),
        "seconds_critic": ("critic", runs.GREEN),
        "seconds_values": ("values", runs.RED),
    },
    "Entropy, nats per token": {"entropy": ("", runs.BLUE), "kl": ("KL to base", runs.RED)},
    VARIANCE: {"explained_variance": ("", runs.RED)},
    NORM: {"policy_grad_norm": ("policy", runs.PINK), "critic_grad_norm": ("critic", runs.GREEN)},
}
# If a task counts these behaviours, as tasks/countdown.py does, they replace the gradient norm.
SEARCHES = "Searches: share of traces"
SEARCH = {
    "checked": ("checked", runs.BLUE),
    "backtracking": ("goes on", runs.BLACK),
    "repetition": ("repeats", runs.GREY),
    "slips": ("slips", runs.RED),
}
UP_TO_ONE = (REWARD, VARIANCE, SEARCHES)


def draw_run(run: Path, out: Path) -> None:
    """Writes the picture of one run. Raises OSError."""
    metrics = runs.read_metrics(run)
    panels = dict(PANELS)
    title = run.resolve().name
    for number, (name, table) in enumerate(runs.read_evaluations(run).items()):
        if "accuracy" in table:
            column = f"accuracy {name}"
            metrics = metrics.join(table.accuracy.rename(column), how="outer")
            panels[REWARD] = panels[REWARD] | {column: (name[:8], f"C{2 + number % 6}")}
            title += f"     {name} {table.accuracy.iloc[0]:.2f} → {table.accuracy.iloc[-1]:.2f}"
    if "checked" in metrics:
        panels.pop(NORM)
        panels[SEARCHES] = SEARCH
    with rc_context(runs.STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for ax, (name, curves) in zip(figure.subplots(2, 3).flat, panels.items()):
            ax.set_title(name)
            ends = draw_curves(ax, metrics, curves)
            scale(ax, name)
            write_labels(ax, ends)
        figure.savefig(out, dpi=100, format="png")


def draw_curves(ax, metrics: pd.DataFrame, curves: dict) -> list[tuple[float, str, str]]:
    """Draws the curves that the run has. Returns their ends: height, text and colour."""
    ends = []
    for name in metrics.columns.intersection(list(curves)):
        text, colour = curves[name]
        curve = metrics[name].dropna()
        means = runs.smooth(curve, len(curve))
        marker = "o" if name.startswith("accuracy ") or len(curve) < 3 else ""
        if len(curve) >= 40:
            ax.plot(curve, color=colour, linestyle="-", alpha=0.25, linewidth=0.8)
        ax.plot(means, color=colour, linestyle="-", marker=marker)
        end = means.iloc[-1]
        digits = 2 if abs(end) < 10 else 0
        ends.append((end, f"{text} {end:.{digits}f}".strip(), colour))
    return ends


def scale(ax, title: str) -> None:
    """Sets the axes. The y axis begins at 0 or below, but not below -1, where outliers are."""
    lowest, highest = ax.dataLim.intervaly
    ax.set_xlim(left=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if not ax.has_data():
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color=runs.GREY)
    elif title == NORM and highest > 0:
        ax.set_yscale("log")
        ax.yaxis.get_major_locator().set_params(subs=(1, 3))
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    else:
        least = 1 if title in UP_TO_ONE else 0.01
        ax.set_ylim(max(-1, min(0, lowest)), 1.04 * max(least, highest))


def write_labels(ax, ends: list[tuple[float, str, str]]) -> None:
    """Writes the labels beside the ends of their curves, from the lowest up, without overlaps."""
    to_axes = ax.transData + ax.transAxes.inverted()
    free = 0.0
    for end, text, colour in sorted(ends):
        height = max(to_axes.transform((0, end))[1], free)
        free = height + 0.06
        style = {"color": colour, "fontsize": 11, "verticalalignment": "center"}
        if height < 1.1:
            ax.text(1.02, height, text, transform=ax.transAxes, **style)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    [first, *others] = args.runs
    folder = first
    if others:
        folder = Path() if Path.cwd() in first.resolve().parents else first.resolve().parent
    out = args.out or folder / "curves.png"
    try:
        for run in args.runs:
            tables = [runs.read_metrics(run), *runs.read_evaluations(run).values()]
            if all(table.empty for table in tables):
                message = "has no number in metrics.jsonl or eval.jsonl; name the folder of a run"
                parser.exit(2, f"error: {run} {message}\n")
        if others:
            found = {str(run): read_run(run) for run in args.runs}
            settings = {f"{name} ({found[name].set})": {1: found[name]} for name in found}
            draw(settings, [], out)
        else:
            draw_run(first, out)
        print(f"wrote {out}")
    except OSError as error:
        parser.exit(2, f"error: {error.filename or out}: {error.strerror}; no picture is written\n")


if __name__ == "__main__":
    main()
