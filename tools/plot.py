"""Draws a run folder as one picture, or several over each other for ablations.

    python tools/plot.py RUN                       writes RUN/curves.png, as training does
    python tools/plot.py RUN_A RUN_B [--out PATH]  writes curves.png here: a colour a run, a panel's first line

Strong lines are centred means over a twentieth of the run. Missing or broken data stays empty: it never ends a run.
"""
import argparse
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

COLOURS = BLUE, RED, *_, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222"
PANELS = (  # title; lines (name, label, colour), of which several runs show the first; a strip below; limits of y
    ("Reward and accuracy (dots)", [("reward", "reward", BLUE)], [], (-9, 1)),
    ("Response length, tokens", [("response_length", "all", BLACK), ("length_right_mean", "right", BLUE),
                                 ("length_wrong_mean", "wrong", RED)], [("truncated", "truncated\n", BLACK)], (0, 0)),
    ("Seconds per step", [("seconds", "all", BLACK)], [], (0, 0)),
    ("Entropy, nats per token", [("entropy", "", BLUE)], [("kl", "KL to base\n", RED)], (0, 0)),
    ("Explained variance of the critic", [("explained_variance", "", RED)], [], (-1, 1)),
    ("Gradient norm", [("policy_grad_norm", "policy", BLUE), ("critic_grad_norm", "critic", RED)], [], "log"))
STYLE = {"text.parse_math": False, "font.size": 13, "axes.spines.top": 0, "axes.spines.right": 0, "axes.grid": 1,
         "axes.titlelocation": "left", "axes.titlesize": 14, "axes.edgecolor": "#999999", "grid.color": "#ececec"}


def read(run: Path) -> dict[str, dict]:
    """{name: {step: value}} of every finite number in metrics.jsonl and, as "accuracy SET" and so on, in eval.jsonl."""
    columns = {}
    for line in b"\n".join(p.read_bytes() for x in ("metrics", "eval") for p in run.glob(f"{x}.jsonl")).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError, AttributeError, KeyError, TypeError):  # half a line
            row = json.loads(line)
            for key, x in row.items():
                if isinstance(x, (int, float)) and abs(x) < 1e30 and 0 <= row["step"] < 1e9:
                    columns.setdefault(f"{key} {row['set']}" if "set" in row else key, {})[row["step"]] = x
    return columns


def smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean, (n,) -> (n,), n > 0; the window is smaller at both ends, and 1 below 40 steps."""
    window = np.ones(2 * (len(y) // 40) + 1)
    return np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")


def stack(ax, run: dict) -> list[tuple]:
    """Seconds per phase on top of each other, those below 3 % of all together as "other"; returns their labels."""
    table = {key[8:]: [run[key].get(s, 0) for s in sorted(run["seconds"])] for key in run if key.startswith("seconds")}
    total, _, _ = np.array(table.pop("")), table.pop("waited", 0), table.pop("report", 0)  # in rollout; after a step
    parts = [(key, smooth(np.array(y))) for key, y in table.items() if sum(y) > 0.03 * total.sum()]
    parts += [("other", np.maximum(smooth(total) - sum(y for _, y in parts), 0))]
    colours = [*COLOURS[:len(parts) - 1], "#999999"]
    ax.stackplot(sorted(run["seconds"]), [y for _, y in parts], colors=colours, alpha=0.85, linewidth=0)
    return [(top - y[-1] / 2, f"{key} {y[-1]:.2f}", colour)
            for top, (key, y), colour in zip(np.cumsum([y[-1] for _, y in parts]), parts, colours)]


def panel(ax, runs: list[dict], lines: list[tuple], limits) -> None:
    """One subject; the lines of several runs have no label, and their run's colour."""
    ends, floor = [], -1
    for i, (key, label, colour) in [(i, line) for i, run in enumerate(runs) for line in lines if line[0] in run]:
        if key == "seconds" and label:
            ends += stack(ax, runs[0])
            continue
        x, y = np.array(sorted(runs[i][key].items())).T  # (n,), (n,)
        mean, dots, colour = smooth(y), len(y) < 3 or " " in key, colour or COLOURS[i % 7]
        ax.plot(x, y, color=colour, alpha=0.25 * (len(y) >= 40), linewidth=0.8)
        ax.plot(x, mean, "--"[i < 7:] if label or not dots else ":", color=colour, marker="o" * dots, ms=5, lw=2.2)
        ends += [(mean[-1], f"{label} {mean[-1]:.{2 * (abs(mean[-1]) < 10)}f}".replace("\n ", "\n").strip(), colour)]
    ax.xaxis.get_major_locator().set_params(integer=True)
    if not ends or limits == "log" and ax.dataLim.y1 <= 0:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color="#999999")
    elif limits == "log":
        ax.set_yscale("log")
        ax.yaxis.get_major_locator().set_params(subs=(1, 3))
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    else:
        ax.set_ylim(max(limits[0], min(ax.dataLim.y0, 0)), 1.04 * max(limits[1], ax.dataLim.y1, 0.01))
    for y, text, colour in sorted(ends) if len(ends) < 8 else ():  # beside the ends, a text's height apart
        floor = max((ax.transData + ax.transAxes.inverted()).transform((0, y))[1], 0, floor + 20 / ax.bbox.height)
        ax.text(1.02, floor, text * int(floor < 1.01), color=colour, transform=ax.transAxes, va="center", fontsize=10)


def draw(run_dirs: list[Path], out: Path) -> None:
    """Writes the picture of one run, or of several over each other, to `out`; a full disk is a warning."""
    runs = [read(path) for path in run_dirs]
    x = {"xlim": (0, max((step for run in runs for column in run.values() for step in column), default=1) or 1)}
    sets = [key for key in {key: 0 for run in runs for key in run} if key.startswith("accuracy ")]
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 9))
        for n, (title, lines, strip, limits) in enumerate(PANELS):
            lines = lines if n else lines + [(key, key[9:17], COLOURS[1 + i % 6]) for i, key in enumerate(sets)]
            if len(runs) > 1:
                lines, strip = ([(key, "", "") for key, *_ in part] for part in (lines[:1 if n else None], strip))
            left, bottom = 0.04 + n % 3 * 0.33, 0.515 - n // 3 * 0.465
            lower = 0.13 * any(key in run for key, *_ in strip for run in runs)
            panel(figure.add_axes((left, bottom + lower, 0.22, 0.36 - lower), title=title, **x), runs, lines, limits)
            if lower:
                panel(figure.add_axes((left, bottom, 0.22, 0.085), **x), runs, strip, limits)
        for i, path in enumerate(run_dirs):
            place, colour = (0.04 + i % 5 * 0.19, 0.96 - i // 5 * 0.03), COLOURS[i % 7] if len(runs) > 1 else BLACK
            figure.text(*place, "- - " * (i > 6) + path.resolve().name, color=colour, weight="bold", fontsize=15)
        if len(runs) == 1:
            facts = [f"{key[9:]} {y[min(y)]:.2f} \u2192 {y[max(y)]:.2f}" for key in sets for y in [runs[0][key]]]
            figure.text(0.98, 0.96, "   ".join(facts), ha="right")
        try:
            figure.savefig(out, dpi=100, format="png")
        except OSError as error:
            print(f"WARNING: {out}: {error.strerror}; no picture", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw(args.runs, args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "curves.png")
