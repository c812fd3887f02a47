"""Reads a run's metrics and names what looks wrong: `python tools/doctor.py RUN`.

It prints a line for each step that has a sign, and says so if there is none. What the numbers mean
stands in docs/metrics.md.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lib.common import UserError


def health(line: dict, norms: list[float]) -> list[str]:
    """What looks wrong with a step, in words. norms: the gradient norms of the steps before."""
    signs = []
    if line["truncated"] > 0.3:
        signs.append(f"{line['truncated']:.0%} of the responses are truncated")
    entropy = line.get("entropy", 1.0)
    if entropy < 0.02 and line["reward"] < 0.9:
        signs.append(f"entropy {entropy:.3f} has collapsed")
    # Where nearly all rewards are equal there is little to explain.
    if line.get("explained_variance", 0.0) < 0 and 0.05 < line["reward"] < 0.95:
        signs.append("the critic explains less than a constant would")
    norm = line["policy_grad_norm"]
    if len(norms) > 5 and norm > 10 * statistics.median(norms[-20:]):
        usual = statistics.median(norms[-20:])
        signs.append(f"gradient norm {norm:.2g}, usually {usual:.2g}")
    # The mean ratio says nothing: it is 1 for any two distributions.
    apart = line.get("approx_kl", 0.0)
    if apart > 0.02:
        signs.append(f"sampler and trainer differ: KL {apart:.3f}")
    return signs


def examine(lines: list[dict]) -> dict[int, list[str]]:
    """{step: its signs} of the lines of a metrics.jsonl, without the steps that have none."""
    found = {}
    norms = []
    for line in lines:
        signs = health(line, norms)
        if signs:
            found[line["step"]] = signs
        # The norm is 0 where no step was taken.
        if line["policy_grad_norm"] > 0:
            norms.append(line["policy_grad_norm"])
    return found


def read_metrics(run: Path) -> list[dict]:
    """Raises UserError where there is none, or where a line is broken."""
    path = run / "metrics.jsonl"
    try:
        lines = [json.loads(text) for text in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; give the folder of a run") from error
    if not lines:
        raise UserError(f"{path}: no step is in it yet")
    return lines


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1:
            raise UserError("usage: python tools/doctor.py RUN")
        lines = read_metrics(Path(argv[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = examine(lines)
    for step, signs in found.items():
        print(f"step {step}: {'; '.join(signs)}")
    if not found:
        print(f"nothing looks wrong in {len(lines)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
