"""Prints the tables of docs/chain.md, and draws its picture.

studies/chain_runs.tar.xz has the numbers of the runs:

    mkdir -p out/chain && tar xf studies/chain_runs.tar.xz -C out/chain
    python studies/chain.py out/chain

A setting's folder is NAME_RATE, where RATE is the learning rate of the policy times 10,000. The
accuracy of a run is the mean of its last three evaluations up to step 60. A run is broken if its
last evaluation up to step 60 is below the first one, of the base model, or below half of the run's
best one. It has collapsed if its last evaluation is below half of the base model's mean. Intervals
are 95 %: Student's t of a mean or of a mean difference over seeds, and Wilson's of a share.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo
from nanoorz.ranks import UserError
from studies.pays import with_seconds
from tools.compare import Run, compare, difference_text, limit_of_t, read_run
from tools.runs import BLACK, BLUE, GREEN, GREY, RED, STYLE, read_lines, read_metrics

STEPS = 60
RATES = (1, 2, 4, 6, 8, 16)
CALM = (1, 2, 4)  # the rates at which few runs break
BASE = 0.32  # the accuracy of the base model, a mean over the first evaluations of 20 seeds
ESTIMATORS = {
    "ppo": "PPO, lambda 1",
    "l95": "PPO, lambda 0.95",
    "zero": "lambda 0.95, values of 0",
    "l90": "PPO, lambda 0.9",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "REINFORCE",
}
TITLES = ESTIMATORS | {"positive": "`positive`"}
PAIRS = [("l95", "zero"), ("l95", "grpo"), ("l95", "rloo"), ("l95", "reinforce"), ("l95", "ppo")]
PAIRS += [("l90", "l95"), ("ppo", "grpo"), ("ppo", "reinforce"), ("zero", "grpo")]
PAIRS += [("zero", "reinforce"), ("positive", "reinforce")]
SILENT = ["ppo", "l95", "zero", "grpo", "reinforce"]  # they have runs without the verdict
# Settings at the rate 8e-4. docs/exercises/chain_breaks.txt has most of them.
ALREADY_RUN = ["grpo_8", "l95_8"]
CAUSES = ["blame_right", "blame_random", "blame_none", "blame_unsure", "blame_wrong", "positive"]
CAUSES += ["positive_problems", "reinforce_problems"]
BREAKS = ["samples_64"]
BREAKS += ["max_norm", "warmup", "kl_loss", "kl_penalty", "clip", "dr_grpo", "entropy"]
BREAKS += ["no_whitening", "l80", "l50", "zero_50", "first_100", "first_95", "first_80"]
BREAKS += ["first_50", "first_50_silent"]
MORE = ["positive_16", "l80_4", "l50_4", "zero_50_4", "l80_6", "l50_6"]
LATER = ["kl_loss_03", "kl_loss_1", "frozen_8"]
# The seeds that choose a rate, those that judge it, and those that the exploration did not see.
CHOOSING, JUDGING, UNSEEN = range(1, 11), range(11, 21), range(3, 11)


def accuracy(run: Run, steps: int = STEPS) -> float:
    return evaluations_up_to(run, steps).tail(3).mean()


def evaluations_up_to(run: Run, steps: int | None) -> pd.Series:
    """The accuracies. steps: the last one that counts. None: that of the run."""
    return run.evaluations.accuracy[run.evaluations.step <= (steps or 1e9)]


def is_broken(run: Run, steps: int | None = STEPS) -> bool:
    accuracies = evaluations_up_to(run, steps)
    return bool(accuracies.iloc[-1] < max(accuracies.iloc[0], accuracies.max() / 2))


def has_collapsed(run: Run, steps: int) -> bool:
    return bool(evaluations_up_to(run, steps).iloc[-1] < BASE / 2)


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    share = count / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    margin = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + (z / 2 / total) ** 2)
    return max(0.0, centre - margin), min(1.0, centre + margin)


def mean_text(numbers) -> str:
    """A mean with its interval."""
    numbers = pd.Series(list(numbers), dtype=float)
    text = f"{numbers.mean():.3f}"
    if len(numbers) > 1:
        margin = numbers.sem() * limit_of_t(len(numbers))
        text += f" [{numbers.mean() - margin:.3f}, {numbers.mean() + margin:.3f}]"
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


def runs_by_rate(settings: dict, name: str) -> dict[int, dict[int, Run]]:
    """{rate: the runs of NAME_RATE by seed}."""
    return {rate: settings[key] for rate in RATES if (key := f"{name}_{rate}") in settings}


def up_to(runs: dict[int, Run], steps: int = STEPS) -> dict[int, Run]:
    """The runs without later evaluations."""
    return {
        seed: run._replace(evaluations=run.evaluations[run.evaluations.step <= steps])
        for seed, run in runs.items()
    }


def best_rate(runs_of: dict[int, dict[int, Run]]) -> int:
    """The rate with the highest mean accuracy of the choosing seeds."""
    means = {
        rate: np.mean([accuracy(run) for seed, run in runs.items() if seed in CHOOSING])
        for rate, runs in runs_of.items()
    }
    return max(means, key=means.get)


def pick(runs: dict[int, Run], seeds) -> dict[int, Run]:
    return {seed: run for seed, run in runs.items() if seed in seeds}


def print_counts(settings: dict) -> None:
    runs = [(run, last_step(name)) for name, found in settings.items() for run in found.values()]
    broken = [pair for pair in runs if is_broken(*pair)]
    collapsed = sum(has_collapsed(*pair) for pair in broken)
    print(f"{len(broken)} of {len(runs)} runs are broken, and {collapsed} of them have collapsed")
    starts = [run.evaluations.accuracy.iloc[0] for run, _ in runs]
    print(f"the base model has {min(starts):.2f} to {max(starts):.2f} in one evaluation\n")


def print_rates(settings: dict) -> None:
    """The accuracy of the choosing seeds at each rate, and the broken runs of all seeds."""
    # From 6e-4 on a mean is that of broken runs and others.
    row("accuracy", *(f"{rate}e-4" for rate in CALM))
    row("---", *("---" for _ in CALM))
    for name, title in ESTIMATORS.items():
        runs_of = runs_by_rate(settings, name)
        chosen = [pick(runs_of[rate], CHOOSING).values() for rate in CALM]
        row(title, *(mean_text(map(accuracy, runs)) for runs in chosen))
    print()
    row("broken runs", *(f"{rate}e-4" for rate in RATES))
    row("---", *("---" for _ in RATES))
    flags = {rate: [] for rate in RATES}
    for name, title in ESTIMATORS.items():
        texts = []
        for rate, runs in runs_by_rate(settings, name).items():
            broken = [*map(is_broken, runs.values())]
            flags[rate] += broken
            # At 6e-4 about half of the runs break.
            texts.append(share_text(broken) if rate == 6 else f"{sum(broken)} of {len(broken)}")
        row(title, *texts)
    row("all", *map(share_text, flags.values()))
    print()


def print_best(settings: dict, alone: dict) -> None:
    """The judging seeds at each estimator's best rate."""
    rates = {name: best_rate(runs_by_rate(settings, name)) for name in ESTIMATORS}
    for name, rate in rates.items():
        print(f"the best rate of {ESTIMATORS[name]} is {rate}e-4")
    folders = {name: f"{name}_{rate}" for name, rate in rates.items()}
    folders |= {"zero": "zero_long", "positive": "positive_long"}
    best = {}
    for name, folder in folders.items():
        # The seconds of a step do not depend on the rate.
        time = (alone.get(folder) or alone[f"{name}_4"])[1]
        runs = pick(settings[folder], JUDGING)
        best[name] = {seed: with_seconds(run, time) for seed, run in runs.items()}
    print()
    row("estimator", "equal samples", "broken", "equal seconds", "broken at the end")
    row(*["---"] * 5)
    longest = best["ppo"]
    for name, runs in best.items():
        texts = [mean_text(map(accuracy, runs.values())), share_text(map(is_broken, runs.values()))]
        texts += [mean_text(compare(runs, longest, "seconds")["accuracies"])]
        texts += [share_text(is_broken(run, None) for run in runs.values())]
        row(TITLES[name], *texts)
    print()
    row("difference", "equal samples", "equal seconds", "equal samples, seeds 1 to 20")
    row(*["---"] * 4)
    for name, other in PAIRS:
        ours, theirs = best[name], best[other]
        texts = [difference_text(compare(up_to(ours), up_to(theirs), "step"))]
        texts += [difference_text(compare(ours, theirs, "seconds"))]
        # The first 60 steps of positive_long are those of a run with 60 steps.
        names = [f"{x}_long" if x == "positive" else f"{x}_4" for x in (name, other)]
        ours, theirs = (up_to(settings[x]) for x in names)
        is_whole = len(ours) == len(theirs) == 20
        texts += [difference_text(compare(ours, theirs, "step")) if is_whole else "-"]
        row(f"{TITLES[name]}, minus {TITLES[other]}", *texts)
    print()


