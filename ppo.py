"""PPO without what it does not need: batch, packing, advantages, the two losses and their updates.

Never sees text, and needs torch and numpy alone. A learner is any object with `name` and `device`
that is called like the model, and has `backward(loss, is_last)` and `apply_update(lr) -> gradient
norm`. lib/models.py makes learners of DeepSpeed engines. An update is one optimizer step.

Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py:
- There is one denominator. A loss is a sum over response tokens divided by the *global* number of
  response tokens in the update, so packing, micro-batches and ranks do not change the gradient.
  ORZ takes a mean of per-pack means.
- The policy's loss has no old log-probs, no ratio of new to old and no clip. With one update per
  rollout that ratio is 1 and the clip does nothing. (`ratio` in this file is trainer to sampler.)
- `grpo` divides by the group's standard deviation, and its scores are not whitened. ORZ's GRPO does
  not divide, and whitens.

Shapes: N samples, S tokens of the longest response, T response tokens of the batch, t response
tokens of a micro-batch, R packed rows, L row length.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lib.common import gather, hash64, share_errors


@dataclass
class Batch:
    """A whole rollout, the same on every rank.

    In flat token tensors sample i owns start[i] to start[i] + response_lengths[i].
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    groups: Tensor  # (N,) which problem a sample answers
    rewards: Tensor  # (N,) float64, what is learnt from: `paid`
    device: torch.device  # of the token tensors
    # (T,) each: values, advantages, returns, logprobs (of the sampler), ref_logprobs
    per_token: dict[str, Tensor]
    samples: list  # (N) what rollout.py has drawn

    def __post_init__(self):
        self.response_lengths = torch.tensor([len(ids) for ids in self.response_ids])  # (N,)
        self.start = self.response_lengths.cumsum(0) - self.response_lengths  # (N,)
        # (N,) tokens of each sample, with its prompt
        self.sample_lengths = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]
        # The mask comes from the lengths alone: a padding id may be an answer's token too.
        self.mask = (
            torch.arange(int(self.response_lengths.max())) < self.response_lengths[:, None]
        )  # (N, S)

    def all_samples(self) -> list[int]:
        return list(range(len(self.sample_lengths)))

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cuts (T,) into one tensor a sample."""
        return numbers.split(self.response_lengths.tolist())

    def spread(self, numbers: Tensor) -> Tensor:
        """Gives each token the number of its sample: (N,) becomes (T,)."""
        return numbers.repeat_interleave(self.response_lengths).to(self.device)


@dataclass
class MicroBatch:
    """R rows of packed samples, and which of their positions predict a response token."""

    input_ids: Tensor  # (R, L)
    # The positions restart at 0 with each sample, which isolates the samples from each other.
    position_ids: Tensor  # (R, L)
    # Is the next token a response token?
    predict: Tensor  # (R, L) bool
    token_ids: Tensor  # (t,) those next tokens
    # Where those tokens lie in the batch's flat token tensors.
    flat_index: Tensor  # (t,)
    mask: Tensor  # (t,) 1.0; 0.0 for a filler
    # With the rows laid end to end: where each sample and each padding starts, and the end.
    borders: Tensor  # (samples and paddings + 1,) int32
    longest: int  # tokens of the longest of them


def make_batch(samples, device, cfg, rewards=None) -> Batch:
    """Makes a batch of the sampler's samples. Responses to one problem form a group.

    rewards: what is learnt from. Without them rank 0 calls `paid`, and all ranks must call this.
    """
    if rewards is None:
        with share_errors():
            rewards = paid(samples, cfg) if dist.get_rank() == 0 else None
        rewards = gather(rewards)[0]
    prompt_ids = [sample.request.problem.prompt_ids for sample in samples]
    response_ids = [sample.response_ids for sample in samples]
    groups = torch.tensor([sample.request.group for sample in samples])  # (N,)
    rewards = torch.tensor(rewards, dtype=torch.float64)  # (N,)
    batch = Batch(prompt_ids, response_ids, groups, rewards, device, {}, samples)
    if samples[0].logprobs is not None:
        logprobs = [x for sample in samples for x in sample.logprobs]
        batch.per_token["logprobs"] = torch.tensor(logprobs, device=device)  # (T,)
    return batch


# HACK HERE: what is learnt from. The samples keep the verifier's rewards, which the logs show.
def paid(samples, cfg) -> list[float]:
    """A reward for each sample: the verifier's."""
    return [sample.reward for sample in samples]


