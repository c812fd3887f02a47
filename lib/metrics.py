"""The numbers of a step and of an evaluation, and when to worry about them."""

import contextlib
import math
import statistics
import time

import numpy as np
import psutil
import torch

from lib.common import UserError, one_line


class Clock:
    """Seconds and memory per phase of a step: `with clock("rollout"): ...`.

    The seconds of a repeated phase add up. `numbers` is for what else a phase has to tell.
    """

    def __init__(self):
        self.start = time.perf_counter()
        self.seconds = {}
        self.memory = {}  # GiB
        self.numbers = {}
        read_memory()

    @contextlib.contextmanager
    def __call__(self, phase: str):
        begin = time.perf_counter()
        try:
            yield
        except (RuntimeError, FloatingPointError) as error:
            raise self.explain(error, phase) from error
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        self.memory[phase] = max(self.memory.get(phase, 0.0), read_memory())

    def explain(self, error: Exception, phase: str) -> Exception:
        """The same error, which says its phase; being out of memory is the user's to mend."""
        if "out of memory" not in str(error):
            error.add_note(f"in phase {phase}")
            return error
        flag = "--packing_max_len"
        if phase in ("rollout", "sync"):
            flag = "--gpu_memory_utilization"
        return UserError(
            f"phase {phase}: out of GPU memory; lower {flag} (and --max_len), or try --zero_stage 3 "
            f"--offload optimizer: {one_line(error)}"
        )

    def elapsed(self) -> float:
        return time.perf_counter() - self.start


def read_memory() -> float:
    """GiB on this rank: the most that tensors held on its GPU since the last call; on a CPU what
    the process holds."""
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return most


def since_start() -> float:
    """Seconds since this process began: its imports take 8 of them."""
    return time.time() - psutil.Process().create_time()


def of_samples(samples: list, batch, longest: int) -> dict:
    """What ORZ's users watch, from the samples alone.

    Histograms are counts in 16 equal bins of 0 to `longest` tokens.
    """
    length = batch.length.double().numpy()  # (N,)
    rewards = batch.rewards.numpy()  # (N,)
    solved = {sample.request.group for sample in samples if sample.reward > 0}
    groups = {sample.request.group for sample in samples}
    line = {
        "reward": rewards.mean(),
        "pass_at_n": len(solved) / len(groups),
        "truncated": share_truncated(samples),
        "response_length": length.mean(),
        "total_length": np.mean(batch.size),
    }
    for key in samples[0].text_metrics:
        line[key] = np.mean([sample.text_metrics[key] for sample in samples])
    line = {key: float(value) for key, value in line.items()}
    for name, some in (("right", length[rewards > 0]), ("wrong", length[rewards <= 0])):
        if len(some) > 0:
            line[f"length_{name}_mean"] = float(some.mean())
            line[f"length_{name}_std"] = float(some.std())
        histogram, _ = np.histogram(some, 16, (0, longest))
        line[f"length_{name}_histogram"] = histogram.tolist()
    return line


def of_time(clock, tokens: int, learnt: float) -> dict[str, float]:
    """Rates, and seconds and memory per phase. tokens: of all samples, with their prompts.

    learnt: floating-point operations of the updates on this rank, 6 for each parameter and token.
    """
    seconds = clock.elapsed()
    line = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    updating = clock.seconds.get("critic", 0.0) + clock.seconds["policy"]
    line["tflops"] = learnt / updating / 1e12
    for phase in clock.seconds:
        line[f"seconds_{phase}"] = clock.seconds[phase]
        line[f"memory_{phase}"] = clock.memory[phase]
    return line


def of_evaluation(samples: list, n: int) -> dict[str, float]:
    """Accuracy over n samples of each problem, its standard error over problems, pass@k, lengths."""
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, n)  # (problems, n)
    lengths = [len(sample.response_ids) for sample in samples]
    spread = rewards.mean(1).std()
    line = {
        "problems": len(rewards),
        "n": n,
        "accuracy": float(rewards.mean()),
        "stderr": float(spread / math.sqrt(max(1, len(rewards) - 1))),
        "length": float(np.mean(lengths)),
        "length_std": float(np.std(lengths)),
        "truncated": share_truncated(samples),
    }
    return line | pass_at_k((rewards > 0).sum(1), n)


def share_truncated(samples: list) -> float:
    return float(np.mean([sample.finish_reason != "stop" for sample in samples]))


def pass_at_k(right: np.ndarray, n: int) -> dict[str, float]:
    """{"pass@k": ...} for k = 1, 2, 4, ... and n, from the counts c of right samples, (problems,).

    Unbiased: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).
    """
    ks = {2**i for i in range(n.bit_length())} | {n}
    line = {}
    for k in sorted(ks):
        missed = [math.comb(n - int(c), k) / math.comb(n, k) for c in right]
        line[f"pass@{k}"] = 1 - float(np.mean(missed))
    return line


def health(line: dict, norms: list[float]) -> list[str]:
    """What looks wrong with a step, in words. norms: the policy's gradient norms so far."""
    signs = []
    if line["truncated"] > 0.3:
        signs.append(f"{line['truncated']:.0%} of the responses are truncated")
    entropy = line.get("entropy", 1.0)
    if entropy < 0.02 and line["reward"] < 0.9:
        signs.append(f"entropy {entropy:.3f} has collapsed")
    # Where nearly all rewards are equal there is little to explain.
    if line.get("explained_variance", 0.0) < 0 and 0.05 < line["reward"] < 0.95:
        signs.append("the critic explains less than a constant would")
    norm = line["policy_grad_norm"]
    if len(norms) > 5 and norm > 10 * statistics.median(norms[-20:]):
        usual = statistics.median(norms[-20:])
        signs.append(f"gradient norm {norm:.2g}, usually {usual:.2g}")
    # The mean ratio says nothing: it is 1 for any two distributions.
    apart = line.get("approx_kl", 0.0)
    if apart > 0.02:
        signs.append(f"sampler and trainer differ: KL {apart:.3f}")
    return signs