def print_silent(settings: dict) -> None:
    """Runs at 4e-4 without the verdict, beside those with it."""
    told = {name: up_to(pick(settings[f"{name}_4"], CHOOSING)) for name in SILENT}
    silent = {name: settings[f"{name}_4_silent"] for name in SILENT}
    row("estimator", "with the verdict", "without", "difference", "broken without")
    row(*["---"] * 5)
    for name in SILENT:
        texts = [mean_text(map(accuracy, runs[name].values())) for runs in (told, silent)]
        texts += [difference_text(compare(silent[name], told[name], "step"))]
        row(ESTIMATORS[name], *texts, share_text(map(is_broken, silent[name].values())))
    print()


def print_settings(settings: dict, names, seeds, first=False) -> None:
    """Broken runs and accuracy of settings. first: adds the accuracy at step 15."""
    columns = ["setting", "broken", "collapsed", "accuracy"]
    columns += ["at step 15"] * first
    row(*columns)
    row(*["---"] * len(columns))
    for name in names:
        runs = pick(settings[name], seeds).values()
        steps = last_step(name)
        broken = share_text(is_broken(run, steps) for run in runs)
        collapsed = sum(has_collapsed(run, steps) for run in runs)
        texts = [mean_text(accuracy(run, steps) for run in runs)]
        texts += [mean_text(evaluations_up_to(run, 15).iloc[-1] for run in runs)] * first
        row(f"`{name}`", broken, collapsed, *texts)
    print()


