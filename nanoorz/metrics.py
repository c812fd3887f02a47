"""The numbers of a step and of an evaluation, from samples, batch and clock."""

import contextlib
import math
import statistics
import time
from collections import defaultdict

import numpy as np
import psutil
import torch


class Clock:
    """Measures the phases of a step: `with clock("rollout"): ...`.

    seconds: {phase: seconds}, the sum if a phase is repeated. memory: {phase: GiB}, the maximum if
    a phase is repeated. numbers: {name: number}, other numbers that a phase wants to log.
    """

    def __init__(self, step):
        self.step = step
        self.start = time.perf_counter()
        self.seconds = defaultdict(float)
        self.memory = defaultdict(float)
        self.numbers = defaultdict(int)

    @contextlib.contextmanager
    def __call__(self, phase):
        """Measures the code inside. Adds phase and step to an error that the code raises."""
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
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - begin
        self.memory[phase] = max(self.memory[phase], memory_in_use())


def memory_in_use():
    """GiB in use on this rank's GPU by all processes; on a CPU, the memory of this process.

    torch gives no memory back before the sampler wakes up. So for a phase of learning this is the
    maximum since the sampler fell asleep.
    """
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def since_start():
    """Seconds since this process started. The imports, which take 8 s, are included."""
    return time.time() - psutil.Process().create_time()


def of_samples(samples, batch):
    """The numbers of a step's samples for metrics.jsonl."""
    lengths = batch.response_lengths.double()  # (N,)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)  # (N,)
    right = rewards >= 1  # (N,) bool; a part of the reward is not right
    line = {
        "reward": rewards.mean().item(),
        "paid": batch.rewards.mean().item(),
        "pass_at_n": len(batch.groups[right].unique()) / len(batch.groups.unique()),
        "truncated": share_truncated(samples),
        "answered": statistics.mean(sample.answer is not None for sample in samples),
        "response_length": lengths.mean().item(),
        "total_length": statistics.mean(batch.sample_lengths),
    }
    for key in samples[0].text_metrics:
        numbers = [x.text_metrics[key] for x in samples if key in x.text_metrics]
        line[key] = statistics.mean(numbers)
    for name, part in (("right", lengths[right]), ("wrong", lengths[~right])):
        if len(part) > 0:
            line[f"length_{name}_mean"] = part.mean().item()
    return line


def of_time(clock, tokens):
    """The seconds of a step, in all and by phase. tokens: prompts and responses of all samples."""
    seconds = time.perf_counter() - clock.start
    line = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    line |= {f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()}
    return line | {f"memory_{phase}": memory for phase, memory in clock.memory.items()}


def of_evaluation(samples, n):
    """The numbers of an evaluated set with n samples of each problem, in the order of problems.

    stderr is the standard error of accuracy over problems.
    """
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    lengths = [len(sample.response_ids) for sample in samples]
    return {
        "problems": len(rewards),
        "n": n,
        "accuracy": rewards.mean(),
        # std() / sqrt(P - 1) is the same as std(ddof=1) / sqrt(P), and works for one problem too.
        "stderr": rewards.mean(1).std() / math.sqrt(max(1, len(rewards) - 1)),
        # The share of problems with a right sample.
        f"pass@{n}": (rewards >= 1).any(1).mean(),
        "length": statistics.mean(lengths),
        "truncated": share_truncated(samples),
    }


def share_truncated(samples):
    return statistics.mean(sample.finish_reason != "stop" for sample in samples)
