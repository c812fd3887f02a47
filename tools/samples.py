"""Writes the samples of a run as one page to read, which needs no network.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]     writes RUN/samples.html

The page shows the samples of a problem side by side: by step, and those of evaluations before and
after the training. Values, advantages or log-probs can shade the tokens. The page holds at most N
samples of a step and set (default: 64), and at most 5,000 training and 5,000 evaluation samples, 20
MB each, from steps spread evenly over the run. It says how many samples are left out. Model output
is hostile. So it is JSON with < escaped, and the page's policy forbids every script but its own.
"""

import base64
import hashlib
import json
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.runs import describe, read_lines

# It holds the words HASH and DATA, which are replaced, and one script.
PAGE = Path(__file__).with_name("samples.html")
# The limits for each of the two files.
MAX_SAMPLES, MAX_BYTES = 5_000, 20_000_000


def read_samples(path: Path, per_step: int) -> tuple[dict[str, dict[int, list[str]]], int]:
    """{set: {step: its first samples as JSON}}, and the number of all samples of the file."""
    found, total = {}, 0
    for row in read_lines(path):
        if "set" in row and isinstance(row.get("step"), int):
            texts = found.setdefault(str(row["set"]), {}).setdefault(row["step"], [])
            total += 1
            if len(texts) < per_step:
                texts.append(escape(row))
    return found, total


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
    return json.dumps(value).replace("<", "\\u003c")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: RUN/samples.html")
    most = "the most samples of a step and set; default: 64"
    parser.add_argument("--max_per_step", type=int, default=64, metavar="N", help=most)
    args = parser.parse_args()
    out = args.out or args.run / "samples.html"
    samples, total = [], 0
    try:
        if args.max_per_step < 1:
            raise ValueError(f"--max_per_step {args.max_per_step}: give 1 or a larger number")
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