def print_signs(settings: dict, folder: Path) -> None:
    """How many runs show each sign: a mean of three steps, beside that of the first three steps."""
    signs = {
        "`policy_grad_norm` has doubled": lambda now, start: (
            now.policy_grad_norm > 2 * start.policy_grad_norm
        ),
        "`reward` has halved": lambda now, start: now.reward < start.reward / 2,
        "`wrong` has doubled": lambda now, start: now.wrong > 2 * start.wrong,
        "`entropy` is above 1.2 of the start": lambda now, start: now.entropy > 1.2 * start.entropy,
        "`stutter` is above 0.2": lambda now, start: now.stutter > 0.2,
        "`entropy` is below half of the start": lambda now, start: now.entropy < start.entropy / 2,
    }
    row("sign", "8e-4, broken", "median step", "6e-4, broken", "6e-4, others", "4e-4, others")
    row(*["---"] * 6)
    groups = [(8, True), (6, True), (6, False), (4, False)]
    for sign, is_there in signs.items():
        steps = {group: [] for group in groups}
        for rate in (4, 6, 8):
            for name in ("ppo", "l95", "grpo", "rloo", "reinforce"):
                for seed, run in settings[f"{name}_{rate}"].items():
                    path = folder / f"{name}_{rate}" / f"seed{seed}"
                    if (path / "metrics.jsonl").exists():
                        steps[rate, is_broken(run)].append(first_step(read_metrics(path), is_there))
        texts = [share_text(step is not None for step in steps[group]) for group in groups]
        shown = [step for step in steps[8, True] if step]
        row(sign, texts[0], f"{np.median(shown):.0f}", *texts[1:])
    print()


