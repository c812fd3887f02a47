"""Prints the tables of docs/teacher.md and of "Several rewards" in docs/rewards.md.

studies/teacher_runs.tar.xz has the numbers of the runs:

    mkdir -p out/teacher && tar xf studies/teacher_runs.tar.xz -C out/teacher
    python studies/teacher.py out/teacher

countdown/ has runs of variants/plans/distill.txt, and runs at higher rates. chain/ has the settings
of distill.txt in the chains. rewards/ has runs of variants/plans/two_rewards.txt. Intervals are
95 %: Student's t of a mean, and of a mean difference between runs of one seed.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.compare import limit_of_t
from tools.runs import STYLE, read_evaluations, read_metrics, scale

RATES = {
    "ppo_rate_4": "PPO, 4e-4",
    "taught_rate_4": "teacher, 4e-4",
    "ppo_rate_8": "PPO, 8e-4",
    "taught_rate_8": "teacher, 8e-4",
}
TITLES = {
    "ppo_often": "PPO",
    "grpo_often": "GRPO",
    "taught": "teacher",
    "taught_half": "teacher 0.5, GRPO 0.5",
    "weakly": "weak teacher",
    "weakly_half": "weak teacher 0.5, GRPO 0.5",
}
REWARDS = {"two_right": "`first`", "two_sum": "`sum`", "two_gdpo": "`gdpo`"}


def interval(numbers, form: str) -> str:
    """A mean with its interval. form: of a number."""
    numbers = pd.Series(list(numbers), dtype=float)
    # A mean of the runs that reach 0.5 would say nothing about the others.
    if numbers.isna().any():
        return "-"
    margin = numbers.sem() * limit_of_t(len(numbers))
    ends = f"[{numbers.mean() - margin:{form}}, {numbers.mean() + margin:{form}}]"
    return f"{numbers.mean():{form}} {ends}"


def runs_of(folder: Path) -> dict[int, Path]:
    """{seed: run} of a setting."""
    runs = {int(run.name.removeprefix("seed")): run for run in folder.glob("seed*/")}
    if not runs:
        raise FileNotFoundError(f"{folder} has no runs; unpack the archive there")
    return dict(sorted(runs.items()))


def accuracies_of(run: Path) -> pd.Series:
    """By step."""
    [table] = read_evaluations(run).values()
    return table.accuracy


def ends_of(folder: Path) -> pd.DataFrame:
    """Steps and thousand tokens until 0.5, by seed. NaN: the run does not reach 0.5.

    A run reaches 0.5 when the mean of three evaluations in a row is at least 0.5.
    """
    ends = {}
    for seed, run in runs_of(folder).items():
        means = accuracies_of(run).rolling(3).mean()
        step = means[means >= 0.5].index.min()
        tokens = np.nan if np.isnan(step) else read_metrics(run).drawn_tokens.loc[:step].sum()
        ends[seed] = {"steps": step, "tokens": tokens / 1000}
    return pd.DataFrame.from_dict(ends, orient="index")


def last_accuracies(folder: Path, step: int | None = None) -> pd.Series:
    """The mean of the last three evaluations up to this step, or of all, by seed."""
    found = {s: accuracies_of(run).loc[:step].tail(3).mean() for s, run in runs_of(folder).items()}
    return pd.Series(found)


def print_laboratory(folder: Path, digits: int) -> None:
    """digits: of thousand tokens."""
    print(f"\n{folder.name} | thousand tokens until 0.5 | minus PPO | minus GRPO | steps", end="")
    print(" | last accuracy\n---|---|---|---|---|---")
    others = [ends_of(folder / name).tokens for name in ("ppo_often", "grpo_often")]
    for name, title in TITLES.items():
        print_row(folder / name, title, others, digits)
    for name, title in TITLES.items():
        runs = [read_metrics(run) for run in runs_of(folder / name).values()]
        if "teacher_k1" in runs[0]:
            ends = [np.mean([x.teacher_k1.iloc[at] for x in runs]) for at in (0, -1)]
            print(f"{title}: teacher_k1 {ends[0]:.3f} in the first step, {ends[1]:.3f} in the last")


def print_later(folder: Path, step: int) -> None:
    print(f"\nstep {step} | accuracy | minus PPO | minus GRPO\n---|---|---|---")
    others = [last_accuracies(folder / name, step) for name in ("ppo_often", "grpo_often")]
    for name, title in TITLES.items():
        ours = last_accuracies(folder / name, step)
        gaps = ["-" if x.equals(ours) else interval(ours - x, "+.3f") for x in others]
        print(" | ".join([title, interval(ours, ".3f"), *gaps]))


def print_row(folder: Path, title: str, others: list[pd.Series], digits: int) -> None:
    ends = ends_of(folder)
    reached = ends.dropna()
    form = f".{digits}f"
    words, steps = "-", "-"
    if 0 < len(reached) < len(ends):
        words = f"{', '.join(f'{x:{form}}' for x in reached.tokens)}"
        steps = ", ".join(f"{x:.0f}" for x in reached.steps)
    elif len(reached):
        low, high = (f"{x:{form}}" for x in (reached.tokens.min(), reached.tokens.max()))
        words = f"{reached.tokens.mean():{form}} ({low} to {high})"
        steps = f"{reached.steps.min():.0f} to {reached.steps.max():.0f}"
    if len(reached) < len(ends):
        words += f", {len(reached)} of {len(ends)} runs"
    gaps = ["-" if x.equals(ends.tokens) else interval(ends.tokens - x, f"+{form}") for x in others]
    accuracy = interval(last_accuracies(folder), ".3f")
    print(" | ".join([title, words, *gaps, steps, accuracy]))


def print_rates(folder: Path) -> None:
    """The difference is to PPO with the same rate."""
    print("\nhigher rates | thousand tokens until 0.5 | minus PPO | steps | last accuracy")
    print("---|---|---|---|---")
    for name, title in RATES.items():
        other = ends_of(folder / name.replace("taught", "ppo")).tokens
        print_row(folder / name, title, [other], 0)


def print_pairs(folder: Path) -> None:
    """Differences that no table has."""
    fastest = ends_of(folder / "countdown" / "taught_rate_8").tokens
    for name in ("ppo_rate_4", "ppo_often"):
        gaps = fastest - ends_of(folder / "countdown" / name).tokens
        print(f"taught_rate_8 minus {name}, thousand tokens: {interval(gaps, '+.0f')}")
    best = last_accuracies(folder / "chain" / "ppo_often")
    for name in ("taught", "taught_half"):
        gaps = last_accuracies(folder / "chain" / name) - best
        print(f"chain: {name} minus ppo_often, last accuracy: {interval(gaps, '+.3f')}")


def print_rewards(folder: Path) -> None:
    names = ("accuracy", "`short`, held out", "tokens, held out", "accuracy minus that of `first`")
    print("\nsetting |", " | ".join(names))
    print("---|---|---|---|---")
    first = last_accuracies(folder / "two_right")
    for name, title in REWARDS.items():
        ours = last_accuracies(folder / name)
        tables = [read_evaluations(run)["eval"].tail(3) for run in runs_of(folder / name).values()]
        cells = [interval(ours, ".3f")]
        cells += [interval([x.reward_short.mean() for x in tables], ".3f")]
        cells += [interval([x.length.mean() for x in tables], ".1f")]
        cells += ["-" if name == "two_right" else interval(ours - first, "+.3f")]
        print(" | ".join([title, *cells]))


def draw_band(ax, curves: list[pd.Series], title: str) -> None:
    """The mean of the seeds, and a band from the lowest to the highest.

    The curves need not have the same places on the x axis.
    """
    places = np.linspace(0, min(curve.index.max() for curve in curves), 200)
    table = np.array([np.interp(places, curve.index, curve) for curve in curves])
    [line] = ax.plot(places, table.mean(0), label=title)
    colour = line.get_color()
    ax.fill_between(places, table.min(0), table.max(0), color=colour, alpha=0.15, linewidth=0)


def accuracy_by_tokens(run: Path) -> pd.Series:
    accuracies = accuracies_of(run).rolling(3, min_periods=1).mean()
    tokens = read_metrics(run).drawn_tokens.cumsum() / 1000
    places = np.interp(accuracies.index, [0, *tokens.index], [0, *tokens])
    return pd.Series(accuracies.to_numpy(), index=places)


def draw(panels: dict, out: Path) -> None:
    """panels: {title: (name of the x axis, {label: curves})}."""
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 5.5), layout="constrained")
        for ax, (title, (x_name, settings)) in zip(figure.subplots(1, len(panels)), panels.items()):
            ax.set(title=title, xlabel=x_name)
            for label, curves in settings.items():
                draw_band(ax, curves, label)
            scale(ax)
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)
        figure.savefig(out, dpi=100)


def draw_all(folder: Path, out: Path) -> None:
    """Writes OUT/teacher.png and OUT/two_rewards.png."""
    panels = {}
    for name, task in (("countdown", "Countdown"), ("chain", "chains")):
        curves = {}
        for setting, title in TITLES.items():
            runs = runs_of(folder / name / setting).values()
            curves[title] = [accuracy_by_tokens(run) for run in runs]
        title = f"{task}: held-out accuracy, mean of three evaluations"
        panels[title] = ("thousand tokens drawn for training", curves)
    draw(panels, out / "teacher.png")
    panels = {}
    for reward in ("right", "short"):
        curves = {}
        for setting, title in REWARDS.items():
            runs = runs_of(folder / "rewards" / setting).values()
            tables = [read_metrics(run)[f"reward_{reward}"] for run in runs]
            curves[title.strip("`")] = [x.rolling(3, min_periods=1).mean() for x in tables]
        panels[f"reward_{reward}, mean of three steps"] = ("step", curves)
    draw(panels, out / "two_rewards.png")


def main(folder: Path, pictures: Path | None) -> None:
    print_laboratory(folder / "countdown", 0)
    print_later(folder / "countdown", 24)
    print_laboratory(folder / "chain", 1)
    print_rates(folder / "countdown")
    print_pairs(folder)
    print_rewards(folder / "rewards")
    if pictures:
        draw_all(folder, pictures)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the unpacked archive")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures, too")
    args = parser.parse_args()
    try:
        main(args.folder, args.pictures)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
