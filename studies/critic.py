"""Makes the figure and the table of docs/critic.md.

    echo 'ppo_tokens: --log_samples 0 --log_tokens 256' > tokens.txt
    python tools/lab.py tokens.txt --seeds 5
    python studies/critic.py out/lab/ppo_tokens/seed?

It writes docs/critic.png and prints the table. A run must have logged all samples token by token
(--log_samples 0 --log_tokens 256). A response of the laboratory is a list of tries: a+b=c, and a
verdict. The value before a try is that of its first token, the value before the verdict that of the
verdict, and the value behind it that of the next token. So the critic has seen all tokens that
stand before.
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
from tools.compare import limit_of_t
from tools.runs import COLOURS, STYLE, read_lines

KINDS = ("new miss", "repeated try", "overlooked hit", "true hit", "false claim")
SPANS = ((1, 5), (6, 15), (16, 25), (26, 40))  # steps, the first and the last
LONGEST = 63  # tokens of a response
TRY = 7  # tokens of a try, with its newline


def read_tries(row: dict) -> list[tuple]:
    """(kind, number, value before the try, before the verdict, behind it) of each whole try."""
    tokens, values = row["tokens"], row["values"]
    numbers, target = row["label"]["numbers"], row["label"]["target"]
    found = []
    seen = set()
    for k in range(5, len(tokens) - 1):
        first, sign, second, equals, _ = tokens[k - 5 : k]
        is_try = tokens[k] in ("<", ">", "!") and equals == "=" and sign in ("+", "-", "*")
        if not (is_try and first.isdigit() and second.isdigit()):
            continue
        a, b = int(first), int(second)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        is_hit = result == target and a != b and a in numbers and b in numbers
        key = (sign, a, b) if sign == "-" else (sign, min(a, b), max(a, b))
        if tokens[k] == "!":
            kind = "true hit" if is_hit else "false claim"
        elif is_hit:
            kind = "overlooked hit"
        else:
            kind = "repeated try" if key in seen else "new miss"
        found.append((kind, len(found), *(values[i] for i in (k - 5, k, k + 1))))
        seen.add(key)
    return found


def span_of(step: int) -> int:
    return next(i for i, (_, last) in enumerate(SPANS) if step <= last or i == len(SPANS) - 1)


def interval(numbers: list[float], digits: int = 2) -> str:
    """The mean over seeds and its 95 % interval."""
    numbers = [x for x in numbers if np.isfinite(x)]
    text = f"{np.mean(numbers):.{digits}f}"
    if len(numbers) > 1:
        error = np.std(numbers, ddof=1) / len(numbers) ** 0.5
        text += f"±{error * limit_of_t(len(numbers)):.{digits}f}"
    return text


def explained(rewards: np.ndarray, values: np.ndarray) -> float:
    return 1 - np.var(rewards - values) / np.var(rewards)


def within_group_auc(rows: list[dict], position: int) -> float:
    """The share of pairs, a right and a wrong response to one problem in one step, in which the
    right one has the higher value at this token. Equal values count half."""
    groups = {}
    for row in rows:
        if row["length"] > position:
            groups.setdefault((row["step"], row["problem"]), []).append(row)
    wins = pairs = 0
    for group in groups.values():
        right = np.array([x["values"][position] for x in group if x["reward"] == 1])
        wrong = np.array([x["values"][position] for x in group if x["reward"] == 0])
        gaps = right[:, None] - wrong[None, :]
        wins += (gaps > 0).sum() + 0.5 * (gaps == 0).sum()
        pairs += gaps.size
    return wins / pairs if pairs > 50 else np.nan


def explained_by_the_group(rows: list[dict]) -> float:
    """What the mean reward of the problem's other samples explains. A critic could know as much."""
    groups = {}
    for row in rows:
        groups.setdefault((row["step"], row["problem"]), []).append(row["reward"])
    rewards = np.array(list(groups.values()))  # (groups, samples of a problem)
    others = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return explained(rewards, others)