def first_step(table: pd.DataFrame, is_there) -> int | None:
    """The first step that shows a sign, or None."""
    start = table.head(3).mean()
    # A step without a gradient has no entropy.
    means = table[table.index <= STEPS].rolling(3, min_periods=2).mean()
    there = is_there(means[means.index > 3], start)
    return there.idxmax() if there.any() else None


def print_countdown(settings: dict) -> None:
    rates = (1, 2, 4, 8)
    row("estimator", *(f"{rate}e-4" for rate in rates))
    row("---", *("---" for _ in rates))
    for name in ("grpo", "l95", "positive"):
        texts = []
        for rate in rates:
            runs = settings[f"{name}_{rate}"].values()
            broken = [is_broken(run) for run in runs]
            texts.append(f"{mean_text(map(accuracy, runs))}, {sum(broken)} of {len(broken)}")
        row(TITLES[name], *texts)
    print()
    row("difference", *(f"{rate}e-4" for rate in CALM[:2]))
    row(*["---"] * 3)
    for name, other in (("l95", "grpo"), ("l95", "positive"), ("positive", "grpo")):
        pairs = [(settings[f"{name}_{x}"], settings[f"{other}_{x}"]) for x in CALM[:2]]
        texts = [difference_text(compare(*pair, "step")) for pair in pairs]
        row(f"{TITLES[name]}, minus {TITLES[other]}", *texts)
    print()


def last_step(name: str) -> int:
    """Runs with a head start of the critic have 60 more steps."""
    return 120 if name.startswith("first") else STEPS


def read_conversations(folder: Path) -> list[dict]:
    """The samples of the last 15 steps whose letters are eight, with the critic's values."""
    lines = [x for path in sorted(folder.glob("seed*/samples.jsonl")) for x in read_lines(path)]
    # A response of one turn has no parts.
    lines = [x for x in lines if x["step"] > 45 and "parts" in x]
    return [x for x in lines if len(x["values"]) == len(x["parts"][::2]) == 8]


def first_error(sample: dict) -> int | None:
    """The place of the first wrong letter that is not the last letter, or None."""
    at = sample["label"]["letters"][0]
    for place, letter in enumerate(sample["parts"][:-1:2]):
        if sample["label"]["after"][at] != letter:
            return place
        at = letter
    return None


def values_around_an_error(samples: list[dict]) -> pd.Series:
    """The mean value before the letter at each distance from the first wrong one."""
    found = {}
    for sample in samples:
        if (place := first_error(sample)) is not None:
            for k, value in enumerate(sample["values"]):
                found.setdefault(k - place, []).append(value)
    return pd.Series({k: np.mean(found[k]) for k in sorted(found) if -4 <= k <= 4})


def print_values(folder: Path) -> None:
    """What the critic explains and sees in the runs that log all samples."""
    row(
        "runs",
        "explained variance, steps 1 to 15",
        "46 to 60",
        "value",
        "behind it",
        "a letter later",
    )
    row(*["---"] * 6)
    for name, title in (("sees", "with the verdict"), ("sees_silent", "without the verdict")):
        tables = [read_metrics(path) for path in sorted((folder / name).glob("seed*"))]
        explained = [table.explained_variance for table in tables]
        texts = [mean_text(x[x.index <= 15].mean() for x in explained)]
        texts += [mean_text(x[x.index > 45].mean() for x in explained)]
        values = values_around_an_error(read_conversations(folder / name))
        row(title, *texts, *(f"{values[k]:.2f}" for k in (0, 1, 2)))
    print()


def advantages(sample: dict, lambd: float) -> list[float]:
    """Of each letter, before whitening."""
    values = torch.tensor([sample["values"]], dtype=torch.float64)
    rewards = torch.tensor([sample["reward"]], dtype=torch.float64)
    mask = torch.ones_like(values, dtype=torch.bool)
    cfg = SimpleNamespace(gamma=1.0, lambd=lambd)
    return ppo.gae(rewards, values, mask, torch.zeros(1), cfg)[0].tolist()


