"""Compares settings over seeds: a table of their differences, and a picture with bands.

    python tools/compare.py BASELINE SETTING ... --out PATH     PATH.md, PATH.json and PATH.png
    python tools/compare.py BASELINE SETTING ... --out x.pdf    x.md, x.json and x.pdf
    python tools/compare.py RUN ...                             says what each run has learnt

The folder of a setting holds its finished runs, seed1, seed2 and so on, as tools/lab.py makes them.
An accuracy is the mean of the last three evaluations on the first evaluation set, which all runs
must share. A setting and the baseline are compared at an equal step, at an equal number of response
tokens, and at equal seconds of training. Each is the end of the shortest run of the two. Between
two evaluations the accuracy is interpolated.
"""

import json
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))

import mpmath
import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.runs import (
    STYLE,
    describe,
    read_evaluations,
    read_lines,
    read_metrics,
    save,
    scale,
    smooth,
    to_number,
)

PANELS = {
    "reward": "Training reward",
    "accuracy": "Held-out accuracy",
    "response_length": "Response length, tokens",
    "entropy": "Entropy, nats per token",
    "truncated": "Truncated responses, share",
    "seconds": "Seconds per step",
}
PICTURES = [".png", ".pdf", ".svg", ".jpg"]
AT_THE_END = ["response_length", "truncated", "entropy"]
METRICS = [*AT_THE_END, "reward", "seconds", "total_length", "tokens_per_second"]
ANSWER = {"set": str, "question": str, "response": str}
ANSWER |= {"problem": to_number, "reward": to_number, "length": to_number}
# A setting is compared with the baseline where both have the same number of these.
AXES = ["step", "tokens", "seconds"]
HEADER = """\
| setting | accuracy | difference at equal steps | at equal tokens | at equal seconds | length \
| truncated | entropy | seconds | seeds |
|---|---|---|---|---|---|---|---|---|---|
"""


class Run(NamedTuple):
    metrics: pd.DataFrame  # a row for each step; tokens: the response tokens so far
    evaluations: pd.DataFrame  # a row for each evaluation: step, tokens, seconds, accuracy
    set: str  # the name of the evaluation set


def read_run(folder: Path) -> Run:
    """The numbers of a run folder, of the first evaluation set. Raises OSError."""
    metrics = read_metrics(folder).reindex(columns=METRICS)
    # A variant may change the number of samples from step to step.
    samples = metrics.tokens_per_second * metrics.seconds / metrics.total_length  # (S,)
    metrics["tokens"] = (samples.round() * metrics.response_length).cumsum()
    name, first_set = next(iter(read_evaluations(folder).items()), ("no set", pd.DataFrame()))
    evaluations = first_set.rename_axis("step").reindex(columns=["accuracy"]).reset_index()
    steps = [0, *metrics.index]
    evaluations["tokens"] = np.interp(evaluations.step, steps, [0, *metrics.tokens])
    evaluations["seconds"] = np.interp(evaluations.step, steps, [0, *metrics.seconds.cumsum()])
    return Run(metrics, evaluations, name)


