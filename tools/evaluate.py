"""Evaluates a model on sets of problems, with the sampler and the grader alone.

    python tools/evaluate.py MODEL --data FILE [FILE ...] [--n 16] [--out FOLDER] [FLAGS]

MODEL is a folder, such as RUN/policy, or a name of the Hugging Face hub. --n is the number of
samples of each problem. The samples are drawn at --temperature 1 and --top_p 1 if nothing else is
given. --greedy takes the likeliest tokens. FLAGS are train.py's; `python train.py --help` explains
them. With the same flags, train.py finds the same numbers before its first step.

FOLDER is out/evaluate if none is given. FOLDER gets result.json, eval_samples.jsonl with every
response, and run.log. Under `accelerate launch` the ranks share the samples.
"""

import argparse
import json
import math
import os
import re
import sys
from pathlib import Path

# This must be set before torch is imported, because OpenMP threads that spin slow the graders.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import torch.distributed as dist

import ckpt
import train
from lib import check, metrics, report
from lib.common import Stopped, UserError, print0, start_distributed, tell_once
from lib.signals import Signals
from rollout import Rollout


def read_flags(argv: list[str]) -> train.Config:
    """Reads the flags of this file, and those of train.py. Raises UserError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error = train.refuse_flag
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--n", default=1, type=int)
    # train.py has a temperature and a top_p of training, which are other flags.
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--temperature", default=1.0, type=float)
    one_of.add_argument("--greedy", action="store_const", dest="temperature", const=0.0)
    parser.add_argument("--top_p", default=1.0, type=float)
    parser.add_argument("--out", default="out/evaluate", metavar="FOLDER")
    args, others = parser.parse_known_args(argv)
    for path in args.data:
        file, _ = train.parse_path(path)
        # A data set of the hub has a name such as openai/gsm8k.
        is_file = re.search(r"^[/.]|\.(jsonl?|csv|parquet)$", file)
        check.require(not is_file or Path(file).exists(), f"--data {file}: no such file")
    own = ["--model", args.model, "--eval_n", args.n, "--run_dir", args.out]
    own += ["--data", *args.data, "--eval_data", *args.data]
    own += ["--eval_temperature", args.temperature, "--eval_top_p", args.top_p]
    cfg = train.parse_flags([*map(str, own), *others])
    is_useful = cfg.eval_temperature > 0 or cfg.eval_n == 1
    check.require(is_useful, f"--n {cfg.eval_n}: all greedy responses are alike, so draw 1")
    return cfg


class Results:
    """train.evaluate gets it as the run's log. All ranks keep the numbers."""

    def __init__(self, cfg: train.Config):
        self.cfg = cfg
        self.sets, self.remarks, self.samples = [], [], []

    def evaluation(self, name: str, samples: list, step: int) -> None:
        numbers = metrics.of_evaluation(samples, self.cfg.eval_n)
        numbers |= pass_rates(samples, self.cfg.eval_n)
        self.sets.append({"step": step, "set": name} | numbers)
        self.samples += [report.describe(sample, step, name) for sample in samples]
        if not any(sample.answer for sample in samples):
            text = report.no_answers(samples[:: self.cfg.eval_n], self.cfg)
            self.remarks.append(f"{name}: {text}")

    def write(self, folder: Path) -> None:
        """Replaces the files of an earlier evaluation."""
        result = {"sets": self.sets, "remarks": self.remarks, "config": vars(self.cfg)}
        result |= {"world": dist.get_world_size(), "wall_seconds": metrics.since_start()}
        result |= {"versions": report.versions()}
        lines = "".join(json.dumps(sample) + "\n" for sample in self.samples)
        (folder / "eval_samples.jsonl").write_text(lines, encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(result, indent=1))


def pass_rates(samples: list, n: int) -> dict[str, float]:
    """{"pass@k": ...} for k = 1, 2, 4, ... and n. samples: n of each problem, in their order.

    pass@k is the probability that k of the n samples of a problem hold a right one. The unbiased
    estimate for c right samples is 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).
    """
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    right = (rewards > 0).sum(1)  # (problems,)
    line = {}
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        missed = [math.comb(n - c, k) / math.comb(n, k) for c in right]
        line[f"pass@{k}"] = 1 - np.mean(missed)
    return line


def main(cfg: train.Config, world: int, store) -> None:
    """One rank of an evaluation. Raises UserError and Stopped."""
    # Only training reads these two. So an evaluation takes any number of ranks and any length.
    cfg.rollout_batch_size *= world
    cfg.packing_max_len = cfg.max_len
    values = {f"--{name}": value for name, value in vars(cfg).items()}
    # The machines may have these files in different folders.
    check.require_same(values | {"--run_dir": None, "--variant": cfg.variants.hashes})
    check.check_config(cfg, world, train.ppo.ESTIMATORS)
    folder = Path(cfg.run_dir).absolute()
    # A run that was killed before its first checkpoint has metrics already.
    is_run = ckpt.checkpoints(folder) or (folder / "metrics.jsonl").exists()
    check.require(not is_run, f"--out {folder} holds a training run; choose another folder")
    lock = ckpt.claim(folder, needed_bytes=0)  # noqa: F841
    report.redirect_libraries(folder / "run.log")

    task, tokenizer = train.find_inputs(cfg)
    eval_sets = train.prepare_eval_sets(task, cfg, tokenizer)
    results = Results(cfg)
    rollout = Rollout(task, Signals(store), cfg)
    try:
        train.evaluate(rollout, eval_sets, 0, results)
    finally:
        rollout.grader.close()
    if dist.get_rank() == 0:
        results.write(folder)
    table = pd.DataFrame(results.sets).drop(columns="step")
    texts = [table.to_string(index=False, float_format="%.3f"), *results.remarks]
    print0("\n".join([*texts, f"all files are in {folder}"]))


def run(argv: list[str]) -> int:
    """The exit code: 0, 2 for what the user can mend, 1 after a signal."""
    store = None
    try:
        cfg = read_flags(argv)
        _, world, _, store = start_distributed()
        with cfg.variants.installed(train.modules_to_wrap()):
            main(cfg, world, store)
        return 0
    except (UserError, Stopped) as error:
        if isinstance(error, Stopped) and not error.fault:
            tell_once(store, "stopped: an evaluation saves nothing, so start it again")
            return 1
        # Errors name the flags of train.py, which have other names here.
        text = re.sub(r"--eval_(?=n\b|temperature|top_p|data)", "--", str(error))
        text = text.replace("--run_dir", "--out").replace("--model, --critic", "MODEL")
        tell_once(store, f"error: {text.replace('python train.py', 'python tools/evaluate.py')}")
        return 2


if __name__ == "__main__":
    # The end of train.py says why this is not sys.exit.
    os._exit(run(sys.argv[1:]))