def advantages_from_the_end(rows: list[dict], lambd: float) -> np.ndarray:
    """The mean advantage before whitening of right responses, by the distance to the last token."""
    rows = [row for row in rows if row["reward"] == 1]
    values = torch.zeros(len(rows), LONGEST, dtype=torch.float64)
    mask = torch.zeros(len(rows), LONGEST, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : row["length"]] = torch.tensor(row["values"], dtype=torch.float64)
        mask[i, : row["length"]] = True
    cfg = SimpleNamespace(gamma=1.0, lambd=lambd)
    rewards = torch.ones(len(rows), dtype=torch.float64)
    advantages = ppo.gae(rewards, values, mask, torch.zeros(len(rows)), cfg)
    means = []
    for distance in range(42):
        long = [i for i, row in enumerate(rows) if row["length"] > distance]
        ends = [rows[i]["length"] - 1 - distance for i in long]
        means.append(float(advantages[long, ends].mean()))
    return np.array(means)


def measure(path: Path) -> dict:
    """All numbers of one run."""
    rows = [row for row in read_lines(path / "samples.jsonl") if "values" in row]
    if {span_of(row["step"]) for row in rows} != set(range(len(SPANS))):
        told = "has no values of tokens in all 40 steps; train it by the commands of --help"
        raise UserError(f"{path} {told}")
    spans = [[row for row in rows if span_of(row["step"]) == i] for i in range(len(SPANS))]
    found = {"tries": [], "explained": [], "auc": []}
    found["group"] = [explained_by_the_group(span) for span in spans]
    for span in spans:
        found["tries"].append([x for row in span for x in read_tries(row)])
        by_position, auc = [], []
        for position in range(0, LONGEST, TRY):
            long = [row for row in span if row["length"] > position]
            rewards = np.array([row["reward"] for row in long])
            values = np.array([row["values"][position] for row in long])
            by_position.append(explained(rewards, values) if len(long) > 50 else np.nan)
            auc.append(within_group_auc(span, position))
        found["explained"].append(by_position)
        found["auc"].append(auc)
    lambdas = (1.0, 0.95, 0.9, 0.8)
    found["lambdas"] = {x: advantages_from_the_end(spans[2], x) for x in lambdas}
    return found


def above_new_misses(tries: list[tuple], kind: str, number_of) -> float:
    """The mean of this number over tries of the kind, minus that over new misses at the same place.

    Kinds differ in their places: repeated tries come late in a response.
    """
    gaps, weights = [], []
    for place in range(9):
        found = [[number_of(x) for x in tries if x[:2] == (k, place)] for k in (kind, "new miss")]
        if all(found):
            gaps.append(np.mean(found[0]) - np.mean(found[1]))
            weights.append(len(found[0]))
    return float(np.average(gaps, weights=weights)) if gaps else np.nan


def tell_table(runs: list[dict]) -> None:
    heads = [f"steps {first} to {last}" for first, last in SPANS]
    print("try |", " | ".join(heads))
    print("---|" * len(heads) + "---")
    for kind in KINDS:
        cells = []
        for i in range(len(SPANS)):
            mine = [[x for x in run["tries"][i] if x[0] == kind] for run in runs]
            means = [np.mean([x[2:] for x in tries], axis=0) for tries in mine if tries]  # (3,)
            values = " → ".join(interval(list(seeds)) for seeds in zip(*means))
            cells.append(f"{values} ({sum(map(len, mine))})")
        print(kind, "|", " | ".join(cells))
    for kind in KINDS[1:]:
        for name, number_of in (
            ("value before the verdict", lambda x: x[3]),
            ("change of the value", lambda x: x[4] - x[2]),
        ):
            spans = zip(*[run["tries"] for run in runs])
            cells = [[above_new_misses(x, kind, number_of) for x in span] for span in spans]
            print(f"{kind} minus new miss, {name} |", " | ".join(interval(x, 3) for x in cells))
    cells = [interval([run["group"][i] for run in runs]) for i in range(len(SPANS))]
    print("explained by the mean of the problem's other samples |", " | ".join(cells))
    for name in ("explained", "auc"):
        for position in (0, 7, 14, 28, 42):
            k = position // TRY
            cells = [interval([run[name][i][k] for run in runs]) for i in range(len(SPANS))]
            print(f"{name} at token {position} |", " | ".join(cells))
    for lambd in runs[0]["lambdas"]:
        means = np.mean([run["lambdas"][lambd] for run in runs], axis=0)
        print(
            f"lambda {lambd:g}: advantage 0, 7, ... tokens before the last", means[::TRY].round(2)
        )