def samples_that_count(batch: Batch, cfg) -> list[int]:
    """The samples of which losses, whitening and mean length are made: all. Each sample counts in
    its group's mean, whatever is returned here."""
    return batch.all_samples()


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
    row_len = max(sum(batch.sample_lengths[i] for i in row) for row in rows)
    parts = []  # tokens of each sample and each padding
    columns = {
        "input_ids": [],
        "position_ids": [],
        "predict": [],
        "token_ids": [],
        "flat_index": [],
    }
    for row in rows:
        ids = []
        positions = []
        predict = []
        for i in row:
            prompt = batch.prompt_ids[i]
            response = batch.response_ids[i]
            ids += prompt + response
            parts.append(batch.sample_lengths[i])
            positions += range(batch.sample_lengths[i])
            # Position t predicts token t + 1: the prompt's last to the response's last but one.
            predict += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
            start = int(batch.start[i])
            columns["token_ids"] += response
            columns["flat_index"] += range(start, start + len(response))
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
    """Makes one token of mask 0, for a rank that has fewer micro-batches than another one."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)  # (1,)
    return MicroBatch(
        input_ids=zero[None],  # (1, 1)
        position_ids=zero[None],  # (1, 1)
        predict=zero[None] == 0,  # (1, 1)
        token_ids=zero,
        flat_index=zero,
        mask=zero.float(),
        borders=torch.arange(2, dtype=torch.int32, device=device),  # (2,)
        longest=1,
    )


def micro_batches(batch: Batch, samples: list[int], cfg) -> list[MicroBatch]:
    """Makes this rank's share of `samples`; it is empty on all ranks if there are none.

    Every rank gets the same number of micro-batches, since ZeRO's collectives must match.
    """
    mine = deal(batch.sample_lengths, samples, dist.get_world_size())[dist.get_rank()]
    rows_per_micro = cfg.micro_train_batch_size
    rows = pack(batch.sample_lengths, mine, cfg.packing_max_len)
    micros = []
    for start in range(0, len(rows), rows_per_micro):
        micros.append(build_rows(batch, rows[start : start + rows_per_micro]))
    most = torch.tensor(len(micros), device=batch.device)  # ()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    while len(micros) < int(most):
        micros.append(filler(batch.device))
    return micros


# ---- advantages ------------------------------------------------------------------------------


# HACK HERE: an estimator maps rewards (N,), values (N, S), mask (N, S) and groups (N,) to
# advantages (N, S), or to one score (N,) for all tokens of a sample, in float64 on the device.
def gae(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t
    (arXiv 1506.02438, eq. 16)."""
    if cfg.gamma == cfg.lambd == 1:
        # The sum telescopes to reward - V_t.
        return (rewards[:, None] - values).mul_(mask)
    last = mask.sum(1, keepdim=True) - 1  # (N, 1)
    # V is 0 behind a response, so all delta are 0 there. The reward is on the last token.
    sums = -values  # (N, S)
    sums[:, :-1].add_(values[:, 1:], alpha=cfg.gamma)
    sums.scatter_add_(1, last, rewards[:, None])
    for t in reversed(range(values.shape[1] - 1)):
        sums[:, t] += cfg.gamma * cfg.lambd * sums[:, t + 1]
    return sums


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group population std for all tokens alike; exactly 0 where all rewards
    of the group are equal (arXiv 2402.03300)."""
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


@dataclass(frozen=True)
class Estimator:
    """A function, and what a run must have for it."""

    function: Callable
    needs_critic: bool = False
    # Are its advantages whitened? The others have their scale already.
    is_whitened: bool = False
    # Of a problem. A function that compares samples needs two.
    least_samples: int = 1


# By the names of --estimator. No other code knows an estimator. A variant can add some.
ESTIMATORS = {
    "gae": Estimator(gae, needs_critic=True, is_whitened=True),
    "grpo": Estimator(grpo, least_samples=2),
    "rloo": Estimator(rloo, least_samples=2),
    "reinforce": Estimator(reinforce, is_whitened=True),
    "dr_grpo": Estimator(dr_grpo, least_samples=2),
    "reinforce_pp": Estimator(dr_grpo, is_whitened=True, least_samples=2),
}


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
    # The std of equal rewards is nothing but rounding.
    std = std.where(std > 1e-9, 0.0)
    return tuple(numbers.to(rewards.device) for numbers in (mean, std, count[inverse]))


def compute_advantages(batch: Batch, cfg) -> dict[str, float]:
    """Adds `advantages` and `returns`, (T,), to the batch; returns what to log.

    The advantages in the batch have the weights of --loss_mean, those in the log do not.
    """
    advantages = raw_advantages(batch, cfg)  # (T,)
    returns = critic_targets(batch, advantages, cfg)  # (T,)
    if cfg.advantage_normalization and ESTIMATORS[cfg.estimator].is_whitened:
        advantages = whiten(advantages, batch, cfg)
    stats = advantage_stats(batch, advantages, returns)
    batch.per_token["advantages"] = (advantages * token_weights(batch, cfg)).float()
    batch.per_token["returns"] = returns.float()
    return stats


def critic_targets(batch: Batch, advantages: Tensor, cfg) -> Tensor:
    """Returns what the critic learns: raw advantages + values, (T,)."""
    return advantages + flat_values(batch)


def raw_advantages(batch: Batch, cfg) -> Tensor:
    """Returns the estimator's advantages before whitening, (T,)."""
    # These tensors are large, and the sampler sleeps: on a GPU they are computed there.
    mask = batch.mask.to(batch.device)  # (N, S)
    values = torch.zeros_like(mask, dtype=torch.float64)  # (N, S)
    values[mask] = flat_values(batch)
    inputs = (batch.rewards.to(batch.device), values, mask, batch.groups.to(batch.device), cfg)
    scores = ESTIMATORS[cfg.estimator].function(*inputs)  # (N,) or (N, S)
    return scores.reshape(len(mask), -1).expand_as(values)[mask]  # (T,)


