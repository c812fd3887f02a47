"""Compares settings over seeds: a table of what differs, and a picture with bands.

    python tools/compare.py BASELINE SETTING ... --out PATH     PATH.md, PATH.json and PATH.png
    python tools/compare.py RUN                                 says what one run has learnt

The folder of a setting holds its finished runs, seed1, seed2 and so on, as tools/lab.py makes them.
Accuracy is that on the first evaluation set. It is compared at equal steps and at equal numbers of
response tokens: at the most that all runs of a setting and of the baseline have reached,
interpolated between two evaluations. The picture has room for eight settings.
"""

import argparse
import json
import math
from operator import itemgetter
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

PANELS = {
    "reward": "Training reward",
    "accuracy": "Held-out accuracy, over thousand tokens",
    "response_length": "Response length, tokens",
    "entropy": "Entropy, nats per token",
    "truncated": "Truncated responses, share",
    "tokens": "Response tokens so far, thousands",
}
# The last columns of the table; the first three are means over the end of a run.
NUMBERS = {
    "response_length": "{:.1f}",
    "truncated": "{:.2f}",
    "entropy": "{:.2f}",
    "seconds": "{:.0f}",
    "seeds": "{}",
}
AT_THE_END = ("response_length", "truncated", "entropy")
COLOURS = ["#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5539"]
STYLE = {
    "text.parse_math": False,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "grid.color": "#ececec",
}
COLUMNS = ["setting", "accuracy by steps", "difference", "accuracy by tokens", "difference"]
COLUMNS += ["length", "truncated", "entropy", "seconds", "seeds"]
LEGEND = """
Accuracy on held-out problems is the mean over seeds, with their range, at so many steps or response
tokens. A difference is that to the baseline's run of the same seed: mean ± standard error over
seeds, with a * where it is more than twice its error. With three seeds chance alone gives a * to 18
of 100 settings that do not differ, with five to 12. Length (tokens), truncated and entropy are
means over the last tenth of the training steps. The seconds are those of all training steps.
"""


def read_lines(path: Path) -> list[dict]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def read_runs(folder: Path, seeds: int | None) -> dict[int, dict]:
    """The curves of a setting's finished runs by seed; all seeds, or 1 to that number."""
    runs = {}
    for path in folder.glob("seed*/result.json"):
        run = path.parent
        seed = int(run.name.removeprefix("seed"))
        if seeds is None or seed <= seeds:
            runs[seed] = read_run(run)
    return dict(sorted(runs.items()))


def read_run(run: Path) -> dict[str, np.ndarray]:
    """Returns curves by name: over S steps, and over E evaluations those that start with eval_."""
    lines = read_lines(run / "metrics.jsonl")
    curves = {name: column(lines, name) for name in ("step", "seconds", "reward", *AT_THE_END)}
    curves["tokens"] = np.cumsum([count_tokens(line) for line in lines])  # (S,)
    lines = read_lines(run / "eval.jsonl")
    first_set = lines[0]["set"]
    lines = [line for line in lines if line["set"] == first_set]
    curves["accuracy"] = column(lines, "accuracy")  # (E,)
    curves["eval_step"] = column(lines, "step")  # (E,)
    steps = [0, *curves["step"]]
    tokens = [0, *curves["tokens"]]
    curves["eval_tokens"] = np.interp(curves["eval_step"], steps, tokens)  # (E,)
    return curves


def column(lines: list[dict], name: str) -> np.ndarray:
    return np.array([line.get(name, math.nan) for line in lines])  # (S,)


def count_tokens(line: dict) -> float:
    """Response tokens of a step. The line tells the number of samples, which a lever may lower."""
    samples = line["tokens_per_second"] * line["seconds"] / line["total_length"]
    return round(samples) * line["response_length"]


# ---- the table -----------------------------------------------------------------------------------


def make_row(name: str, runs: dict[int, dict], baseline: dict[int, dict]) -> dict:
    """The numbers of a setting."""
    row = {"setting": name, "seeds": list(runs)}
    for axis in ("eval_step", "eval_tokens"):
        row[axis] = compare(runs, baseline, axis)
    for curve in AT_THE_END:
        ends = [last_tenth(run[curve]) for run in runs.values()]
        row[curve] = float(np.mean(ends))
    seconds = [run["seconds"].sum() for run in runs.values()]
    row["seconds"] = float(np.mean(seconds))
    return row


