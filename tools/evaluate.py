"""Evaluates a finished run: `python tools/evaluate.py RUN [FLAGS]`, then prints pass@k.

It starts `train.py --eval_only true` with the policy, the variants and the flags of the run, and
with FLAGS of train.py, such as --eval_n 16. The results are in RUN/evaluation, or in --run_dir.
"""

import json
import math
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from nanoorz.flags import flags_of
from nanoorz.variants import kept_files
from tools.runs import read_lines, run_folder

# Flags that an evaluation does not need, or that have another value in it.
NOT_TAKEN = {"model", "critic", "data", "run_dir", "resume", "variant", "log_with", "attention"}
# train.py has no fixed default for these.
ALWAYS = {"eval_temperature", "eval_top_p"}


def words_of_run(run: Path) -> list[str]:
    """The command line of train.py that evaluates the policy of the run."""
    config = json.loads((run / "config.json").read_text())
    words = ["--variant", *kept_files(run, config["variants"])]
    for name, default in flags_of(train.parse_flags(words)).items():
        value = config[name]
        if name in ALWAYS or (name not in NOT_TAKEN and value != default):
            words += [f"--{name}", *value] if isinstance(value, list) else [f"--{name}={value}"]
    words += ["--eval_only", "true", "--model", str(run / "policy")]
    return [*words, "--run_dir", str(run / "evaluation")]


def pass_at_k(right: pd.Series, n: int, k: int) -> float:
    """The probability that k samples of a problem hold a right one, estimated as in 2107.03374,
    eq. 1. right: the number of right samples among the n samples of each problem."""
    missed = [math.comb(n - count, k) / math.comb(n, k) for count in right]
    return 1 - sum(missed) / len(missed)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="the folder of a run")
    parser.add_argument("flags", nargs=REMAINDER, metavar="FLAGS", help="flags of train.py")
    args = parser.parse_args()
    words = [*words_of_run(args.run), *args.flags]
    if code := subprocess.call([sys.executable, train.__file__, *words]):
        sys.exit(code)
    cfg = train.parse_flags(words)
    samples = pd.DataFrame(read_lines(Path(cfg.run_dir, "eval_samples.jsonl")))
    for name, found in samples.groupby("set"):
        right = (found.reward >= 1).groupby(found.problem).sum()
        for k in range(1, cfg.eval_n + 1):
            print(f"{name}: pass@{k} {pass_at_k(right, cfg.eval_n, k):.3f}")