def flat_values(batch: Batch) -> Tensor:
    """The critic's values in float64, (T,); 0 without a critic."""
    if "values" in batch.per_token:
        return batch.per_token["values"].double()
    count = int(batch.response_lengths.sum())
    return torch.zeros(count, dtype=torch.float64, device=batch.device)


def whiten(advantages: Tensor, batch: Batch, cfg) -> Tensor:
    """Mean 0 and population std 1 over the response tokens of all samples that count, (T,)."""
    parts = batch.split(advantages)
    used = torch.cat([parts[i] for i in samples_that_count(batch, cfg)] or parts)
    spread = used.var(correction=0).sqrt().clamp(min=1e-8)
    return (advantages - used.mean()) / spread


def advantage_stats(batch: Batch, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    stats = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    stats["return"] = returns.mean()
    variance = returns.var(correction=0)
    if "values" in batch.per_token and variance > 0:
        unexplained = (returns - flat_values(batch)).var(correction=0)
        stats["explained_variance"] = 1 - unexplained / variance
    return {key: value.item() for key, value in stats.items()}


def token_weights(batch: Batch, cfg) -> Tensor:
    """--loss_mean as a weight of each token's advantage: (T,), or one number for all.

    `update` divides a loss by all tokens, which is N times the mean length. To divide by another
    length, the advantages are weighted; packing, micro-batches and ranks do not matter then.
    """
    counting = samples_that_count(batch, cfg) or batch.all_samples()
    mean_length = batch.response_lengths[counting].double().mean()  # ()
    if cfg.loss_mean == "sequence":
        # Each sample is divided by its own length (GRPO, arXiv 2402.03300, eq. 3).
        return mean_length / batch.spread(batch.response_lengths)
    if cfg.loss_mean == "constant":
        # All samples are divided by the same length (Dr. GRPO, arXiv 2503.20783).
        return mean_length / cfg.generate_max_len
    return torch.ones(())


# ---- passes and losses -----------------------------------------------------------------------


def token_passes(policy, critic, reference, batch: Batch, cfg, step):
    """Adds to the batch what must be computed before anything is learnt, (T,) each."""
    if critic:
        batch.per_token["values"] = compute_values(critic, batch, cfg)
    if reference:
        # It is only logged.
        batch.per_token["ref_logprobs"] = compute_logprobs(reference, batch, cfg)


def compute_values(critic, batch: Batch, cfg) -> Tensor:
    """Computes V(s_t) of every response token, (T,), the same on every rank."""
    return token_pass(batch, cfg, critic)


def compute_logprobs(policy, batch: Batch, cfg) -> Tensor:
    """Computes log p of every response token, (T,), the same on every rank."""

    def forward(micro):
        return policy(micro, temperatures(batch, micro, cfg))[0]  # (t,)

    return token_pass(batch, cfg, forward)


@torch.no_grad()
def token_pass(batch: Batch, cfg, forward) -> Tensor:
    """Computes one number per response token, (T,), by `forward(micro)`."""
    numbers = torch.zeros(int(batch.response_lengths.sum()), device=batch.device)  # (T,)
    for micro in micro_batches(batch, batch.all_samples(), cfg):
        numbers.index_add_(0, micro.flat_index, forward(micro) * micro.mask)
    # Exactly one rank has computed each token; the others add 0.
    dist.all_reduce(numbers)
    return numbers


def samples_to_learn_from(batch: Batch, cfg) -> list[int]:
    """The samples with an advantage that is not 0. The others have no gradient."""
    parts = batch.split(batch.per_token["advantages"].cpu())
    return [i for i in samples_that_count(batch, cfg) if parts[i].any()]


def temperatures(batch: Batch, micro: MicroBatch, cfg) -> float | Tensor:
    """The temperature of the log-probs: one for all tokens, or (t,)."""
    return cfg.temperature


def policy_loss(policy, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """Sums `token_loss`. Returns it with what to log: sums over tokens."""
    logprobs, entropy = policy(micro, temperatures(batch, micro, cfg))  # (t,), (t,)
    advantages = batch.per_token["advantages"][micro.flat_index] * micro.mask  # (t,)
    stats = {"entropy": (entropy.detach() * micro.mask).sum()}
    if "logprobs" in batch.per_token:
        # --log_ratio compares the trainer with the sampler.
        sampled = batch.per_token["logprobs"][micro.flat_index]  # (t,)
        stats |= ratio_stats((logprobs.detach() - sampled) * micro.mask, micro.mask)
    if "ref_logprobs" in batch.per_token:
        reference = batch.per_token["ref_logprobs"][micro.flat_index]  # (t,)
        stats["kl"] = k3((reference - logprobs.detach()) * micro.mask).sum()
    losses = token_loss(logprobs, entropy, advantages, batch, micro, cfg, stats)  # (t,)
    loss = (losses * micro.mask).sum()
    stats["policy_loss"] = loss.detach()
    return loss, stats


# HACK HERE: the policy's loss.
def token_loss(logprobs, entropy, advantages, batch, micro, cfg, stats) -> Tensor:
    """-A_t log p(a_t), which has the clipped objective's gradient at ratio 1
    (arXiv 1707.06347, eq. 7). logprobs, entropy, advantages and what comes back are (t,); a sum
    over tokens that is put into `stats` is logged."""
    return -(advantages * logprobs)


def ratio_stats(log_ratio: Tensor, mask: Tensor):
    """Trainer against sampler, both (t,): the ratio is 1 up to rounding, or something is wrong."""
    ratio = log_ratio.exp()  # (t,)
    stats = {"ratio": (ratio * mask).sum(), "ratio_max": ratio.max()}
    stats["clipfrac"] = ((ratio - 1).abs() > 0.2).float().sum()
    stats["approx_kl"] = k3(log_ratio).sum()
    return stats


def k3(log_ratio: Tensor) -> Tensor:
    """An unbiased, never negative estimate of a KL divergence (joschu.net/blog/kl-approx.html)."""
    return log_ratio.exp() - 1 - log_ratio


def critic_loss(critic, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """0.5 max((V - return)^2, (clip(V, V_old +- value_clip) - return)^2), summed
    (ORZ's ValueLoss)."""
    values = critic(micro)  # (t,)
    old = batch.per_token["values"][micro.flat_index]  # (t,)
    returns = batch.per_token["returns"][micro.flat_index]  # (t,)
    clipped = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)  # (t,)
    worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)  # (t,)
    loss = 0.5 * (worse * micro.mask).sum()
    stats = {"critic_loss": loss.detach(), "critic_values": (values.detach() * micro.mask).sum()}
    return loss, stats


# ---- updates ---------------------------------------------------------------------------------


def train_critic(critic, batch: Batch, cfg, step):
    """Takes critic_updates updates, each over its part of the samples."""
    samples = samples_that_count(batch, cfg)
    past = step * cfg.critic_updates
    rates = []
    for k in range(cfg.critic_updates):
        rates.append(learning_rate(cfg.critic_learning_rate, cfg.warmup_updates, past + k))
    return update_in_parts(critic, critic_loss, batch, samples, rates, cfg, step)


def train_policy(policy, batch: Batch, cfg, step, total_steps):
    """Takes one update over all samples, so the ratio is 1 and a clip would do nothing."""
    lr = policy_rate(cfg, step, total_steps)
    # A sample without a gradient does not pass through the model. Its tokens still count.
    denominator = int(batch.response_lengths[samples_that_count(batch, cfg)].sum())
    samples = samples_to_learn_from(batch, cfg)
    return update(policy, policy_loss, batch, samples, lr, cfg, denominator)


def policy_rate(cfg, past_updates, total_updates):
    """The policy's learning rate after so many updates of a run of `total_updates`."""
    return learning_rate(cfg.actor_learning_rate, cfg.warmup_updates, past_updates)


def update_in_parts(learner, loss_fn, batch: Batch, samples, rates, cfg, step):
    """Takes an update at each of the learning rates, over its part of one shuffle of `samples`.

    There are never more updates than samples. Returns the means of what the updates return.
    """
    shuffled = np.random.default_rng(hash64(cfg.seed, step, learner.name)).permutation(samples)
    parts = np.array_split(shuffled, max(1, min(len(rates), len(samples))))
    history = []
    for part, lr in zip(parts, rates):
        history.append(update(learner, loss_fn, batch, part.tolist(), lr, cfg))
    return {key: float(np.mean([stats[key] for stats in history])) for key in history[0]}


def learning_rate(peak, warmup, past_updates):
    """The rate of the next update. It rises linearly from peak / warmup to peak, and stays."""
    if past_updates < warmup:
        return peak * (past_updates + 1) / warmup
    return peak


def update(learner, loss_fn, batch: Batch, samples: list[int], lr, cfg, denominator=None):
    """Takes one update over `samples`, dealt to all ranks. Returns global means.

    The loss is a sum over response tokens, divided by `denominator`: the response tokens on all
    ranks together (those of `samples` if no denominator is given). That number is known beforehand,
    so packing, micro-batches and ranks do not change the gradient. Without samples nothing is
    updated. Raises FloatingPointError on all ranks, with the weights unchanged, if a number is not
    finite.
    """
    passed = int(batch.response_lengths[samples].sum())
    if denominator is None:
        denominator = passed
    micros = micro_batches(batch, samples, cfg)
    history = []
    for micro in micros:
        loss, stats = loss_fn(learner, batch, micro, cfg)
        # The learner averages gradients over ranks. The number of ranks makes the mean a sum.
        scaled = loss * (dist.get_world_size() / denominator)
        learner.backward(scaled, is_last=micro is micros[-1])
        history.append(stats)
    stats = {}
    grad_norm = 0.0
    if micros:
        stats = reduce_stats(history, denominator, passed)
        if not np.isfinite(list(stats.values())).all():
            raise FloatingPointError(f"{learner.name}: the loss is not finite: {stats}")
        grad_norm = learner.apply_update(lr)
    own = {"grad_norm": grad_norm, "lr": lr, "micro_batches": len(micros)}
    own["tokens"] = sum(batch.sample_lengths[i] for i in samples)
    return stats | {f"{learner.name}_{key}": value for key, value in own.items()}


def reduce_stats(history, denominator, passed):
    """Joins the statistics of all micro-batches and ranks.

    A loss is divided by the update's denominator, another sum by the tokens that passed through the
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
