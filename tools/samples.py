"""Writes the samples of a run as one page to read, which needs no network.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]

The page is RUN/samples.html. It shows the samples of a problem side by side, and those of
evaluations before and after the training. It shades the tokens of a response by the critic's value,
by the value's change, by the sampler's log-prob, by the KL, and by the advantages of all estimators
of ppo.py. A run logs log-probs with --variant log_ratio, and the KL with log_ratio and log_kl. The
page begins with two responses to one problem: the wrong one of which the critic was surest at its
end, and a right one. Replies, which the policy has not drawn, are hatched and have no shade.

The page has at most N samples of a step and set. If the training samples have more than 20 MB,
every second step is left out, until they have less or one step is left. Model output is hostile. So
it is JSON with < escaped, and the page's policy forbids every script but its own.
"""

import base64
import hashlib
import itertools
import json
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo
from tools.runs import read_lines, run_folder

# It holds the words HASH and DATA, which are replaced, and one script.
PAGE = Path(__file__).with_name("samples.html")
MAX_BYTES = 20e6
# The page's name of an estimator: the estimator, and GAE's lambda.
SHOWN = {"PPO, lambda 1": ("gae", 1.0), "PPO, lambda 0.95": ("gae", 0.95)}
SHOWN |= {name.upper(): (name, 1.0) for name in ppo.ESTIMATORS if name != "gae"}


def read_samples(path: Path, per_step: int) -> tuple[dict[str, dict[int, list[str]]], int]:
    """{set: {step: some of its samples as JSON}}, and the number of all samples of the file."""
    found = {}
    total = 0
    groups = itertools.groupby(read_lines(path), lambda row: (row["set"], row["step"]))
    for (name, step), group in groups:
        samples = list(group)
        total += len(samples)
        # Only the samples of a training step are paid.
        if "paid" in samples[0]:
            add_advantages(samples)
        # Samples with tokens come first, because they show most.
        samples.sort(key=lambda row: "tokens" not in row)
        found.setdefault(name, {})[step] = [to_text(row) for row in samples[:per_step]]
    return found, total


def add_advantages(samples: list[dict]) -> None:
    """Adds the field `estimates` to the samples of a step: {name: a number for each drawn token}.

    ppo.py computes them. It whitens over these samples, which may be fewer than those of the run.
    """
    for name, (estimator, lambd) in SHOWN.items():
        needs_critic = ppo.ESTIMATORS[estimator].needs_critic
        used = [row for row in samples if "values" in row or not needs_critic]
        if not used:
            continue
        ids = [[0] * row["length"] for row in used]
        groups = torch.tensor([row["problem"] for row in used])  # (N,)
        rewards = torch.tensor([row["paid"] for row in used], dtype=torch.float64)  # (N,)
        batch = ppo.Batch([[0]] * len(used), ids, groups, rewards, torch.device("cpu"), {}, [])
        if needs_critic:
            values = [x for row in used for x in row["values"]]
            batch.per_token["values"] = torch.tensor(values)  # (T,)
        ppo.compute_advantages(batch, ppo.Recipe(estimator=estimator, lambd=lambd))
        for row, advantages in zip(used, batch.split(batch.per_token["advantages"])):
            # The page shades tokens alone.
            if "tokens" in row:
                row.setdefault("estimates", {})[name] = advantages.tolist()


def to_text(row: dict) -> str:
    """A sample as the JSON of the page, with its KL, and with three digits of each number."""
    if "logprobs" in row and "ref_logprobs" in row:
        ratios = [q - p for p, q in zip(row["logprobs"], row["ref_logprobs"])]
        row["kl"] = [math.expm1(ratio) - ratio for ratio in ratios]
    rounded = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.3g}"))
    return escape(rounded)


def escape(value) -> str:
    """JSON that cannot close the script element in which it stands."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def thin_out(steps: list[list[str]]) -> list[str]:
    """The samples of all steps, or of every second, fourth and so on, if they are too large."""
    while len(steps) > 1 and sum(len(text) for step in steps for text in step) > MAX_BYTES:
        # The last step stays.
        steps = steps[::-2][::-1]
    return sum(steps, [])


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: RUN/samples.html")
    text = "the most samples of a step and set; default: 64"
    parser.add_argument("--max_per_step", type=int, default=64, metavar="N", help=text)
    args = parser.parse_args()
    out = args.out or args.run / "samples.html"
    training, total = read_samples(args.run / "samples.jsonl", args.max_per_step)
    samples = thin_out([texts for steps in training.values() for texts in steps.values()])
    evaluations, count = read_samples(args.run / "eval_samples.jsonl", args.max_per_step)
    for steps in evaluations.values():
        for step in sorted({min(steps), max(steps)}):
            samples += steps[step]
    counts = f"{len(samples)} samples, {total + count - len(samples)} left out"
    title = escape(f"{args.run.resolve().name}: {counts}")
    page = PAGE.read_text(encoding="utf-8")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    policy = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = f'{{"title": {title}, "samples": [{",".join(samples)}]}}'
    # The data comes last, because it may hold the word HASH.
    page = page.replace("HASH", policy).replace("DATA", data)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        parser.error(f"--out: {error}")
    print(f"wrote {out}: {counts}")


if __name__ == "__main__":
    main()
