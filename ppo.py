"""PPO without what it does not need: batch, packing, advantages, the two losses and their updates.

Never sees text, and needs torch and numpy alone. An engine is any object with `name` and `device`
that is called like the model, and has `backward(loss, is_last)` and `step(lr) -> gradient norm`;
lib/models.py makes them of DeepSpeed's.

Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py:
- There is one denominator. A loss is a sum over response tokens divided by the *global* number of
  them in the optimizer step, so packing, micro-batches and ranks do not change the gradient. ORZ
  takes a mean of per-pack means.
- There are no old log-probs, no reference, no ratio and no clip. With one update per rollout the
  ratio is 1 and the clip does nothing.
- Group scores are divided by their standard deviation and not whitened again. ORZ's GRPO did
  neither.

Shapes: N samples, T response tokens, R packed rows, L row length. In an estimator T is the longest
response, to which the others are padded.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lib.common import hash64


@dataclass
class Batch:
    """A whole rollout, the same on every rank.

    In flat token tensors sample i owns start[i] to start[i] + length[i].
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    groups: Tensor  # (N,) which problem a sample answers
    rewards: Tensor  # (N,) float64
    device: torch.device  # of the token tensors
    # (T,) each: values, advantages, returns, logprobs (the sampler's), ref_logprobs
    tokens: dict[str, Tensor]

    def __post_init__(self):
        self.length = torch.tensor([len(ids) for ids in self.response_ids])  # (N,)
        self.start = self.length.cumsum(0) - self.length  # (N,)
        # (N,) tokens of each sample, with its prompt
        self.size = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]
        # The mask comes from the lengths alone: a padding id may be an answer's token too.
        self.mask = torch.arange(int(self.length.max())) < self.length[:, None]  # (N, longest)

    def everyone(self) -> list[int]:
        return list(range(len(self.size)))

    @classmethod
    def of(cls, samples, device) -> "Batch":
        """Makes a batch of the sampler's samples. Responses to one problem form a group."""
        prompt_ids = [sample.request.problem.prompt_ids for sample in samples]
        response_ids = [sample.response_ids for sample in samples]
        groups = torch.tensor([sample.request.group for sample in samples])  # (N,)
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)  # (N,)
        batch = cls(prompt_ids, response_ids, groups, rewards, device, {})
        if samples[0].logprobs is not None:
            logprobs = [x for sample in samples for x in sample.logprobs]
            batch.tokens["logprobs"] = torch.tensor(logprobs, device=device)  # (T,)
        return batch

    def with_signal(self) -> list[int]:
        """Returns the samples with an advantage that is not 0. The others have no gradient."""
        parts = self.split(self.tokens["advantages"].cpu())
        return [i for i, part in enumerate(parts) if part.any()]

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cuts (T,) into one tensor a sample."""
        return numbers.split(self.length.tolist())


@dataclass
class MicroBatch:
    """R rows of packed samples, and which of their positions predict a response token."""

    input_ids: Tensor  # (R, L)
    # The positions restart at 0 with each sample, which isolates the samples from each other.
    position_ids: Tensor  # (R, L)
    # Is the next token a response token?
    predict: Tensor  # (R, L) bool
    token_ids: Tensor  # (T,) those next tokens
    # Where those tokens live in the batch's flat token tensors.
    index: Tensor  # (T,)
    mask: Tensor  # (T,) 1.0; 0.0 for a filler
    # With the rows laid end to end: where each sample and each padding starts, and the end.
    borders: Tensor  # (samples and paddings + 1,) int32
    longest: int  # tokens of the longest of them


# ---- packing ---------------------------------------------------------------------------------


def longest_first(sizes: list[int], samples: list[int]) -> list[int]:
    return sorted(samples, key=lambda i: (-sizes[i], i))


def deal(sizes: list[int], samples: list[int], world: int) -> list[list[int]]:
    """Deals samples to ranks, the longest first, each to the rank with the fewest tokens.

    From 32 samples a rank on, the ranks' tokens differ by less than 2 %.
    """
    loads = [0] * world  # tokens
    dealt = [[] for _ in range(world)]
    for i in longest_first(sizes, samples):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += sizes[i]
    return dealt


def pack(sizes: list[int], samples: list[int], row_len: int) -> list[list[int]]:
    """Best-fit decreasing: each sample goes into the fullest row that still has room for it."""
    rows = []
    rooms = []  # (tokens left, row), sorted
    for i in longest_first(sizes, samples):
        fitting = bisect_left(rooms, (sizes[i],))
        if fitting < len(rooms):
            room, row = rooms.pop(fitting)
        else:
            room = row_len
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - sizes[i], row))
    return rows


def build_rows(batch: Batch, rows: list[list[int]]) -> MicroBatch:
    """Makes the tensors of some packed rows of samples."""
    row_len = max(sum(batch.size[i] for i in row) for row in rows)
    parts = []  # tokens of each sample and each padding
    columns = {"input_ids": [], "position_ids": [], "predict": [], "token_ids": [], "index": []}
    for row in rows:
        ids = []
        positions = []
        predict = []
        for i in row:
            prompt = batch.prompt_ids[i]
            response = batch.response_ids[i]
            ids += prompt + response
            parts.append(batch.size[i])
            positions += range(batch.size[i])
            # Position t predicts token t + 1: the prompt's last to the response's last but one.
            predict += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
            start = int(batch.start[i])
            columns["token_ids"] += response
            columns["index"] += range(start, start + len(response))
        # The padding is one more sample, of which nothing is predicted.
        padding = row_len - len(ids)
        if padding > 0:
            parts.append(padding)
        columns["input_ids"].append(ids + [0] * padding)
        columns["position_ids"].append(positions + [*range(padding)])
        columns["predict"].append(predict + [False] * padding)
    columns["mask"] = [1.0] * len(columns["token_ids"])
    tensors = {name: torch.tensor(x, device=batch.device) for name, x in columns.items()}
    borders = torch.tensor([0, *accumulate(parts)], dtype=torch.int32, device=batch.device)
    return MicroBatch(**tensors, borders=borders, longest=max(parts))


def filler(device) -> MicroBatch:
    """Makes one token of mask 0, which keeps a rank without samples in step with the others."""
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)  # (1, 1)
    borders = torch.arange(2, dtype=torch.int32, device=device)  # (2,)
    return MicroBatch(zero, zero, zero == 0, zero[0], zero[0], zero[0].float(), borders, 1)


def micro_batches(batch: Batch, samples: list[int], cfg) -> list[MicroBatch]:
    """Makes this rank's share of `samples`; it is empty on all ranks if there are none.

    Every rank gets the same number of micro-batches, since ZeRO's collectives must match.
    """
    mine = deal(batch.size, samples, dist.get_world_size())[dist.get_rank()]
    rows_per_micro = cfg.micro_train_batch_size
    rows = pack(batch.size, mine, cfg.packing_max_len)
    micros = []
    for start in range(0, len(rows), rows_per_micro):
        micros.append(build_rows(batch, rows[start : start + rows_per_micro]))
    most = torch.tensor(len(micros), device=batch.device)  # ()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    while len(micros) < int(most):
        micros.append(filler(batch.device))
    return micros


# ---- advantages ------------------------------------------------------------------------------


# HACK HERE: an estimator maps rewards (N,), values (N, T), mask (N, T) and groups (N,) to
# advantages (N, T), or to one score (N,) for all tokens of a sample, in float64 on the device.
def gae(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg, lambd=None) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t
    (arXiv 1506.02438, eq. 16). Lambda is the policy's if none is given."""
    if lambd is None:
        lambd = cfg.lambd
    if cfg.gamma == 1 and lambd == 1:
        # The sum telescopes to R - V_t.
        return (rewards[:, None] - values).mul_(mask)
    last = mask.sum(1, keepdim=True) - 1  # (N, 1)
    # V is 0 behind a response, so all delta are 0 there. The reward is on the last token.
    sums = -values  # (N, T)
    sums[:, :-1].add_(values[:, 1:], alpha=cfg.gamma)
    sums.scatter_add_(1, last, rewards[:, None])
    for t in reversed(range(values.shape[1] - 1)):
        sums[:, t] += cfg.gamma * lambd * sums[:, t + 1]
    return sums


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group population std for all tokens alike; exactly 0 in a flat group
    (arXiv 2402.03300)."""
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, (rewards - mean) / std, 0.0)


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of the *other* samples of the group = (r - mean) * n / (n - 1)
    (arXiv 2402.14740)."""
    mean, std, count = group_stats(rewards, groups)  # (N,), (N,), (N,)
    return torch.where(std > 0, (rewards - mean) * count / (count - 1), 0.0)


