"""Writes the samples of a run as one page to read, which needs no network.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]

The page is RUN/samples.html. It shows the samples of a problem side by side: by step, and those of
evaluations before and after the training. It shades the tokens of a response by the critic's value,
by the value's change, by the sampler's log-prob, by the KL, and by the advantages of all estimators
of ppo.py. It begins with two responses to one problem: the wrong one of which the critic was surest
at its end, and a right one. It says what the run has not logged. Replies, which the policy has not
drawn, are hatched and have no shade.

The page holds at most N samples of a step and set (default: 64), and at most 5,000 training and
5,000 evaluation samples, 20 MB each, from steps spread evenly over the run. It says how many
samples are left out. Model output is hostile. So it is JSON with < escaped, and the page's policy
forbids every script but its own.
"""

import base64
import hashlib
import itertools
import json
import math
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo
from tools.runs import describe, read_lines

# It holds the words HASH and DATA, which are replaced, and one script.
PAGE = Path(__file__).with_name("samples.html")
MAX_SAMPLES, MAX_BYTES = 5_000, 20e6  # of each of the two files
# The page's name of an estimator: the estimator, and GAE's lambda.
SHOWN = {"PPO, lambda 1": ("gae", 1.0), "PPO, lambda 0.95": ("gae", 0.95)}
SHOWN |= {name.upper(): (name, 1.0) for name in ppo.ESTIMATORS if name != "gae"}


def read_samples(path: Path, per_step: int) -> tuple[dict[str, dict[int, list[str]]], int]:
    """{set: {step: some of its samples as JSON}}, and the number of all samples of the file."""
    found = {}
    total = 0
    rows = (row for row in read_lines(path) if "set" in row and isinstance(row.get("step"), int))
    for (name, step), group in itertools.groupby(rows, lambda row: (str(row["set"]), row["step"])):
        samples = list(group)
        total += len(samples)
        if name == "train":
            add_advantages(samples)
        # Those with tokens show most.
        samples.sort(key=lambda row: "tokens" not in row)
        texts = found.setdefault(name, {}).setdefault(step, [])
        texts += [escape(shorten(row)) for row in samples[: per_step - len(texts)]]
    return found, total


def add_advantages(samples: list[dict]) -> None:
    """Adds the field `estimates` to the samples of a step: {name: one number, or one a token}.

    ppo.py computes them. It whitens over these samples, which may be fewer than those of the run.
    """
    for name, (estimator, lambd) in SHOWN.items():
        needs_critic = ppo.ESTIMATORS[estimator].needs_critic
        used = [row for row in samples if is_whole(row, needs_critic)]
        if used:
            number = {problem: k for k, problem in enumerate({row["problem"] for row in used})}
            groups = torch.tensor([number[row["problem"]] for row in used])  # (N,)
            rewards = torch.tensor([row["paid"] for row in used], dtype=torch.float64)  # (N,)
            ids = [[0] * row["length"] for row in used]
            cpu = torch.device("cpu")
            batch = ppo.Batch([[0]] * len(used), ids, groups, rewards, cpu, {}, [])
            if needs_critic:
                values = [x for row in used for x in row["values"]]
                batch.per_token["values"] = torch.tensor(values)  # (T,)
            ppo.compute_advantages(batch, ppo.Recipe(estimator=estimator, lambd=lambd))
            for row, part in zip(used, batch.split(batch.per_token["advantages"])):
                is_one = bool((part == part[0]).all())
                found = part[0].item() if is_one else part.tolist()
                row.setdefault("estimates", {})[name] = found


def is_whole(row: dict, needs_critic: bool) -> bool:
    """Has the sample what an estimator needs?"""
    length, paid, values = row.get("length"), row.get("paid"), row.get("values")
    numbers = [paid, *values] if needs_critic and isinstance(values, list) else [paid]
    return (
        isinstance(length, int)
        and 0 < length < 1e6
        and isinstance(row.get("problem"), int | str)
        and all(is_number(x) for x in numbers)
        and (not needs_critic or len(numbers) == length + 1)
    )


def is_number(x) -> bool:
    return isinstance(x, int | float) and abs(x) < 1e30


def shorten(row: dict) -> dict:
    """The sample as the page needs it: with three digits, and without what the page can compute."""
    logprobs, reference = row.get("logprobs"), row.pop("ref_logprobs", None)
    pair = (logprobs, reference)
    if all(isinstance(x, list) and all(map(is_number, x)) for x in pair):
        ratios = [min(b - a, 30.0) for a, b in zip(logprobs, reference)]
        row["kl"] = [math.expm1(x) - x for x in ratios]
    row.pop("returns", None)
    return json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.3g}"))


def choose(found: dict[str, dict[int, list[str]]], per_step: int) -> list[str]:
    """The samples of all steps of training, and of the first and last evaluation.

    If these samples are too many, the page has fewer steps, and then fewer samples of a step.
    """
    steps = {}
    for name, by_step in found.items():
        steps[name] = sorted(by_step if name == "train" else {min(by_step), max(by_step)})
    while True:
        texts = []
        for name, kept in steps.items():
            texts += [text for step in kept for text in found[name][step][:per_step]]
        if len(texts) <= MAX_SAMPLES and sum(map(len, texts)) <= MAX_BYTES:
            return texts
        if max(map(len, steps.values())) > 2:
            # Every second step is left out. The last step stays.
            steps = {name: kept[::-2][::-1] for name, kept in steps.items()}
        else:
            per_step //= 2


def escape(value) -> str:
    """JSON that cannot close the script element in which it stands."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: RUN/samples.html")
    text = "the most samples of a step and set; default: 64"
    parser.add_argument("--max_per_step", type=int, default=64, metavar="N", help=text)
    args = parser.parse_args()
    out = args.out or args.run / "samples.html"
    samples, total = [], 0
    try:
        if args.max_per_step < 1:
            raise ValueError(f"--max_per_step {args.max_per_step}: give a number above 0")
        for name in ("samples.jsonl", "eval_samples.jsonl"):
            found, count = read_samples(args.run / name, args.max_per_step)
            samples += choose(found, args.max_per_step)
            total += count
        if not samples:
            raise ValueError(f"{args.run} has no samples.jsonl with a sample; name a run folder")
        counts = f"{len(samples)} samples, {total - len(samples)} left out"
        title = escape(f"{args.run.resolve().name}: {counts}")
        page = PAGE.read_text(encoding="utf-8")
        script = page.rpartition("<script>")[2].partition("</script>")[0]
        policy = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        data = f'{{"title": {title}, "samples": [{",".join(samples)}]}}'
        # The data comes last, because it may hold the word HASH.
        out.write_text(page.replace("HASH", policy).replace("DATA", data), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {describe(error, out)}; no page is written\n")
    print(f"wrote {out}: {counts}; at most {args.max_per_step} of a step (--max_per_step)")


if __name__ == "__main__":
    main()
