"""Evaluates a model on sets of problems, with the sampler and the grader alone.

    python tools/evaluate.py MODEL --data FILE [FILE ...] [--n 16] [--out FOLDER] [FLAGS]

MODEL comes first. It is a folder, such as RUN/policy, or a name of the Hugging Face hub. --n is the
number of samples of each problem. FLAGS are train.py's, for example --temperature 0.6, --top_p,
--template, --reward, --stop, --generate_max_len, --max_len, --seed and --bf16. The numbers are what
train.py finds with the same flags before its first step.

FOLDER, which is out/evaluate if none is given, gets result.json (the numbers of the sets, all
flags, versions, wall seconds), eval_samples.jsonl with every answer, and run.log. Under
`accelerate launch` the ranks share the samples.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# It must be set before torch is imported: spinning OpenMP threads would slow the graders down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

import ckpt
import train
from lib import check, metrics, report
from lib.common import Signals, Stopped, UserError, print0, start_distributed, tell_once
from rollout import Rollout


def read_flags(argv: list[str]) -> train.Config:
    """The flags of this file, which come first, and those of train.py. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--n", default="1")
    parser.add_argument("--out", default="out/evaluate", metavar="FOLDER")
    args, others = parser.parse_known_args(argv)
    own = ["--model", args.model, "--eval_n", args.n, "--run_dir", args.out]
    own += ["--data", *args.data, "--eval_data", *args.data]
    return train.parse_flags([*own, *others])


class Results:
    """Stands where train.evaluate has a run's log. All ranks keep the numbers and rank 0 writes."""

    def __init__(self, folder: Path, cfg: train.Config):
        self.folder = folder
        self.cfg = cfg
        self.sets = []
        # What an evaluation before this one has left would be taken for this one's.
        if dist.get_rank() == 0:
            for name in ("result.json", "eval_samples.jsonl"):
                (folder / name).unlink(missing_ok=True)

    def evaluation(self, name: str, samples: list, step: int) -> None:
        line = {"step": step, "set": name} | metrics.of_evaluation(samples, self.cfg.eval_n)
        self.sets.append(line)
        if dist.get_rank() > 0:
            return
        with open(self.folder / "eval_samples.jsonl", "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(report.describe(sample, step, name)) + "\n")

    def write(self) -> None:
        result = {"sets": self.sets, "config": vars(self.cfg), "world": dist.get_world_size()}
        result["versions"] = report.versions()
        result["wall_seconds"] = metrics.since_start()
        if dist.get_rank() == 0:
            (self.folder / "result.json").write_text(json.dumps(result, indent=1))

    def table(self) -> str:
        """A line for each set below a line of names, in columns."""
        names = ["set", "problems", "n", "accuracy", "stderr"]
        names += [f"pass@{self.cfg.eval_n}", "length", "truncated"]
        rows = [names]
        for line in self.sets:
            rows.append([show(line[name]) for name in names])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def show(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def main(cfg: train.Config, world: int, store) -> None:
    """One rank of an evaluation. Raises UserError and Stopped."""
    # Only training reads these two: any number of ranks and any length can be evaluated.
    cfg.rollout_batch_size *= world
    cfg.packing_max_len = cfg.max_len
    check.check_same({f"--{name}": value for name, value in vars(cfg).items()})
    check.check_config(cfg, world, choices={})
    folder = Path(cfg.run_dir).absolute()
    # A run that was killed before its first checkpoint has metrics already.
    is_run = ckpt.checkpoints(folder) or (folder / "metrics.jsonl").exists()
    check.require(not is_run, f"--out {folder} holds a training run; choose another folder")
    lock = ckpt.claim(folder, needed_bytes=0)  # noqa: F841
    report.redirect_libraries(folder / "run.log")

    task = train.find_task(cfg)
    eval_sets = train.read_eval_sets(task, cfg, train.read_tokenizer(cfg))
    results = Results(folder, cfg)
    rollout = Rollout(task, Signals(store), cfg)
    try:
        train.evaluate(rollout, eval_sets, 0, results)
    finally:
        rollout.grader.close()
    results.write()
    print0(results.table())
    print0(f"everything is in {folder}")


def run(argv: list[str]) -> int:
    """The exit code: 0, 2 for what the user can mend, 1 after a signal."""
    store = None
    try:
        cfg = read_flags(argv)
        _, world, _, store = start_distributed()
        main(cfg, world, store)
    except UserError as error:
        tell_once(store, f"error: {error}")
        return 2
    except Stopped as stop:
        if str(stop):
            tell_once(store, f"error: {stop}")
            return 2
        tell_once(store, "stopped: an evaluation saves nothing, so start it again")
        return 1
    return 0


if __name__ == "__main__":
    code = run(sys.argv[1:])
    # Not sys.exit, for the reasons at the end of train.py.
    os._exit(code)
