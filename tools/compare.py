"""Compares settings over seeds, or says what single runs have learnt.

    python tools/compare.py BASELINE SETTING ... [--out PATH]   writes PATH.md and PATH.png
    python tools/compare.py RUN ...                             says what each run has learnt

The folder of a setting holds its finished runs, seed1, seed2 and so on, as tools/lab.py makes them.
An accuracy is the mean of the last three evaluations on the first evaluation set. A setting and the
baseline are compared at an equal step, at an equal number of response tokens, and at equal seconds
of training: each is the end of the shortest run of the two. Between two evaluations the accuracy is
interpolated. A difference is a mean over the seeds that both have, with its 95 % interval.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from textwrap import shorten

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import runs
from tools.runs import Run

PANELS = {
    "reward": "Training reward",
    "accuracy": "Held-out accuracy",
    "response_length": "Response length, tokens",
    "entropy": "Entropy, nats per token",
    "truncated": "Truncated responses, share",
    "seconds": "Seconds per step",
}
HEADER = """\
| setting | accuracy | difference at equal steps | at equal tokens | at equal seconds | length \
| truncated | entropy | seconds | seeds |
|---|---|---|---|---|---|---|---|---|---|
"""


def compare(folders: list[Path], seeds: int | None, out: str) -> None:
    """Prints the table, and writes it and the picture. The first folder is the baseline."""
    names = [folder.name for folder in folders]
    settings = {}
    for folder in folders:
        # Two laboratories may have settings of one name.
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        settings[name] = runs.read_setting(folder, seeds)
    for name in [name for name, found in settings.items() if not found]:
        print(f"{name} has no finished run, and is left out")
        del settings[name]
    if not settings:
        runs.refuse("no setting has a finished run, such as seed1")
    sets = {run.set for found in settings.values() for run in found.values()}
    if len(sets) > 1:
        runs.refuse(
            f"the evaluation sets differ: {', '.join(sorted(sets))}; compare runs of one set"
        )
    baseline = next(iter(settings.values()))
    table = HEADER + "".join(make_row(name, settings[name], baseline) for name in settings)
    print(table)
    Path(f"{out}.md").write_text(table)
    draw(settings, f"{out}.png")
    print(f"the table and the picture: {out}.md, {out}.png")


def make_row(name: str, setting: dict[int, Run], baseline: dict[int, Run]) -> str:
    """One row of the table."""
    step = runs.end_of(setting, baseline, axis="step")
    accuracies = runs.accuracies_at(setting, "step", step)
    cells = [name, f"{accuracies.mean():.3f} ({accuracies.min():.3f} to {accuracies.max():.3f})"]
    for axis in ("step", "tokens", "seconds"):
        differences = runs.differences(setting, baseline, axis)
        is_compared = setting is not baseline and len(differences) > 0
        cells.append(runs.mean_text(differences, "+.3f") if is_compared else "-")
    # A run may be longer than the others. Its later steps do not count.
    tables = [run.metrics.loc[:step] for run in setting.values()]
    ends = pd.DataFrame([table.tail(max(1, len(table) // 10)).mean() for table in tables]).mean()
    cells += [f"{ends.response_length:.1f}", f"{ends.truncated:.2f}", f"{ends.entropy:.2f}"]
    cells.append(f"{pd.Series([table.seconds.sum() for table in tables]).mean():.0f}")
    return f"| {' | '.join(cells)} | {len(setting)} |\n"


def draw(settings: dict[str, dict[int, Run]], out: str | Path) -> None:
    """Draws all settings. A band goes from the lowest seed to the highest."""
    # One window smooths all curves.
    steps = max(len(run.metrics) for found in settings.values() for run in found.values())
    with rc_context(runs.STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        for ax, (curve, title) in zip(figure.subplots(2, 3).flat, PANELS.items()):
            ax.set(title=title, xlabel="response tokens / 1000" if curve == "accuracy" else "step")
            for name, found in settings.items():
                runs.draw_band(ax, gather(found, curve, steps), name)
            runs.scale(ax)
        figure.legend(ax.get_lines(), settings, loc="outside upper center", ncols=8, frameon=False)
        most = max(map(len, settings.values()))
        if most > 1:
            text = f"line: the mean of {most} seeds; band: from the lowest seed to the highest"
            figure.supxlabel(text, size=12)
        figure.savefig(out)


def gather(setting: dict[int, Run], curve: str, steps: int) -> pd.DataFrame:
    """One curve of all seeds: a column for each seed. steps: decides the smoothing."""
    if curve == "accuracy":
        curves = pd.concat([run.evaluations.accuracy for run in setting.values()], axis=1)
        tokens = pd.concat([run.evaluations.tokens for run in setting.values()], axis=1)
        return curves.set_index(tokens.mean(axis=1) / 1000)
    curves = [run.metrics.get(curve, pd.Series(dtype=float)) for run in setting.values()]
    return runs.smooth(pd.concat(curves, axis=1), steps)


def show_run(run: Path) -> None:
    """Prints what a run has learnt: held-out numbers, and a problem that it has learnt to solve."""
    evaluations = runs.read_evaluations(run)
    if not evaluations:
        runs.refuse(f"{run} has no evaluation in eval.jsonl; give the folder of a run")
    print(f"{run}:")
    for name, table in evaluations.items():
        for column in table.columns.intersection(["accuracy", "length", "truncated"]):
            curve = table[column].dropna()
            # With one evaluation the first step is the last step.
            steps = dict.fromkeys(curve.index[[0, -1]])
            ends = [f"{curve[step]:.3f} at step {step}" for step in steps]
            print(f"evaluation set {name}: {column} {', '.join(ends)}")
    samples = pd.DataFrame(runs.read_lines(run / "eval_samples.jsonl"))
    if samples.empty:
        return
    by_problem = samples.groupby(["set", "problem"])
    before, after = by_problem.first(), by_problem.last()
    learnt = after[(after.reward >= 1) & (before.reward < 1)]
    if len(learnt):
        # The longest response shows most.
        problem = learnt.length.idxmax()
        question = shorten(after.question[problem], 300)
        print(f"a problem that the run has learnt to solve: {question}")
        print(f"before: {shorten(before.response[problem], 300)}")
        print(f"after:  {shorten(after.response[problem], 300)}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    text = "folders of settings, the baseline first, or folders of runs"
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help=text)
    parser.add_argument("--out", default="comparison", metavar="PATH", help="default: comparison")
    parser.add_argument("--seeds", type=int, help="the last seed to compare; absent: all seeds")
    args = parser.parse_args()
    if (args.folders[0] / "eval.jsonl").exists():
        for run in args.folders:
            show_run(run)
    else:
        compare(args.folders, args.seeds, args.out)


if __name__ == "__main__":
    main()