def draw(runs: list[dict], out: Path) -> None:
    """Lines are means over seeds, and bands go from the lowest seed to the highest."""
    heads = [f"steps {first} to {last}" for first, last in SPANS]
    with rc_context(STYLE):
        figure = Figure(figsize=(15, 8.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        axes = figure.subplots(2, 2).flat

        ax = next(axes)
        ax.set(title="Change of the value at a try", xlabel="step; dashed: before the verdict")
        ax.set_ylim(-0.2, 1)
        middles = [(first + last) / 2 for first, last in SPANS]
        for kind, colour in zip(KINDS, COLOURS):
            curves = []
            for run in runs:
                tries = [[x[2:] for x in span if x[0] == kind] for span in run["tries"]]
                curves.append([np.mean(x, axis=0) if x else [np.nan] * 3 for x in tries])
            before, verdict, behind = np.moveaxis(curves, -1, 0)  # each (seeds, spans)
            plot(ax, middles, behind - before, kind, colour, marker="o")
            ax.plot(middles, np.nanmean(verdict - before, axis=0), "--", color=colour)
        ax.axhline(0, color="#999999", linewidth=0.8)

        for name, title in (
            ("explained", "Explained variance of the reward, at the start of each try"),
            ("auc", "Share of pairs of one problem: V of the right response is higher"),
        ):
            ax = next(axes)
            ax.set(title=title, xlabel="token of the response")
            for i, colour in enumerate(COLOURS[: len(SPANS)]):
                plot(ax, range(0, LONGEST, TRY), [run[name][i] for run in runs], heads[i], colour)
                if name == "explained":
                    group = np.mean([run["group"][i] for run in runs])
                    ax.plot([0, LONGEST - TRY], [group, group], "--", color=colour)
            if name == "explained":
                ax.set_ylim(-0.3, 0.3)
                ax.set_xlabel("token of the response; dashed: mean of the problem's other samples")
        ax.axhline(0.5, color="#999999", linewidth=0.8)
        ax.set_ylim(0.2, 0.8)

        ax = next(axes)
        ax.set(title=f"Advantage in right responses, {heads[2]}", xlabel="tokens before the last")
        for lambd, colour in zip(runs[0]["lambdas"], COLOURS):
            curves = [run["lambdas"][lambd] for run in runs]
            plot(ax, range(42), curves, f"lambda {lambd:g}", colour)
        ax.invert_xaxis()
        text = f"line: the mean of {len(runs)} seeds; band: from the lowest seed to the highest"
        figure.supxlabel(text, size=12)
        figure.savefig(out, dpi=100)


def plot(ax, xs, curves: list, label: str, colour: str, marker: str = "") -> None:
    curves = pd.DataFrame(curves)  # its mean, min and max leave out what is not known
    ax.plot(xs, curves.mean(), color=colour, linestyle="-", label=label, marker=marker)
    ax.fill_between(xs, curves.min(), curves.max(), color=colour, alpha=0.15, linewidth=0)
    ax.legend(frameon=False, fontsize=11)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="one run for each seed")
    try:
        runs = [measure(path) for path in parser.parse_args().runs]
    except (OSError, UserError) as error:
        parser.exit(2, f"error: {error}\n")
    tell_table(runs)
    draw(runs, Path(__file__).resolve().parent.parent / "docs" / "critic.png")


if __name__ == "__main__":
    main()