def reinforce(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean over the batch of samples (Williams 1992 with a constant baseline)."""
    return rewards - rewards.mean()


def dr_grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - group mean, not divided by the std (arXiv 2503.20783, with --loss_mean constant).

    Whitened over the batch it is the REINFORCE++-baseline (arXiv 2501.03262), `reinforce_pp`. Lite
    PPO divides by the std of the batch's rewards, which is another scale (arXiv 2508.08221).
    """
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, rewards - mean, 0.0)


def maxrl(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group mean: the rarer a right response, the more it counts
    (arXiv 2602.02710). It is 0 where all are wrong; rewards are not negative."""
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, (rewards - mean) / mean, 0.0)


def positive(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r, so that only right responses are learnt from (PSR, arXiv 2506.01347, section 2)."""
    return rewards


def negative(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - 1, so that only wrong responses are learnt from (NSR, arXiv 2506.01347, section 2)."""
    return rewards - 1


def pass_at_k(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """GRPO of sets of k responses, which are right if one of them is: a response's mean over all
    sets that it is in (arXiv 2508.10751, section 2.4). With k = 1 it is GRPO of 0 and 1.

    With m the share of right responses and q the chance that a set has none, the paper's two cases
    are one: (r - m) / (1 - m) * sqrt(q / (1 - q)).
    """
    right = (rewards > 0).double()  # (N,)
    mean, std, count = group_stats(right, groups)  # (N,), (N,), (N,)
    wrong = ((1 - mean) * count).round()  # (N,)
    drawn = torch.arange(cfg.pass_k, device=right.device)[:, None]  # (k, 1)
    # With less than k wrong ones a factor is 0.
    none = ((wrong - drawn) / (count - drawn)).prod(0)  # (N,)
    scores = (right - mean) / (1 - mean) * (none / (1 - none)).sqrt()  # (N,)
    return torch.where(std > 0, scores, 0.0)


# By the names of --estimator. Only `gae` has a critic, which `main` in train.py makes. Those that
# compare a problem's samples, and so need two of them, are GROUPED in lib/check.py.
ESTIMATORS = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "dr_grpo": dr_grpo,
    "reinforce_pp": dr_grpo,
    "maxrl": maxrl,
    "positive": positive,
    "negative": negative,
    "pass_at_k": pass_at_k,
}
# The others have their scale already.
WHITENED = ("gae", "reinforce", "reinforce_pp")


def group_stats(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, population std and size of each sample's group, (N,) each.

    The std is exactly 0 where all rewards are equal.
    """
    # A GPU would add up in any order, and the ranks must agree on which advantages are 0.
    on_cpu = rewards.cpu()  # (N,)
    _, inverse, count = groups.cpu().unique(return_inverse=True, return_counts=True)  # (groups,)
    zeros = torch.zeros(len(count), dtype=rewards.dtype)  # (groups,)
    mean = (zeros.index_add(0, inverse, on_cpu) / count)[inverse]  # (N,)
    squares = (on_cpu - mean) ** 2  # (N,)
    std = (zeros.index_add(0, inverse, squares) / count).sqrt()[inverse]  # (N,)
    # The std of a flat group is nothing but rounding.
    std = std.where(std > 1e-9, 0.0)
    return tuple(numbers.to(rewards.device) for numbers in (mean, std, count[inverse]))


def compute_advantages(batch: Batch, cfg):
    """Adds `advantages` and `returns`, (T,), to the batch; returns what to log about them."""
    # They are large, and the sampler sleeps: on a GPU they are computed there.
    device = batch.device
    mask = batch.mask.to(device)  # (N, longest)
    values = torch.zeros(int(batch.length.sum()), dtype=torch.float64, device=device)  # (T,)
    if "values" in batch.tokens:
        values = batch.tokens["values"].double()
    padded = torch.zeros_like(mask, dtype=torch.float64)  # (N, longest)
    padded[mask] = values
    inputs = (batch.rewards.to(device), padded, mask, batch.groups.to(device), cfg)
    scores = ESTIMATORS[cfg.estimator](*inputs).reshape(len(padded), -1)  # (N, 1 or longest)
    advantages = scores.expand_as(padded)[mask]  # (T,)
    # The critic's target is taken before whitening.
    returns = advantages + values  # (T,)
    if cfg.critic_lambd is not None:
        # This decouples the critic's lambda from the policy's (VAPO, arXiv 2504.05118, section 4).
        returns = gae(*inputs, cfg.critic_lambd)[mask] + values  # (T,)
    if cfg.advantage_normalization and cfg.estimator in WHITENED:
        spread = advantages.var(correction=0).sqrt().clamp(min=1e-8)
        advantages = (advantages - advantages.mean()) / spread
    stats = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    stats["return"] = returns.mean()
    variance = returns.var(correction=0)
    if "values" in batch.tokens and variance > 0:
        stats["explained_variance"] = 1 - (returns - values).var(correction=0) / variance

    # `update` divides by all tokens, which is N times the mean length. To divide by another length
    # the advantages are weighted here, where packing, micro-batches and ranks do not matter.
    mean_length = batch.length.double().mean()  # ()
    if cfg.loss_mean == "sequence":
        # Each sample is divided by its own length (GRPO, arXiv 2402.03300, eq. 3).
        length = batch.length.repeat_interleave(batch.length).to(device)  # (T,)
        advantages = advantages * mean_length / length
    elif cfg.loss_mean == "constant":
        # All samples are divided by the same length (Dr. GRPO, arXiv 2503.20783).
        advantages = advantages * mean_length / cfg.generate_max_len
    batch.tokens["advantages"] = advantages.float()
    batch.tokens["returns"] = returns.float()
    return {key: value.item() for key, value in stats.items()}


# ---- passes and losses -----------------------------------------------------------------------


def values(critic, batch: Batch, cfg) -> Tensor:
    """Computes V(s_t) of every response token, (T,), the same on every rank."""
    return token_pass(batch, cfg, critic)


def logprobs(policy, batch: Batch, cfg) -> Tensor:
    """Computes log p of every response token, (T,), the same on every rank."""

    def forward(micro):
        return policy(micro, cfg.temperature)[0]  # (T,)

    return token_pass(batch, cfg, forward)


@torch.no_grad()
def token_pass(batch: Batch, cfg, forward) -> Tensor:
    """Computes one number per response token, (T,), by `forward(micro)`."""
    numbers = torch.zeros(int(batch.length.sum()), device=batch.device)  # (T,)
    for micro in micro_batches(batch, batch.everyone(), cfg):
        numbers.index_add_(0, micro.index, forward(micro) * micro.mask)
    # Exactly one rank has computed each token; the others add 0.
    dist.all_reduce(numbers)
    return numbers


def policy_loss(policy, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """-sum_t A_t log p(a_t), which has the clipped objective's gradient at ratio 1
    (arXiv 1707.06347, eq. 7). Returns it with what to log: sums over tokens."""
    logprobs, entropy = policy(micro, cfg.temperature)  # (T,), (T,)
    advantages = batch.tokens["advantages"][micro.index] * micro.mask  # (T,)
    stats = {"entropy": (entropy.detach() * micro.mask).sum()}
    if "logprobs" in batch.tokens:
        # --log_ratio and --tis_cap compare the trainer with the sampler.
        sampled = batch.tokens["logprobs"][micro.index]  # (T,)
        log_ratio = (logprobs.detach() - sampled) * micro.mask  # (T,)
        stats |= ratio_stats(log_ratio, micro.mask)
        if cfg.tis_cap is not None:
            advantages = advantages * log_ratio.exp().clamp(max=cfg.tis_cap)
    if "ref_logprobs" in batch.tokens:
        # --log_kl is a number to watch and never part of the loss.
        reference = batch.tokens["ref_logprobs"][micro.index]  # (T,)
        stats["kl"] = k3((reference - logprobs.detach()) * micro.mask).sum()
    loss = -(advantages * logprobs).sum()
    stats["policy_loss"] = loss.detach()
    return loss, stats


def ratio_stats(log_ratio: Tensor, mask: Tensor):
    """Trainer against sampler, both (T,): the ratio is 1 up to rounding, or something is wrong."""
    ratio = log_ratio.exp()  # (T,)
    stats = {"ratio": (ratio * mask).sum(), "ratio_max": ratio.max()}
    stats["clipfrac"] = ((ratio - 1).abs() > 0.2).float().sum()
    stats["approx_kl"] = k3(log_ratio).sum()
    return stats


def k3(log_ratio: Tensor) -> Tensor:
    """An unbiased, never negative estimate of a KL divergence (joschu.net/blog/kl-approx.html)."""
    return log_ratio.exp() - 1 - log_ratio


def critic_loss(critic, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), summed (ORZ's ValueLoss)."""
    values = critic(micro)  # (T,)
    old = batch.tokens["values"][micro.index]  # (T,)
    returns = batch.tokens["returns"][micro.index]  # (T,)
    clipped = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)  # (T,)
    worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)  # (T,)
    loss = 0.5 * (worse * micro.mask).sum()
    stats = {"critic_loss": loss.detach(), "critic_values": (values.detach() * micro.mask).sum()}
    return loss, stats


# ---- updates ---------------------------------------------------------------------------------


def train_critic(critic, batch: Batch, cfg, step):
    """Takes critic_update_steps optimizer steps, each over its part of one shuffle of the samples.

    There are never more steps than samples.
    """
    rng = np.random.default_rng(hash64(cfg.seed, step, "critic"))
    count = min(cfg.critic_update_steps, len(batch.size))
    parts = np.array_split(rng.permutation(len(batch.size)), count)
    history = []
    for k, part in enumerate(parts):
        optimizer_step = step * cfg.critic_update_steps + k
        lr = learning_rate(cfg.critic_learning_rate, cfg.num_warmup_steps, optimizer_step)
        history.append(update(critic, critic_loss, batch, part.tolist(), lr, cfg))
    return {key: float(np.mean([stats[key] for stats in history])) for key in history[0]}


def train_policy(policy, batch: Batch, cfg, step, total_steps):
    """Takes one optimizer step over all samples, so the ratio is 1 and a clip would do nothing."""
    # At the start the critic learns alone (ORZ's freezing_actor_steps). The rate and its end are
    # counted from the policy's own first step.
    step -= cfg.critic_warmup_steps
    total_steps -= cfg.critic_warmup_steps
    if step < 0:
        return {}
    lr = learning_rate(cfg.actor_learning_rate, cfg.num_warmup_steps, step, cfg.lr_end, total_steps)
    # A sample without a gradient does not pass through the model, but its tokens still count.
    denominator = int(batch.length.sum())
    return update(policy, policy_loss, batch, batch.with_signal(), lr, cfg, denominator)


def learning_rate(peak, warmup, step, end=None, total=0):
    """Returns the rate of an optimizer step, counted from 0.

    It rises linearly from peak / warmup, and then stays, or falls linearly to `end`, which it
    reaches at the last of `total` steps.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if end is None:
        return peak
    progress = (step + 1 - warmup) / max(1, total - warmup)
    return peak + (end - peak) * min(1.0, progress)


def update(engine, loss_fn, batch: Batch, samples: list[int], lr, cfg, denominator=None):
    """Takes one optimizer step over `samples`, dealt to all ranks. Returns global means.

    The loss is a sum over response tokens, divided by `denominator`: how many tokens there are on
    all ranks together (those of `samples` if it is not given). That is known beforehand, so
    packing, micro-batches and ranks do not change the gradient. Without samples there is no step.
    Raises FloatingPointError on all ranks, with the weights unchanged, if a number is not finite.
    """
    passed = int(batch.length[samples].sum())
    if denominator is None:
        denominator = passed
    micros = micro_batches(batch, samples, cfg)
    history = []
    for micro in micros:
        loss, stats = loss_fn(engine, batch, micro, cfg)
        # The engine averages gradients over ranks; times their number that is a sum.
        scaled = loss * (dist.get_world_size() / denominator)
        engine.backward(scaled, is_last=micro is micros[-1])
        history.append(stats)
    stats = {}
    grad_norm = 0.0
    if micros:
        stats = reduce_stats(history, denominator, passed)
        if not np.isfinite(list(stats.values())).all():
            raise FloatingPointError(f"{engine.name}: the loss is not finite: {stats}")
        grad_norm = engine.step(lr)
    own = {"grad_norm": grad_norm, "lr": lr, "micro_batches": len(micros)}
    own["tokens"] = sum(batch.size[i] for i in samples)
    return stats | {f"{engine.name}_{key}": value for key, value in own.items()}


def reduce_stats(history, denominator, passed):
    """Joins the statistics of all micro-batches and ranks.

    A loss is divided by the step's denominator, another sum by the tokens that passed through the
    model, and what ends in _max is a maximum.
    """
    totals = {}
    for key in history[0]:
        column = torch.stack([stats[key] for stats in history]).double()  # (micro-batches,)
        if key.endswith("_max"):
            total = column.max()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        else:
            divisor = denominator if key.endswith("loss") else passed
            total = column.sum() / divisor
            dist.all_reduce(total)
        totals[key] = total.item()
    return totals
