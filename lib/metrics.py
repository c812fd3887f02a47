"""The numbers of a step and of an evaluation, and when to worry about them."""

import contextlib
import math
import statistics
import time

import numpy as np
import psutil
import torch


class Clock:
    """Seconds and memory per phase of a step: `with clock("rollout"): ...`.

    The seconds of a repeated phase add up. `numbers` is for what else a phase has to tell.
    """

    def __init__(self, step):
        self.step = step
        self.start = time.perf_counter()
        self.seconds = {}
        self.memory = {}  # GiB
        self.numbers = {}

    @contextlib.contextmanager
    def __call__(self, phase):
        """An error in the phase says where it was."""
        begin = time.perf_counter()
        try:
            yield
        except (RuntimeError, FloatingPointError) as error:
            error.add_note(
                f"in phase {phase} of step {self.step}; if memory ran out, lower --packing_max_len "
                "or --gpu_memory_utilization"
            )
            error.add_note(f"{memory_in_use():.1f} GiB are in use")
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        before = self.memory.get(phase, 0.0)
        self.memory[phase] = max(before, memory_in_use())


def memory_in_use():
    """GiB that are in use on this rank's GPU, by whomever; on a CPU what the process holds.

    torch's allocator gives nothing back before the sampler wakes up, so the peak of a phase shows
    at its end. What that allocator counts itself would have a sleeping sampler in it.
    """
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def since_start():
    """Seconds since this process began: its imports take 8 of them."""
    return time.time() - psutil.Process().create_time()


def of_samples(samples, batch, limit):
    """What ORZ's users watch, from the samples alone.

    limit: the most tokens of a response. Histograms are counts in 16 equal bins of 0 to `limit`.
    """
    length = batch.response_lengths.double()  # (N,)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)  # (N,)
    right = rewards > 0  # (N,) bool
    line = {
        "reward": rewards.mean().item(),
        "paid": batch.rewards.mean().item(),
        "pass_at_n": len(batch.groups[right].unique()) / len(batch.groups.unique()),
        "truncated": share_truncated(samples),
        "answered": statistics.mean(sample.answer is not None for sample in samples),
        "response_length": length.mean().item(),
        "total_length": statistics.mean(batch.sample_lengths),
    }
    for key in samples[0].text_metrics:
        line[key] = statistics.mean(sample.text_metrics[key] for sample in samples)
    for name, lengths in (("right", length[right]), ("wrong", length[~right])):
        if len(lengths) > 0:
            line[f"length_{name}_mean"] = lengths.mean().item()
            line[f"length_{name}_std"] = lengths.std(correction=0).item()
        line[f"length_{name}_histogram"] = lengths.histc(16, 0, limit).int().tolist()
    return line


def of_time(clock: Clock, tokens):
    """The step's rate, and seconds and memory per phase. tokens: of all samples, with prompts."""
    seconds = time.perf_counter() - clock.start
    line = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    for phase in clock.seconds:
        line[f"seconds_{phase}"] = clock.seconds[phase]
        line[f"memory_{phase}"] = clock.memory[phase]
    return line


def of_evaluation(samples, n):
    """Accuracy over n samples of each problem, its error over problems, pass@k and lengths."""
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    lengths = [len(sample.response_ids) for sample in samples]
    line = {
        "problems": len(rewards),
        "n": n,
        "accuracy": rewards.mean().item(),
        "stderr": rewards.mean(1).std().item() / math.sqrt(max(1, len(rewards) - 1)),
        "length": statistics.mean(lengths),
        "length_std": statistics.pstdev(lengths),
        "truncated": share_truncated(samples),
    }
    return line | pass_rates((rewards > 0).sum(1), n)


def share_truncated(samples):
    return statistics.mean(sample.finish_reason != "stop" for sample in samples)


def pass_rates(right, n):
    """{"pass@k": ...} for k = 1, 2, 4, ... and n, from the counts c of right samples, (problems,).

    Unbiased: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).
    """
    ks = {2**i for i in range(n.bit_length())} | {n}
    line = {}
    for k in sorted(ks):
        missed = [math.comb(n - int(c), k) / math.comb(n, k) for c in right]
        line[f"pass@{k}"] = 1 - float(np.mean(missed))
    return line
