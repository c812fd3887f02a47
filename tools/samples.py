"""Writes the samples of a run as one page to read, which needs no network.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]     writes RUN/samples.html

The page shows the samples of a problem side by side: by step, and those of evaluations before and
after the training. Values, advantages or log-probs can shade the tokens. The page holds at most
5,000 training and 5,000 evaluation samples, 20 MB each, from steps spread evenly over the run. It
says how many samples are left out. Model output is hostile. So it is JSON with < escaped, the page
shows it as text, and the page's policy forbids every script but the page's own.
"""

import argparse
import base64
import contextlib
import hashlib
import json
from pathlib import Path

# It holds the words HASH and DATA, which are replaced, and one script.
PAGE = Path(__file__).with_name("samples.html")
# What a line that is no sample raises.
NO_SAMPLE = (ValueError, TypeError, KeyError, RecursionError, OverflowError)


def find(path: Path) -> dict[str, dict]:
    """Returns {set: {step: {problem: byte offsets of its samples}}} of a file, {} without a file.

    Lines that are no sample are left out. A run that was killed leaves half a line, for example.
    """
    found = {}
    if not path.is_file():
        return found
    start = 0
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(*NO_SAMPLE):
                row = json.loads(line)
                name = str(row["set"])
                step = int(row["step"])
                problem = str(row["problem"])
                problems = found.setdefault(name, {}).setdefault(step, {})
                problems.setdefault(problem, []).append(start)
            start += len(line)
    return found


def order(path: Path, per_step: int) -> tuple[list[int], int]:
    """The byte offsets of a file's samples, and the number of all samples.

    However many of the offsets are used, they are spread over the run: one problem of each step
    comes first (of the last step, the middle one, the quarters and so on), then another problem of
    each step. Of evaluations only the first step and the last one are kept.
    """
    queue = []
    total = 0
    for name, steps in find(path).items():
        for problems in steps.values():
            total += sum(len(offsets) for offsets in problems.values())
        kept = steps if name == "train" else {min(steps), max(steps)}
        for age, step in enumerate(sorted(kept, reverse=True)):
            # The bits of a count in reverse order halve the run again and again.
            turn = f"{age:020b}"[::-1]
            samples_of_step = []
            for number, offsets in enumerate(steps[step].values()):
                samples_of_step += [(number, turn, offset) for offset in offsets]
            queue += samples_of_step[:per_step]
    return [offset for _, _, offset in sorted(queue)], total


def null(constant: str) -> None:
    """Stands for NaN and infinity, which Python's JSON has and a browser refuses."""


def embed(path: Path, per_step: int, max_samples: int, max_bytes: int) -> tuple[list[str], int]:
    """The chosen samples as JSON that may stand in a page, in the file's order.

    The second value is how many are left out.
    """
    offsets, total = order(path, per_step)
    if not offsets:
        return [], total
    chosen = {}
    with path.open("rb") as file:
        for offset in offsets[:max_samples]:
            file.seek(offset)
            row = json.loads(file.readline(), parse_constant=null)
            text = escape(row)
            max_bytes -= len(text)
            if max_bytes < 0:
                break
            chosen[offset] = text
    texts = [chosen[offset] for offset in sorted(chosen)]
    return texts, total - len(texts)


def escape(value) -> str:
    """JSON that cannot close the script element in which it stands."""
    return json.dumps(value).replace("<", "\\u003c")


def write(run: Path, out: Path, per_step: int = 64) -> None:
    """Writes the page of a run folder. A file that is absent counts as empty."""
    samples = []
    left_out = 0
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        texts, more = embed(run / name, per_step, 5_000, 20_000_000)
        samples += texts
        left_out += more
    counts = f"{len(samples)} samples, {left_out} left out"
    title = escape(f"{run.resolve().name}: {counts}")
    page = PAGE.read_text(encoding="utf-8")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = hashlib.sha256(script.encode()).digest()
    policy = "sha256-" + base64.b64encode(digest).decode()
    data = f'{{"title": {title}, "samples": [{",".join(samples)}]}}'
    # The data comes last, because it may hold the word HASH.
    out.write_text(page.replace("HASH", policy).replace("DATA", data), encoding="utf-8")
    print(f"wrote {out}: {counts}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max_per_step", type=int, default=64)
    args = parser.parse_args()
    out = args.out or args.run / "samples.html"
    if not args.run.is_dir() or not out.parent.is_dir():
        parser.error("RUN and the folder of --out must be there")
    write(args.run, out, args.max_per_step)


if __name__ == "__main__":
    main()