def last_tenth(values: np.ndarray) -> float:
    count = max(1, len(values) // 10)
    return values[-count:].mean()


def compare(runs: dict[int, dict], baseline: dict[int, dict], axis: str) -> dict:
    """Accuracies where the shortest run of both ends on this axis, and their paired differences.

    The difference is a mean over the seeds that both have, None for the baseline itself; its
    standard error is None where fewer than two are paired.
    """
    ends = [run[axis][-1] for run in [*runs.values(), *baseline.values()]]
    at = float(min(ends))
    ours = {seed: accuracy_at(run, axis, at) for seed, run in runs.items()}
    theirs = {seed: accuracy_at(run, axis, at) for seed, run in baseline.items()}
    cell = {"at": at, "accuracies": list(ours.values())}
    cell |= {"difference": None, "error": None, "differs": False}
    if runs is baseline:
        return cell
    pairs = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    if pairs:
        cell["difference"] = float(np.mean(pairs))
    if len(pairs) > 1:
        cell["error"] = float(np.std(pairs, ddof=1)) / math.sqrt(len(pairs))
        cell["differs"] = abs(cell["difference"]) > 2 * cell["error"]
    return cell


def accuracy_at(run: dict, axis: str, at: float) -> float:
    return float(np.interp(at, run[axis], run["accuracy"]))


def describe(cell: dict) -> list[str]:
    """The texts of two columns, accuracy and difference."""
    accuracies = cell["accuracies"]
    mean = sum(accuracies) / len(accuracies)
    spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
    difference = "-"
    if cell["difference"] is not None:
        difference = f"{cell['difference']:+.3f}"
    if cell["error"] is not None:
        difference += f" ± {cell['error']:.3f}"
    if cell["differs"]:
        difference += " *"
    return [f"{mean:.3f} ({spread}) at {cell['at']:,.0f}", difference]


def make_table(rows: list[dict]) -> str:
    """The rows as a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in rows:
        cells = [row["setting"], *describe(row["eval_step"]), *describe(row["eval_tokens"])]
        cells += [form.format(row[name]) for name, form in NUMBERS.items()]
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- the picture ---------------------------------------------------------------------------------


def draw(settings: dict[str, dict], path: Path) -> None:
    """Six panels. A setting is a line, the mean over its seeds, in a band from least to most."""
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        axes = figure.subplots(2, 3).flat
        for ax, (curve, title) in zip(axes, PANELS.items()):
            ax.set_title(title)
            for colour, (name, runs) in zip(COLOURS, settings.items()):
                x, y = points(list(runs.values()), curve)
                ax.plot(x, y.mean(0), color=colour, linewidth=2, label=name)
                ax.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
        lines, names = ax.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside upper center", ncols=8, frameon=False)
        figure.savefig(path, dpi=100)


def points(runs: list[dict], curve: str):
    """What to draw of N runs: x (S,) and y (N, S), or as many evaluations."""
    y = np.array([run[curve] for run in runs])  # (N, S)
    x = runs[0]["step"]  # (S,)
    if curve == "accuracy":
        tokens = [run["eval_tokens"] for run in runs]
        return np.mean(tokens, axis=0) / 1000, y
    if curve == "tokens":
        return x, y / 1000
    # A centred mean over a twentieth of the run, which shrinks at both ends.
    window = np.ones(2 * (len(x) // 40) + 1)
    weights = np.convolve(np.ones(len(x)), window, "same")  # (S,)
    sums = [np.convolve(row, window, "same") for row in y]
    return x, np.array(sums) / weights


def show_run(run: Path) -> None:
    """Prints what a run has learnt: held-out numbers, and a problem that it solves only now."""
    before, *_, after = read_lines(run / "eval.jsonl")
    for key in ("accuracy", "length", "truncated"):
        print(f"held out: {key} {before[key]:.3f} -> {after[key]:.3f}")
    first = {}
    last = {}
    for answer in read_lines(run / "eval_samples.jsonl"):
        first.setdefault(answer["problem"], answer)
        last[answer["problem"]] = answer
    learnt = []
    for answer in last.values():
        if answer["reward"] > first[answer["problem"]]["reward"]:
            learnt.append(answer)
    # The longest search says most.
    learnt.sort(key=itemgetter("length"))
    for answer in learnt[-1:]:
        print(f"before: {describe_answer(first[answer['problem']])}")
        print(f"after:  {describe_answer(answer)}")


def describe_answer(answer: dict) -> str:
    tries = "   ".join(answer["response"].split("\n"))
    return f"{answer['question']}:   {tries}"


def read_settings(folders: list[Path], seeds: int | None, shown: list[str]) -> dict[str, dict]:
    """The runs of each setting that has finished ones, by name. Raises ValueError."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names) or not set(shown) <= set(names):
        raise ValueError("two folders have one name, or --show names none of them")
    settings = {}
    for folder in folders:
        runs = read_runs(folder, seeds)
        if runs:
            settings[folder.name] = runs
        else:
            print(f"{folder.name} has no finished run, and is left out")
    if names[0] not in settings:
        raise ValueError(f"{folders[0]}: the baseline has no finished run, seed1, seed2 and so on")
    return settings


def compare_all(settings: dict[str, dict], shown: list[str], out: str) -> None:
    """Writes and prints the table, and draws. The first setting is the baseline."""
    baseline, *_ = settings.values()
    rows = [make_row(name, runs, baseline) for name, runs in settings.items()]
    table = make_table(rows)
    print(table)
    Path(f"{out}.md").write_text(table + LEGEND)
    Path(f"{out}.json").write_text(json.dumps(rows, indent=1))
    names = [name for name in settings if name in (shown or settings)]
    drawn = {name: settings[name] for name in names[: len(COLOURS)]}
    draw(drawn, Path(f"{out}.png"))
    for name in names[len(COLOURS) :]:
        print(f"{name}: no room in the picture; choose settings by --show")
    print(f"the table, its numbers and the picture: {out}.md, {out}.json, {out}.png")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", default="comparison")
    parser.add_argument("--seeds", type=int, help="compare seeds 1 to this; absent: all there are")
    parser.add_argument(
        "--show", nargs="+", default=[], metavar="NAME", help="settings in the picture"
    )
    args = parser.parse_args()
    try:
        if (args.folders[0] / "eval.jsonl").exists():
            return show_run(args.folders[0])
        settings = read_settings(args.folders, args.seeds, args.show)
        compare_all(settings, args.show, args.out)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        parser.exit(2, f"error: {error.filename}: {error.strerror}\n")


if __name__ == "__main__":
    main()