def read_settings(folders: list[Path], seeds: int | None) -> dict[str, dict[int, Run]]:
    """The finished runs by setting and seed. Raises OSError and ValueError."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds {seeds}: the first seed is 1; give 1 or a larger number")
    settings = {}
    folder_of = {}  # evaluation set: a run that has it
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give the folder of a setting")
        if folder.name in settings:
            raise ValueError(f"two folders have the name {folder.name}; rename one of them")
        runs = {}
        for path in folder.glob("seed*/result.json"):
            number = path.parent.name.removeprefix("seed")
            if not number.isdecimal():
                raise ValueError(f"{path.parent}: the name has no seed; rename it, as to seed1")
            if seeds is None or int(number) <= seeds:
                run = runs[int(number)] = read_run(path.parent)
                if run.evaluations.accuracy.isna().all():
                    raise ValueError(f"{path.parent} has no accuracy; train with --eval_data")
                folder_of.setdefault(run.set, path.parent)
        settings[folder.name] = dict(sorted(runs.items()))
    if not settings[folders[0].name]:
        raise ValueError(f"{folders[0]}: the baseline has no finished run, such as seed1")
    if len(folder_of) > 1:
        sets = ", ".join(f"{name} in {folder}" for name, folder in folder_of.items())
        raise ValueError(f"the evaluation sets differ: {sets}; compare runs of one set")
    for name in [name for name, runs in settings.items() if not runs]:
        print(f"{name} has no finished run, and is left out")
        del settings[name]
    return settings


def warn_of_intervals(settings: dict[str, dict[int, Run]]) -> None:
    """Warns if the last three evaluations are those of another number of steps in some settings."""
    intervals = {}  # steps between evaluations: settings
    for name, runs in settings.items():
        for run in runs.values():
            if len(run.evaluations) > 1:
                intervals.setdefault(run.evaluations.step.diff().median(), {})[name] = run
    if len(intervals) > 1:
        told = "; ".join(f"{steps:g}: {', '.join(names)}" for steps, names in intervals.items())
        print(f"warning: three evaluations are no equal number of steps (steps between two {told})")


def make_row(name: str, runs: dict[int, Run], baseline: dict[int, Run]) -> dict:
    """The numbers of a setting."""
    row = {"setting": name, "seeds": list(runs)}
    row |= {axis: compare(runs, baseline, axis) for axis in AXES}
    # A run may be longer than the others. Its later steps do not count.
    tables = [run.metrics.loc[: row["step"]["at"]] for run in runs.values()]
    ends = [table.tail(max(1, len(table) // 10)).mean() for table in tables]
    row |= pd.DataFrame(ends)[AT_THE_END].mean().to_dict()
    row["seconds_of_training"] = np.mean([table.seconds.sum() for table in tables])
    return row


def compare(runs: dict[int, Run], baseline: dict[int, Run], axis: str) -> dict:
    """Accuracies at the end of the shortest run on this axis, and the differences to the baseline.

    A difference is a mean over the seeds that both have. It is None for the baseline itself. Its
    95 % interval is None if fewer than two seeds are paired.
    """
    at = min(run.evaluations[axis].max() for run in [*runs.values(), *baseline.values()])
    ours = accuracies_at(runs, axis, at)
    pairs = (ours - accuracies_at(baseline, axis, at)).dropna()
    cell = {"at": float(at), "accuracies": list(ours)}
    cell |= {"difference": None, "interval": None, "differences": {}}
    if runs is not baseline and len(pairs) > 0:
        cell["difference"] = pairs.mean()
        cell["differences"] = pairs.to_dict()
        if len(pairs) > 1:
            margin = pairs.sem() * limit_of_t(len(pairs))
            cell["interval"] = [pairs.mean() - margin, pairs.mean() + margin]
    return cell


def limit_of_t(seeds: int) -> float:
    """Student's t of so many pairs of seeds is beyond this limit, in size, in 5 % of cases."""
    freedom = seeds - 1

    def excess(limit):
        share = freedom / (freedom + limit**2)
        return mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True) - 0.05

    return float(mpmath.findroot(excess, (0, 1000), solver="bisect"))


def accuracies_at(runs: dict[int, Run], axis: str, at: float) -> pd.Series:
    """Of each seed the mean of three evaluations, interpolated between two evaluations."""
    found = {}
    for seed, run in runs.items():
        means = run.evaluations.accuracy.rolling(3, min_periods=1).mean()
        found[seed] = np.interp(at, run.evaluations[axis], means)
    return pd.Series(found)


def accuracy_text(cell: dict) -> str:
    accuracies = cell["accuracies"]
    return f"{np.mean(accuracies):.3f} ({min(accuracies):.3f} to {max(accuracies):.3f})"


def difference_text(cell: dict) -> str:
    if cell["difference"] is None:
        return "-"
    text = f"{cell['difference']:+.3f}"
    if cell["interval"]:
        text += " [{:+.3f}, {:+.3f}]".format(*cell["interval"])
    return text


def gather(runs: dict[int, Run], curve: str, steps: int) -> pd.DataFrame:
    """One curve of all seeds: a column for each seed. steps: decides the smoothing."""
    if curve == "accuracy":
        curves = pd.concat([run.evaluations.accuracy for run in runs.values()], axis=1)
        tokens = pd.concat([run.evaluations.tokens for run in runs.values()], axis=1)
        return curves.set_index(tokens.mean(axis=1) / 1000)
    return smooth(pd.concat([run.metrics[curve] for run in runs.values()], axis=1), steps)


