"""Prints the tables of docs/lab.md that come from recorded runs.

    mkdir -p out/runs && tar xf studies/runs.tar.xz -C out/runs
    python studies/findings.py out/runs [--picture docs/chain.png]

critic/: whether the critic pays, and what it sees. chain/: what breaks a run. teacher/: a teacher,
and two rewards. Brackets have 95 % intervals: Student's t of a mean, or of a mean difference
between runs of one seed, and Wilson's of a share.

The table of what the critic sees needs samples token by token. They are too large for the archive,
so it has tries.csv of five runs. This writes the file into each run:

    echo 'ppo_tokens: --log_samples 0 --log_tokens 256' > tokens.txt
    python tools/lab.py tokens.txt --seeds 5
    python studies/findings.py --tries out/lab/ppo_tokens/seed?
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import runs
from tools.runs import Run

Setting = dict[int, Run]  # runs by seed


def row(*cells) -> None:
    print(" | ".join(map(str, cells)))


def pick(setting: Setting, seeds) -> Setting:
    return {seed: run for seed, run in setting.items() if seed in seeds}


def with_seconds(setting: Setting, alone: Path) -> Setting:
    """The runs with the seconds of each step of another run, which was alone on the machine."""
    seconds = runs.read_metrics(alone / "seed1").seconds.cumsum()
    found = {}
    for seed, run in setting.items():
        evaluations = run.evaluations[run.evaluations.step <= seconds.index.max()].copy()
        evaluations["seconds"] = np.interp(evaluations.step, [0, *seconds.index], [0, *seconds])
        found[seed] = run._replace(evaluations=evaluations)
    return found


def print_differences(title: str, settings: dict[str, Setting], pairs: list, axes: list) -> None:
    """The differences of pairs of settings at equal steps, tokens or seconds."""
    row(f"\n{title}", *[f"same {axis}" for axis in axes], "seeds")
    for name, other in pairs:
        ours = pick(settings[name], settings[other])
        theirs = pick(settings[other], settings[name])
        differences = [runs.differences(ours, theirs, axis) for axis in axes]
        row(f"{name} minus {other}", *[runs.mean_text(x, "+.3f") for x in differences], len(ours))


# ---- critic/ -------------------------------------------------------------------------------------

PPO_PAIRS = [("lambda_95", "ppo"), ("lambda_90", "ppo"), ("lambda_80", "ppo"), ("ppo_warm", "ppo")]
OTHERS = [("ppo", "grpo_72_steps"), ("ppo", "reinforce_72_steps")]
OTHERS += [("lambda_95", "grpo_72_steps"), ("lambda_95", "reinforce_72_steps")]
OTHERS += [("lambda_95", "rloo_72_steps"), ("lambda_95_single", "reinforce_single")]
OTHERS += [("lambda_95_long", "reinforce_long"), ("lambda_95_long", "grpo_long")]
COLUMNS = ["before", "before the verdict", "behind it"]


def print_pays(folder: Path) -> None:
    names = {name for pair in PPO_PAIRS + OTHERS for name in pair}
    settings = {name: runs.read_setting(folder / name) for name in names}
    print_differences("PPO minus PPO", settings, PPO_PAIRS, ["step", "tokens"])
    for name in {name for pair in OTHERS for name in pair}:
        # A step of RLOO does the work of a step of GRPO.
        alone = folder / "alone" / name.replace("rloo", "grpo")
        settings[name] = with_seconds(settings[name], alone)
    print_differences("PPO minus others", settings, OTHERS, ["step", "tokens", "seconds"])


def read_tries(sample: dict) -> list[tuple]:
    """(kind, value before the try, before its verdict, behind it) of each whole try of a response.

    A try is a+b=c, five tokens, and the next token is its verdict. The value before a token is that
    of the token: the critic has seen all tokens before.
    """
    tokens, values = sample["tokens"], sample["values"]
    numbers, target = sample["label"]["numbers"], sample["label"]["target"]
    found = []
    seen = set()
    for k in range(5, len(tokens) - 1):
        first, sign, second, equals, _ = tokens[k - 5 : k]
        is_try = equals == "=" and sign in ("+", "-", "*") and tokens[k] in ("<", ">", "!")
        if not (is_try and first.isdigit() and second.isdigit()):
            continue
        a, b = int(first), int(second)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        is_hit = result == target and a != b and a in numbers and b in numbers
        # 3+2 repeats 2+3, and 3-2 does not repeat 2-3.
        key = (sign, a, b) if sign == "-" else (sign, min(a, b), max(a, b))
        kind = "repeated try" if key in seen else "new miss"
        if tokens[k] == "!":
            kind = "true hit" if is_hit else "false claim"
        elif is_hit:
            kind = "overlooked hit"
        seen.add(key)
        found.append((kind, values[k - 5], values[k], values[k + 1]))
    return found


def write_tries(run: Path) -> None:
    """Writes how many tries of each kind steps 26 to 40 have, and their mean values."""
    samples = [x for x in runs.read_lines(run / "samples.jsonl") if x["step"] > 25]
    tries = [x for sample in samples if "values" in sample for x in read_tries(sample)]
    if not tries:
        runs.refuse(f"{run} has no values of tokens; --help says how a run logs them")
    kinds = pd.DataFrame(tries, columns=["kind", *COLUMNS]).groupby("kind")
    kinds.mean().assign(number=kinds.size()).to_csv(run / "tries.csv", float_format="%.4f")


def print_tries(folder: Path) -> None:
    tables = pd.concat([pd.read_csv(path) for path in folder.glob("seed*/tries.csv")])
    row("\ntry, steps 26 to 40", "number", *COLUMNS)
    for kind, table in tables.groupby("kind"):
        texts = [runs.mean_text(table[column], ".2f") for column in COLUMNS]
        row(kind, f"{table.number.sum():,}", *texts)


# ---- chain/ --------------------------------------------------------------------------------------

BASE = 0.32  # the accuracy of the base model, a mean over the first evaluations of 20 seeds
RATES = (1, 2, 4, 6, 8, 16)  # the learning rate of the policy times 10,000
ESTIMATORS = ["ppo", "lambda_95", "lambda_90", "zero_values", "grpo", "rloo", "reinforce"]
# Settings at 8e-4.
BREAKS = ["grpo_8", "blame_right", "blame_random", "blame_none", "blame_unsure", "blame_wrong"]
BREAKS += ["positive", "samples_64", "max_norm", "warmup", "kl_loss", "kl_penalty", "clip"]
BREAKS += ["dr_grpo", "entropy", "no_whitening", "l80", "l50"]
BREAKS += ["first_100", "first_95", "first_80", "first_50", "first_50_silent"]
# Settings at 4e-4, the best rate. The seeds 11 to 20 judge them.
BEST = ["ppo_4", "lambda_95_4", "zero_values_4", "grpo_4", "reinforce_4", "positive_4"]
PAIRS = [("lambda_95_4", "zero_values_4"), ("lambda_95_4", "grpo_4")]
PAIRS += [("lambda_95_4", "reinforce_4"), ("zero_values_4", "grpo_4")]
PAIRS += [("positive_4", "reinforce_4")]


def read_chain(folder: Path) -> Setting:
    """The evaluations of a setting by seed. Most runs of the chains have no other numbers."""
    setting = {}
    for path in folder.glob("seed*"):
        [table] = runs.read_evaluations(path).values()
        run = Run(pd.DataFrame(), table.reset_index(), "eval")
        setting[int(path.name.removeprefix("seed"))] = run
    return setting


def summarise(settings: dict[str, Setting]) -> pd.DataFrame:
    """A row for each setting and seed. The accuracy is the mean of the last three evaluations."""
    rows = []
    for name, setting in settings.items():
        for seed, run in setting.items():
            curve = run.evaluations.set_index("step").accuracy
            start, last = curve[0], curve.iloc[-1]
            is_broken = last < max(start, curve.max() / 2)
            has_collapsed = last < BASE / 2
            accuracy = curve.tail(3).mean()
            rows.append((name, seed, start, curve[15], accuracy, is_broken, has_collapsed))
    columns = ["name", "seed", "start", "at_15", "accuracy", "broken", "collapsed"]
    return pd.DataFrame(rows, columns=columns).set_index(["name", "seed"]).sort_index()


def wilson(flags: pd.Series) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z, total, share = 1.959964, len(flags), flags.mean()
    centre = share + z**2 / (2 * total)
    margin = z * np.sqrt(share * (1 - share) / total + (z / 2 / total) ** 2)
    scale = 1 + z**2 / total
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def share_text(flags: pd.Series) -> str:
    low, high = wilson(flags)
    return f"{flags.sum()} of {len(flags)} [{low:.2f}, {high:.2f}]"


def print_rates(table: pd.DataFrame) -> None:
    row("\nbroken runs", *[f"{rate}e-4" for rate in RATES])
    for name in ESTIMATORS:
        row(name, *[share_text(table.loc[f"{name}_{rate}"].broken) for rate in RATES])
    names = [[f"{name}_{rate}" for name in ESTIMATORS] for rate in RATES]
    row("all", *[share_text(table.loc[found].broken) for found in names])


def print_settings(table: pd.DataFrame, names: list[str], first: int, last: int) -> None:
    """first, last: of the seeds."""
    row(f"\nseeds {first} to {last}", "broken", "collapsed", "accuracy", "at step 15")
    for name in names:
        found = table.loc[name].loc[first:last]
        texts = [runs.mean_text(found.accuracy), runs.mean_text(found.at_15)]
        row(name, share_text(found.broken), found.collapsed.sum(), *texts)


def print_values(folder: Path) -> None:
    """The archive has the responses of steps 46 to 60 with eight letters, and the critic's values.

    A wrong last letter does not count, because no verdict follows.
    """
    titles = ["explained variance, steps 1 to 15", "46 to 60"]
    row("\nruns", *titles, "value before the first wrong letter", "behind it", "a letter later")
    for name in ("sees", "sees_silent"):
        paths = sorted((folder / name).glob("seed*"))
        explained = [runs.read_metrics(path).explained_variance for path in paths]
        texts = [runs.mean_text(x[:15].mean() for x in explained)]
        texts += [runs.mean_text(x[45:].mean() for x in explained)]
        found = []
        for sample in [x for path in paths for x in runs.read_lines(path / "samples.jsonl")]:
            before, *letters = [sample["label"]["letters"][0], *sample["parts"][::2]]
            for place, letter in enumerate(letters[:7]):
                if letter != sample["label"]["after"][before]:
                    found.append(dict(enumerate(sample["values"][place : place + 3])))
                    break
                before = letter
        row(name, *texts, *[f"{value:.2f}" for value in pd.DataFrame(found).mean()])


def print_chain(folder: Path, picture: Path | None) -> None:
    names = [f"{name}_{rate}" for name in ESTIMATORS for rate in RATES]
    names += [*BREAKS, "kl_loss_03", "kl_loss_1", "l50_4", "positive_4", "positive_16"]
    settings = {name: read_chain(folder / name) for name in names}
    table = summarise(settings)
    starts = table.start
    print(f"\nthe base model has {starts.min():.2f} to {starts.max():.2f} in one evaluation")
    print_rates(table)
    print_settings(table, BREAKS, 3, 10)
    print_settings(table, ["l50_4", "positive_16"], 1, 10)
    print_settings(table, ["kl_loss_03", "kl_loss_1", *BEST], 11, 20)
    print_differences("seeds 1 to 20", settings, PAIRS, ["step"])
    judged = {name: pick(settings[name], range(11, 21)) for name in BEST}
    print_differences("seeds 11 to 20", judged, PAIRS, ["step"])
    for name in BEST:
        judged[name] = with_seconds(read_chain(folder / "longer" / name), folder / "alone" / name)
    print_differences("seeds 11 to 20", judged, PAIRS, ["seconds"])
    print_values(folder)
    if picture:
        draw(table, picture)


def print_countdown(folder: Path) -> None:
    """Countdown with 16 samples a step."""
    settings = {path.name: read_chain(path) for path in sorted(folder.iterdir())}
    print_settings(summarise(settings), list(settings), 1, 5)
    pairs = [("lambda_95_1", "grpo_1"), ("lambda_95_1", "positive_1")]
    pairs += [("lambda_95_2", "grpo_2"), ("lambda_95_2", "positive_2")]
    print_differences("Countdown with 16 samples", settings, pairs, ["step"])


def draw(table: pd.DataFrame, out: Path) -> None:
    with rc_context(runs.STYLE):
        figure = Figure(figsize=(15, 7), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.set(title="Accuracy, mean of ten seeds", xlabel="learning rate / 1e-4", ylim=(0, 0.8))
        # At 16e-4 there are two seeds.
        rates = RATES[:-1]
        for name in ESTIMATORS:
            means = [table.loc[f"{name}_{rate}"].loc[1:10].accuracy.mean() for rate in rates]
            left.plot(rates, means, marker="o", label=name)
        left.legend(frameon=False)
        right.set(title="Share of broken runs at 8e-4", xlabel="bars: 95 % intervals", xlim=(0, 1))
        for name in reversed(BREAKS):
            flags = table.loc[name].loc[3:10].broken
            right.plot(wilson(flags), [name, name], "-", color=runs.GREY)
            right.plot(flags.mean(), name, "o", color=runs.BLUE, clip_on=False)
        figure.savefig(out)


# ---- teacher/ ------------------------------------------------------------------------------------


def reach_half(setting: Setting) -> pd.DataFrame:
    """The step and thousand tokens of each seed at an accuracy of 0.5. NaN: it is not reached.

    The accuracy is the mean of three evaluations in a row.
    """
    ends = {}
    for seed, run in setting.items():
        means = run.evaluations.accuracy.rolling(3).mean()
        ends[seed] = run.evaluations.loc[means >= 0.5, ["step", "tokens"]].min()
    return pd.DataFrame(ends).T / [1, 1000]


def print_teacher(folder: Path, names: list[str], form: str) -> None:
    """Differences are to the first two settings. form: of thousand tokens."""
    others = [f"minus {name}" for name in names[:2]]
    title = "thousand tokens until 0.5"
    row(f"\n{folder.name}", title, "runs", *others, "steps", "last accuracy", others[0])
    settings = {name: runs.read_setting(folder / name) for name in names}
    ends = {name: reach_half(setting) for name, setting in settings.items()}
    for name, setting in settings.items():
        steps, tokens = ends[name].step, ends[name].tokens
        cells = [f"{tokens.mean():{form}} ({tokens.min():{form}} to {tokens.max():{form}})"]
        cells += [f"{tokens.count()} of {len(tokens)}"]
        for other in names[:2]:
            gaps = tokens - ends[other].tokens
            # A mean of the runs that reach 0.5 would say nothing about the others.
            cells.append("-" if gaps.isna().any() else runs.mean_text(gaps, f"+{form}"))
        cells += [f"{steps.min():.0f} to {steps.max():.0f}"]
        last = [run.evaluations.accuracy.tail(3).mean() for run in setting.values()]
        cells += [runs.mean_text(last)]
        gaps = runs.differences(setting, settings[names[0]], "step")
        row(name, *cells, runs.mean_text(gaps, "+.3f"))


def print_rewards(folder: Path) -> None:
    """The number of a run is the mean of its last three evaluations."""
    row("\ntwo rewards", "accuracy", "`short`, held out", "tokens, held out", "minus two_right")
    ends = {}
    for name in ("two_right", "two_sum", "two_gdpo"):
        tables = [runs.read_evaluations(path)["eval"] for path in sorted((folder / name).iterdir())]
        ends[name] = pd.DataFrame([table.tail(3).mean() for table in tables])
        texts = [runs.mean_text(ends[name].accuracy), runs.mean_text(ends[name].reward_short)]
        texts += [runs.mean_text(ends[name].length, ".1f")]
        gaps = ends[name].accuracy - ends["two_right"].accuracy
        row(name, *texts, runs.mean_text(gaps, "+.3f"))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="see above")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw docs/chain.png, too")
    parser.add_argument("--tries", action="store_true", help="write tries.csv into each FOLDER")
    args = parser.parse_args()
    if args.tries:
        for run in args.folders:
            write_tries(run)
        return
    folder = args.folders[0]
    if not (folder / "critic").is_dir():
        runs.refuse(f"{folder} has no folder critic; unpack studies/runs.tar.xz there")
    print_pays(folder / "critic")
    print_tries(folder / "critic" / "ppo_tokens")
    print_chain(folder / "chain", args.picture)
    print_countdown(folder / "chain" / "countdown_16")
    names = ["ppo_often", "grpo_often", "taught", "taught_half", "weakly", "weakly_half"]
    print_teacher(folder / "teacher" / "chain", names, ".1f")
    print_teacher(folder / "teacher" / "countdown", names[:3], ".0f")
    for rate in (4, 8):
        names = [f"ppo_rate_{rate}", f"taught_rate_{rate}"]
        print_teacher(folder / "teacher" / "countdown", names, ".0f")
    print_rewards(folder / "teacher" / "rewards")


if __name__ == "__main__":
    main()
