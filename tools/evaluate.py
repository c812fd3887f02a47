"""Evaluates a model on sets of problems, with the sampler and the grader alone.

    python tools/evaluate.py MODEL --data FILE [FILE ...] [--n 16] [--out FOLDER] [FLAGS]

MODEL comes first. It is a folder, such as RUN/policy, or a name of the Hugging Face hub. --n is the
number of samples of each problem. They are drawn at --temperature 1 and --top_p 1 if nothing else
is given; --greedy takes the likeliest tokens instead, once. FLAGS are train.py's, for example
--template, --system, --answer_form, --task, --stop, --generate_max_len, --max_len, --seed, --bf16.
The numbers are what train.py finds with the same flags before its first step.

Where PUBLISHED below has a figure for that model and set, it is printed beside ours with the
settings that differ. Both go by their names: the folder's last part, and the file's.

FOLDER, which is out/evaluate if none is given, gets result.json (the numbers of the sets, what is
printed below them, all flags, versions, wall seconds), eval_samples.jsonl with every answer, and
run.log. Under `accelerate launch` the ranks share the samples.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

# It must be set before torch is imported: spinning OpenMP threads would slow the graders down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

import ckpt
import train
from lib import check, metrics, report
from lib.common import Stopped, UserError, print0, start_distributed, tell_once
from lib.signals import Signals
from rollout import Rollout

# ---- what others have measured ---------------------------------------------------------------


class Published(NamedTuple):
    model: str  # the last part of its name
    set: str  # a key of SETS
    accuracy: float  # %
    # Flags of train.py with the values that were used, as far as the source tells them.
    settings: dict
    source: str


# By which names the files of a set are known, and how many problems it has.
SETS = {
    "MATH500": (r"math[-_]?500", 500),
    "AIME 2024": (r"aime[-_]?(20)?24", 30),
    "AIME 2025": (r"aime[-_]?(20)?25", 30),
    "GPQA diamond": (r"gpqa[-_]?diamond", 198),
    "GSM8K": (r"gsm[-_]?8k", 1319),
}
ORZ = {"eval_n": 16, "eval_temperature": 1.0, "template": "orz", "answer_form": "orz"}
GREEDY = {"eval_n": 1, "eval_temperature": 0.0}
CHAT = {"eval_n": 8, "template": "chat", "answer_form": "hashes", "generate_max_len": 512}
ORZ_PAPER = "Open-Reasoner-Zero, arXiv 2503.24290, table 4"
SIMPLE_RL = "SimpleRL-Zoo, github.com/hkust-nlp/simpleRL-reason, README, before training"
STACKS = "github.com/chrisjmccormick/stacks, qwen-gsm8k, verl 0.8.0, before training"
VERL = "Qwen's own figure in verl's docs/algo/baseline.md, settings not stated"
PUBLISHED = [
    Published("Open-Reasoner-Zero-0.5B", "MATH500", 31.0, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-0.5B", "AIME 2024", 1.0, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-0.5B", "AIME 2025", 0.2, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-0.5B", "GPQA diamond", 12.1, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-1.5B", "MATH500", 58.0, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-1.5B", "AIME 2024", 3.5, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-1.5B", "AIME 2025", 1.0, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-1.5B", "GPQA diamond", 16.8, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-7B", "MATH500", 81.4, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-7B", "AIME 2024", 17.9, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-7B", "AIME 2025", 15.6, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-7B", "GPQA diamond", 36.6, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-32B", "MATH500", 92.2, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-32B", "AIME 2024", 48.1, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-32B", "AIME 2025", 36.0, ORZ, ORZ_PAPER),
    Published("Open-Reasoner-Zero-32B", "GPQA diamond", 55.5, ORZ, ORZ_PAPER),
    Published("Qwen2.5-0.5B", "GSM8K", 36.7, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-1.5B", "GSM8K", 55.7, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-7B", "GSM8K", 88.2, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-0.5B", "MATH500", 15.8, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-1.5B", "MATH500", 29.6, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-7B", "MATH500", 64.6, GREEDY, SIMPLE_RL),
    Published("Qwen2.5-0.5B-Instruct", "GSM8K", 30.2, CHAT, STACKS),
    Published("Qwen2.5-0.5B-Instruct", "GSM8K", 49.6, {}, VERL),
]


def published_for(line: dict, cfg: train.Config) -> list[Published]:
    """The figures of this model on this set, which are told by their names."""
    found = []
    model = Path(cfg.model).name.lower()
    for figure in PUBLISHED:
        pattern, _ = SETS[figure.set]
        if figure.model.lower() == model and re.search(pattern, line["set"].lower()):
            found.append(figure)
    return found


def compare(figure: Published, line: dict, cfg: train.Config) -> str:
    """A published figure beside ours, in one line."""
    ours = {**vars(cfg), "problems": line["problems"]}
    theirs = {**figure.settings, "problems": SETS[figure.set][1]}
    differ = []
    for name, value in theirs.items():
        if ours[name] != value:
            differ.append(f"{name.removeprefix('eval_')} {ours[name]} (theirs {value})")
    settings = "the settings that it names are the same"
    if differ:
        settings = "other settings: " + ", ".join(differ)
    accuracy = f"{100 * line['accuracy']:.1f} +- {100 * line['stderr']:.1f}"
    beside = f"{line['set']}: {accuracy} here, {figure.accuracy} published"
    return f"{beside} ({figure.source}); {settings}"


# ---- the evaluation --------------------------------------------------------------------------


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
    # They are the evaluation's own; train.py has a temperature of training beside it.
    parser.add_argument("--temperature")
    parser.add_argument("--top_p", default="1.0")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--out", default="out/evaluate", metavar="FOLDER")
    args, others = parser.parse_known_args(argv)
    own = ["--model", args.model, "--eval_n", args.n, "--run_dir", args.out]
    own += ["--data", *args.data, "--eval_data", *args.data]
    temperature = args.temperature or "1.0"
    if args.greedy:
        check.require(not args.temperature, "--greedy, --temperature: give one of the two")
        temperature = "0"
    own += ["--eval_temperature", temperature, "--eval_top_p", args.top_p]
    cfg = train.parse_flags([*own, *others])
    is_useful = cfg.eval_temperature > 0 or cfg.eval_n == 1
    check.require(is_useful, f"--n {cfg.eval_n}: greedy responses are all alike, so draw 1")
    return cfg


class Results:
    """Stands where train.evaluate has a run's log. All ranks keep the numbers and rank 0 writes."""

    def __init__(self, folder: Path, cfg: train.Config):
        self.folder = folder
        self.cfg = cfg
        self.sets = []
        self.remarks = []
        # What an evaluation before this one has left would be taken for this one's.
        if dist.get_rank() == 0:
            for name in ("result.json", "eval_samples.jsonl"):
                (folder / name).unlink(missing_ok=True)

    def evaluation(self, name: str, samples: list, step: int) -> None:
        line = {"step": step, "set": name} | metrics.of_evaluation(samples, self.cfg.eval_n)
        self.sets.append(line)
        for figure in published_for(line, self.cfg):
            self.remarks.append(compare(figure, line, self.cfg))
        if not any(sample.answer for sample in samples):
            text = report.no_answers(samples[:: self.cfg.eval_n], self.cfg)
            self.remarks.append(f"{name}: {text}")
        if dist.get_rank() > 0:
            return
        with open(self.folder / "eval_samples.jsonl", "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(report.describe(sample, step, name)) + "\n")

    def write(self) -> None:
        result = {
            "sets": self.sets,
            "remarks": self.remarks,
            "config": vars(self.cfg),
            "world": dist.get_world_size(),
        }
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
    values = {f"--{name}": value for name, value in vars(cfg).items()}
    # The machines may have these files in other folders.
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
    results = Results(folder, cfg)
    rollout = Rollout(task, Signals(store), cfg)
    try:
        train.evaluate(rollout, eval_sets, 0, results)
    finally:
        rollout.grader.close()
    results.write()
    print0("\n".join([results.table(), *results.remarks]))
    print0(f"everything is in {folder}")


def run(argv: list[str]) -> int:
    """The exit code: 0, 2 for what the user can mend, 1 after a signal."""
    store = None
    try:
        cfg = read_flags(argv)
        _, world, _, store = start_distributed()
        with cfg.variants.installed(train.stages()):
            main(cfg, world, store)
    except UserError as error:
        tell_once(store, f"error: {error}")
        return 2
    except Stopped as stop:
        if stop.fault:
            tell_once(store, f"error: {stop.fault}")
            return 2
        tell_once(store, "stopped: an evaluation saves nothing, so start it again")
        return 1
    return 0


if __name__ == "__main__":
    code = run(sys.argv[1:])
    # Not sys.exit, for the reasons at the end of train.py.
    os._exit(code)