def draw(settings: dict[str, dict[int, Run]], shown: list[str], out: str | Path) -> None:
    """Draws the shown settings, or all. A band goes from the lowest seed to the highest."""
    # One window smooths all curves. A setting has one style, whichever settings are shown.
    steps = max(len(run.metrics) for runs in settings.values() for run in runs.values())
    styles = dict(zip(settings, STYLE["axes.prop_cycle"]()))
    shown = [name for name in settings if name in shown] or list(settings)
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        for ax, (curve, title) in zip(figure.subplots(2, 3).flat, PANELS.items()):
            ax.set(title=title, xlabel="response tokens / 1000" if curve == "accuracy" else "step")
            for name in shown:
                curves = gather(settings[name], curve, steps)
                marker = "o" if len(curves) < 3 else ""
                ax.plot(curves.mean(axis=1), label=name, marker=marker, **styles[name])
                band = (curves.index, curves.min(axis=1), curves.max(axis=1))
                ax.fill_between(*band, color=styles[name]["color"], alpha=0.15, linewidth=0)
            scale(ax)
        figure.legend(ax.get_lines(), shown, loc="outside upper center", ncols=8, frameon=False)
        counts = [len(settings[name]) for name in shown]
        least, most = min(counts), max(counts)
        if most > 1:
            seeds = most if least == most else f"{least} to {most}"
            text = f"line: the mean of {seeds} seeds; band: from the lowest seed to the highest"
            figure.supxlabel(text, size=12)
        save(figure, out)


def compare_all(settings: dict[str, dict[int, Run]], shown: list[str], out: str) -> None:
    """Writes and prints the table, and draws. The first setting is the baseline."""
    warn_of_intervals(settings)
    path = Path(out)
    is_picture = path.suffix in PICTURES
    out, ending = (str(path.with_suffix("")), path.suffix) if is_picture else (out, ".png")
    baseline = next(iter(settings.values()))
    rows = [make_row(name, runs, baseline) for name, runs in settings.items()]
    table = HEADER
    for row in rows:
        cells = [row["setting"], accuracy_text(row["step"])]
        cells += [difference_text(row[axis]) for axis in AXES]
        cells += [f"{row['response_length']:.1f}", f"{row['truncated']:.2f}"]
        cells += [f"{row['entropy']:.2f}", f"{row['seconds_of_training']:.0f}"]
        table += f"| {' | '.join(cells)} | {len(row['seeds'])} |\n"
    print(table)
    Path(f"{out}.md").write_text(table)
    Path(f"{out}.json").write_text(json.dumps(rows, indent=1))
    draw(settings, shown, f"{out}{ending}")
    print(f"the table, its numbers and the picture: {out}.md, {out}.json, {out}{ending}")


def show_run(run: Path) -> None:
    """Prints what a run has learnt: held-out numbers, and a problem that it has learnt to solve."""
    if not (evaluations := read_evaluations(run)):
        raise ValueError(f"{run}/eval.jsonl is not there, or has no whole line; give a run folder")
    print(f"{run}:")
    for name, table in evaluations.items():
        for column in table.columns.intersection(["accuracy", "length", "truncated"]):
            curve = table[column].dropna()
            # With one evaluation the first step is the last step.
            steps = dict.fromkeys(curve.index[[0, -1]])
            ends = [f"{curve[step]:.3f} at step {step}" for step in steps]
            print(f"evaluation set {name}: {column} {', '.join(ends)}")
    answers = pd.DataFrame(read_lines(run / "eval_samples.jsonl"), columns=[*ANSWER], dtype=object)
    answers = pd.DataFrame({name: answers[name].map(kind) for name, kind in ANSWER.items()})
    # A line without one of the numbers is no sample.
    by_problem = answers.dropna().groupby(["set", "problem"])
    before, after = by_problem.first(), by_problem.last()
    # The longest response shows most.
    learnt = after[(after.reward >= 1) & (before.reward < 1)].sort_values("length")
    for problem in learnt.index[-1:]:
        question = shorten(after.question[problem], 300)
        print(f"a problem that the run has learnt to solve: {question}")
        print(f"before: {shorten(before.response[problem], 300)}")
        print(f"after:  {shorten(after.response[problem], 300)}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    text = "folders of settings, the baseline first, or folders of runs"
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help=text)
    text = "PATH.md, PATH.json and PATH.png are written; PATH may end in .pdf; default: comparison"
    parser.add_argument("--out", metavar="PATH", help=text)
    parser.add_argument("--seeds", type=int, help="the last seed to compare; absent: all seeds")
    parser.add_argument("--show", nargs="+", default=[], help="the settings in the picture")
    args = parser.parse_args()
    try:
        runs = [folder for folder in args.folders if (folder / "eval.jsonl").exists()]
        if runs:
            if args.out:
                raise ValueError(f"--out {args.out}: {runs[0]} is a run; give folders of settings")
            for folder in args.folders:
                if folder not in runs:
                    raise ValueError(f"{folder} is no run, and {runs[0]} is one; give runs alone")
                show_run(folder)
            return
        args.out = args.out or "comparison"
        if unknown := set(args.show) - {folder.name for folder in args.folders}:
            raise ValueError(f"--show {' '.join(unknown)}: no folder has this name")
        compare_all(read_settings(args.folders, args.seeds), args.show, args.out)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {describe(error, args.out)}\n")


if __name__ == "__main__":
    main()
