"""The numbers of a step and of an evaluation, and when to worry about them: pure functions of samples and counts."""
import math
import resource
import statistics
import time

import numpy as np
import torch
from deepspeed.comm.comm import comms_logger

import ppo


def rollout_metrics(records: list[dict], batch, longest: int) -> dict:
    """What ORZ's users watch, from the samples alone. Histograms: counts in 16 equal bins of 0 to `longest` tokens."""
    length, rewards = batch.length.double().numpy(), batch.rewards.numpy()  # (N,), (N,)
    solved = np.bincount(batch.groups.numpy(), rewards > 0)[np.unique(batch.groups.numpy())] > 0  # (groups,)
    metrics = {"reward": rewards.mean(), "pass_at_n": solved.mean(),
               "truncated": np.mean([r["finish_reason"] != "stop" for r in records]),
               "response_length": length.mean(), "total_length": np.mean(batch.size)}
    metrics |= {key: np.mean([r["text_metrics"][key] for r in records]) for key in records[0]["text_metrics"]}
    metrics = {key: float(value) for key, value in metrics.items()}
    for name, some in (("right", length[rewards > 0]), ("wrong", length[rewards <= 0])):
        if len(some):
            metrics |= {f"length_{name}_mean": float(some.mean()), f"length_{name}_std": float(some.std())}
        metrics[f"length_{name}_histogram"] = np.histogram(some, 16, (0, longest))[0].tolist()
    return metrics


def pass_at_k(right: np.ndarray, n: int) -> dict[str, float]:
    """{"pass@k": ...} for k = 1, 2, 4, ... and n from the counts c of right samples, (problems,); unbiased:
    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    return {f"pass@{k}": float(np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in right])) for k in ks}


def evaluation_line(name: str, records: list[dict], problems: list, n: int, step: int) -> dict:
    """Accuracy over n samples of each problem, its standard error over problems, pass@k, lengths, share truncated."""
    rewards = np.array([r["reward"] for r in records]).reshape(len(problems), n)  # (problems, n)
    length = [len(r["response_ids"]) for r in records]
    return {"step": step, "set": name, "problems": len(problems), "n": n, "accuracy": float(rewards.mean()),
            "stderr": float(rewards.mean(1).std() / max(1, len(problems) - 1) ** 0.5),
            "length": float(np.mean(length)), "length_std": float(np.std(length)),
            "truncated": float(np.mean([r["finish_reason"] != "stop" for r in records]))} | pass_at_k(
                (rewards > 0).sum(1), n)


def imbalance(sizes: list[int], world: int) -> float:
    """How many tokens fewer the emptiest rank trains on than the fullest, as a share of the fullest's."""
    loads = [sum(sizes[i] for i in part) for part in ppo.deal(sizes, list(range(len(sizes))), world)]
    return 1 - min(loads) / max(loads)


def health(metrics: dict, norms: list[float]) -> list[str]:
    """What looks wrong with a step, each in a few words; norms: the policy's gradient norms so far."""
    usual = statistics.median(norms[-20:]) if len(norms) > 5 else math.inf
    entropy, ratio, norm = metrics.get("entropy", 1.0), metrics.get("ratio", 1.0), metrics["policy_grad_norm"]
    signs = [
        (metrics["truncated"] > 0.3, f"{metrics['truncated']:.0%} of the responses are truncated"),
        (entropy < 0.02 and metrics["reward"] < 0.9, f"entropy {entropy:.3f} has collapsed"),
        ((metrics.get("explained_variance") or 0) < 0, "the critic explains less than a constant would"),
        (norm > 10 * usual, f"gradient norm {norm:.2g}, usually {usual:.2g}"),
        (abs(ratio - 1) > 0.1, f"sampler and trainer differ: mean ratio {ratio:.3f}")]
    return [text for wrong, text in signs if wrong]


def matmul_peak(device, bf16: bool) -> float:
    """FLOP/s of one large matrix product on this rank, the best of three: what MFU is measured against."""
    size, dtype, best = 8192 if device.type == "cuda" else 1024, torch.bfloat16 if bf16 else torch.float32, 0.0
    x = torch.randn((size, size), device=device).to(dtype)  # (size, size)
    for _ in range(3):
        begin = time.perf_counter()
        float((x @ x)[0, 0])  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def mfu(tokens: int, parameters: int, seconds: dict[str, float], cfg, peak: float) -> float:
    """Share of the peak (of all ranks) that training reached: 6 FLOP a parameter and token for an update, 2 for a pass
    without gradient, recomputation by checkpointing not counted, over the seconds of values, critic and policy."""
    passes = 6 * sum(name in seconds for name in ("critic", "policy"))
    passes += 2 * (cfg.estimator == "gae" and not cfg.fuse_values)
    return passes * parameters * tokens / sum(seconds.get(name, 0) for name in ("values", "critic", "policy")) / peak


def communication(before: dict[str, float]) -> dict[str, float]:
    """What DeepSpeed's collectives on this rank took and moved since the last call. before: seconds of each kind until
    then, brought up to date here: DeepSpeed's latencies add up from the first call on."""
    found = {"communication_seconds": 0.0, "communication_gb": 0.0}
    for kind, sizes in comms_logger.get_raw_data().items():
        seconds = max(latency for _, latencies, *_ in sizes.values() for latency in latencies) / 1000
        found["communication_seconds"] += seconds - before.get(kind, 0.0)
        found["communication_gb"] += sum(size * calls for size, (calls, *_) in sizes.items()) / 2**30
        before[kind] = seconds
    comms_logger.reset_data()
    return found


def peak_memory() -> dict[str, float]:
    """GiB at most, on this rank: of the process, and on a GPU of tensors since the last call."""
    found = {"memory_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        found["memory_gpu"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found