def draw(settings: dict, folder: Path, out: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 9.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        rates, breaks, one, mean = figure.subplots(2, 2).flat
        draw_rates(rates, settings)
        draw_breaks(breaks, settings)
        told = read_conversations(folder / "sees")
        draw_conversation(
            one, next(x for x in told if first_error(x) in (2, 3) and not x["reward"])
        )
        mean.set(title="Mean value around the first wrong letter, steps 46 to 60")
        mean.set(xlabel="letters after the wrong one; its verdict comes before letter 1")
        for samples, label in (
            (told, "with the verdict"),
            (read_conversations(folder / "sees_silent"), "without the verdict"),
        ):
            values = values_around_an_error(samples)
            mean.plot(values.index, values, marker="o", label=label)
        mean.legend(frameon=False)
        figure.savefig(out, dpi=100)


def draw_rates(ax, settings: dict) -> None:
    ax.set(
        title="Accuracy, a mean of steps 30, 45 and 60, ten seeds", xlabel="learning rate / 1e-4"
    )
    for name, title in ESTIMATORS.items():
        runs_of = {
            x: pick(runs, CHOOSING) for x, runs in runs_by_rate(settings, name).items() if x < 16
        }
        means = [np.mean([accuracy(run) for run in runs.values()]) for runs in runs_of.values()]
        ax.plot(list(runs_of), means, marker="o", label=title)
    ax.set_ylim(0, 0.8)
    ax.legend(frameon=False, fontsize=11, ncols=2)


def draw_breaks(ax, settings: dict) -> None:
    ax.set(
        title="Share of broken runs at the rate 8e-4, eight seeds",
        xlabel="95 % intervals; red: more than half",
    )
    names = [*ALREADY_RUN, *CAUSES, *BREAKS][::-1]
    for place, name in enumerate(names):
        flags = [is_broken(x, last_step(name)) for x in pick(settings[name], UNSEEN).values()]
        low, high = wilson(sum(flags), len(flags))
        ax.plot([low, high], [place, place], color=GREY, linestyle="-")
        ax.plot(
            np.mean(flags), place, "o", color=RED if np.mean(flags) > 0.5 else BLUE, clip_on=False
        )
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_xlim(0, 1)


def draw_conversation(ax, sample: dict) -> None:
    ax.set(title=f"One response to {sample['question']}")
    turns, replies = sample["parts"][::2], [*sample["parts"][1::2], " "]
    ax.set_xticks(range(8), [turn + reply for turn, reply in zip(turns, replies)])
    ax.set_xlabel("a letter and its reply; the value is that before the letter")
    ax.plot(sample["values"], "o-", color=BLACK, label="value")
    for lambd, colour in ((1.0, BLUE), (0.95, RED), (0.5, GREEN)):
        label = f"advantage before whitening, lambda {lambd:g}"
        ax.plot(advantages(sample, lambd), "s--", color=colour, label=label)
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.legend(frameon=False, fontsize=11)


def main(folder: Path, picture: Path | None) -> None:
    settings = read_runs(folder)
    alone = read_runs(folder / "alone")
    print_counts(settings)
    print_rates(settings)
    print_settings(settings, ["grpo_8", *CAUSES], UNSEEN, first=True)
    print_signs(settings, folder)
    print_settings(settings, [*ALREADY_RUN, *BREAKS], UNSEEN)
    print_settings(settings, LATER, JUDGING)
    print_best(settings, alone)
    print_silent(settings)
    print_settings(settings, MORE, CHOOSING)
    print_values(folder)
    print_countdown(read_runs(folder / "countdown_16"))
    if picture:
        draw(settings, folder, picture)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the settings' folders")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the picture, too")
    args = parser.parse_args()
    try:
        main(args.folder, args.picture)
    except (ArithmeticError, LookupError, StopIteration) as error:
        told = f"{args.folder} lacks runs ({type(error).__name__}: {error})"
        parser.exit(2, f"error: {told}; unpack the archive there\n")
    except (OSError, ValueError, UserError) as error:
        parser.exit(2, f"error: {error}\n")
