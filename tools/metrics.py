"""The numbers of a step and of an evaluation, and when to worry about them: pure functions of samples and counts."""
import math
import statistics
import time

import numpy as np
import psutil
import torch
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger, timers

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


def imbalance(sizes: list[int], samples: list[int]) -> float:
    """How many tokens fewer the emptiest rank gets of these samples than the fullest, as a share of the fullest's."""
    loads = [sum(sizes[i] for i in part) for part in ppo.deal(sizes, list(samples), dist.get_world_size())]
    return (max(loads) - min(loads)) / max(max(loads), 1)  # 0 of no samples


def expansion(records: list[dict], cfg) -> dict[str, float]:
    """--first_stage: share of prompts that got all samples; tokens that the others would have taken at their mean."""
    lengths = {}
    for r in records:
        lengths.setdefault(r["problem"], []).append(len(r["response_ids"]))
    short = [lens for lens in lengths.values() if len(lens) < cfg.n_samples_per_prompt]
    return {"prompts_expanded": 1 - len(short) / len(lengths),
            "tokens_saved": sum((cfg.n_samples_per_prompt - len(lens)) * statistics.mean(lens) for lens in short)}


def health(metrics: dict, norms: list[float]) -> list[str]:
    """What looks wrong with a step, each in a few words; norms: the policy's gradient norms so far."""
    usual = statistics.median(norms[-20:]) if len(norms) > 5 else math.inf
    entropy, apart, norm = metrics.get("entropy", 1.0), metrics.get("approx_kl", 0.0), metrics["policy_grad_norm"]
    signs = [
        (metrics["truncated"] > 0.3, f"{metrics['truncated']:.0%} of the responses are truncated"),
        (entropy < 0.02 and metrics["reward"] < 0.9, f"entropy {entropy:.3f} has collapsed"),
        ((metrics.get("explained_variance") or 0) < 0 and 0.05 < metrics["reward"] < 0.95,  # else little is to explain
         "the critic explains less than a constant would"),
        (norm > 10 * usual, f"gradient norm {norm:.2g}, usually {usual:.2g}"),
        (apart > 0.02, f"sampler and trainer differ: KL {apart:.3f}")]  # the mean ratio is 1 of any two
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


def mfu(tokens: int, learned: dict, matrices: dict[str, int], seconds: dict[str, float], cfg, peak: float) -> float:
    """Share of the peak (of all ranks) that training reached: 6 FLOP a matrix parameter and token for an update, 2 for
    a pass without gradient, recomputation by checkpointing not counted, over the seconds of values, critic, policy.
    tokens: of all samples; learned: what an update's passes really took (a mean of the critic's)."""
    updates = learned["policy_tokens"] * matrices["policy"]
    updates += learned.get("critic_tokens", 0) * cfg.critic_update_steps * matrices["critic"]
    values = matrices["critic"] if cfg.estimator == "gae" and not cfg.fuse_values else 0
    passes = 6 * updates + 2 * tokens * (values + cfg.log_kl * matrices["policy"])
    return passes / sum(seconds.get(name, 0) for name in ("values", "critic", "policy")) / peak


def communication() -> tuple[float, float]:
    """Seconds and GiB of DeepSpeed's collectives on this rank since the last call, where they are logged. Its latencies
    add up from the last reset of its timers on, and it sums all events at each call: so they are reset here."""
    took, moved = 0.0, 0.0
    for kind, sizes in (comms_logger.get_raw_data() if comms_logger.enabled else {}).items():
        took += max(latency for _, latencies, *_ in sizes.values() for latency in latencies) / 1000
        moved += sum(size * calls for size, (calls, *_) in sizes.items()) / 2**30
        timers(kind).reset()
    comms_logger.reset_data()
    return took, moved


def memory() -> float:
    """GiB on this rank: the most that tensors held on its GPU since the last call; on a CPU what the process holds."""
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return most
