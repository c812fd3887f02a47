"""Draws the curves of a run folder as one picture, or compares several runs in one picture.

    python tools/plot.py RUN                       writes RUN/curves.png
    python tools/plot.py RUN RUN ... [--out PATH]  writes curves.png beside the first RUN

A strong line is a centred mean over a twentieth of the run, or of the longest of several runs. If
a run has 40 steps or more, a pale line shows the single steps. The picture of several runs has a
colour for each run, and the accuracy on each run's first evaluation set.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import runs
from tools.compare import draw

# The panels of one run: {title: {metric: (its label, its colour)}}.
REWARD = "Reward, accuracy (dots), truncated"
VARIANCE, NORM = "Explained variance of the critic", "Gradient norm"
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
    "Entropy, nats per token": {
        "entropy": ("", runs.BLUE),
        "kl": ("KL to base", runs.RED),
        "teacher_k3": ("KL to teacher", runs.GREEN),
    },
    VARIANCE: {"explained_variance": ("", runs.RED)},
    NORM: {"policy_grad_norm": ("policy", runs.PINK), "critic_grad_norm": ("critic", runs.GREEN)},
}
# If a task counts these behaviours, as tasks/countdown.py does, they replace the gradient norm.
SEARCHES = "Searches: share of traces"
SEARCH = {
    "checked": ("checked", runs.BLUE),
    "backtracking": ("backtracking", runs.BLACK),
    "repetition": ("repetition", runs.GREY),
    "slips": ("slips", runs.RED),
}
# Where the y axis ends, or above. The axis of NORM is logarithmic.
LEAST = {REWARD: 1, VARIANCE: 1, SEARCHES: 1, NORM: None}


def draw_run(run: Path, out: Path) -> None:
    """Writes the picture of one run."""
    metrics = runs.read_metrics(run)
    panels = dict(PANELS)
    title = run.resolve().name
    for number, (name, table) in enumerate(runs.read_evaluations(run).items()):
        column = f"accuracy {name}"
        metrics = metrics.join(table.accuracy.rename(column), how="outer")
        panels[REWARD] = panels[REWARD] | {column: (name[:8], f"C{2 + number % 6}")}
        title += f"     {name} {table.accuracy.iloc[0]:.2f} → {table.accuracy.iloc[-1]:.2f}"
    if "checked" in metrics:
        panels.pop(NORM)
        panels[SEARCHES] = SEARCH
    # A task with several rewards logs reward_NAME for each. reward_lost counts lost verdicts.
    names = [x for x in metrics if x.startswith("reward_") and x != "reward_lost"]
    for name, colour in zip(names, runs.COLOURS[3:]):
        panels[REWARD] = panels[REWARD] | {name: (name.removeprefix("reward_")[:9], colour)}
    with rc_context(runs.STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for ax, (name, curves) in zip(figure.subplots(2, 3).flat, panels.items()):
            ax.set(title=name, xlabel="step")
            ends = draw_curves(ax, metrics, curves)
            runs.scale(ax, LEAST.get(name, 0.01))
            write_labels(ax, ends)
        figure.savefig(out)


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


def write_labels(ax, ends: list[tuple[float, str, str]]) -> None:
    """Writes the labels beside the ends of their curves, from the lowest up, without overlaps."""
    to_axes = ax.transData + ax.transAxes.inverted()
    free = 0.0
    for end, text, colour in sorted(ends):
        height = max(to_axes.transform((0, end))[1], free)
        free = height + 0.06
        if height < 1.1:
            ax.text(1.02, height, text, transform=ax.transAxes, color=colour, size=11, va="center")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    text = "the folder of a run"
    parser.add_argument("runs", type=runs.run_folder, nargs="+", metavar="RUN", help=text)
    text = "the picture: a .png, .pdf, .svg or .jpg file"
    parser.add_argument("--out", type=Path, metavar="PATH", help=text)
    args = parser.parse_args()
    [first, *others] = args.runs
    if others:
        out = args.out or first.resolve().parent / "curves.png"
        found = {path: runs.read_run(path) for path in args.runs}
        draw({f"{path} ({run.set})": {1: run} for path, run in found.items()}, out)
    else:
        out = args.out or first / "curves.png"
        draw_run(first, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
