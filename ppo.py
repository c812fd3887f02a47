"""PPO without its redundant parts: batch, packing, advantages, the two losses, the updates.

This file never reads text. It needs torch, numpy and lib/common.py. An update is one optimizer
step. A learner is the policy or the critic: it is called like a model, and has `name`, `device`,
`backward(loss, is_last)` and `apply_update(lr)`, which returns the gradient's norm. lib/models.py
has the class.

Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py:
- There is one denominator. A loss is a sum over response tokens divided by the *global* number of
  response tokens in the update. So packing, micro-batches and ranks do not change the gradient.
  ORZ takes a mean of the means of its packs.
- The policy's loss has no old log-probs, no ratio of new to old and no clip. With one update per
  rollout this ratio is 1 and the clip does nothing.
- `grpo` divides by the group's standard deviation and does not whiten. ORZ's GRPO whitens and does
  not divide.

Shapes: N samples, S tokens of the longest response, T response tokens of the batch, M response
tokens of a micro-batch, R packed rows, L row length.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lib.common import gather, hash64, stop_together


@dataclass
class Batch:
    """All samples of a step, the same on every rank.

    A flat tensor (T,) holds the response tokens of all samples one after the other. Those of sample
    i are start[i] to start[i] + response_lengths[i].
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    groups: Tensor  # (N,) index of the sample's problem among the problems of the step
    rewards: Tensor  # (N,) float64, what each sample is paid: the result of the function `paid`
    device: torch.device  # of the flat tensors
    # (T,) each: values, advantages, returns, logprobs (the sampler's, if it returned them)
    per_token: dict[str, Tensor]
    samples: list  # (N) the samples of rollout.py

    def __post_init__(self):
        self.response_lengths = torch.tensor([len(ids) for ids in self.response_ids])  # (N,)
        self.start = self.response_lengths.cumsum(0) - self.response_lengths  # (N,)
        # N numbers: tokens of prompt and response together
        self.sample_lengths = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]
        # The mask comes from the lengths alone, because a response may contain the padding id.
        self.mask = (
            torch.arange(int(self.response_lengths.max())) < self.response_lengths[:, None]
        )  # (N, S)

    def all_indices(self) -> list[int]:
        """The indices of all samples. In this file `indices` are always indices of samples."""
        return list(range(len(self.sample_lengths)))

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cuts (T,) into one tensor for each sample."""
        return numbers.split(self.response_lengths.tolist())

    def spread(self, values: Tensor) -> Tensor:
        """Repeats the value of a sample for each of its response tokens: (N,) becomes (T,)."""
        return values.repeat_interleave(self.response_lengths).to(self.device)


@dataclass
class MicroBatch:
    """R rows of packed samples. A model computes them in one forward pass.

    Call a model of transformers as `model(**micro.model_inputs())`. Without these arguments the
    samples of a row see each other, and there is no error. The M response tokens of these rows are
    predicted, each from the position before it: `output[micro.predict]`.
    """

    input_ids: Tensor  # (R, L)
    # In each sample the positions restart at 0. transformers finds the samples by these zeros, and
    # masks what crosses a border.
    position_ids: Tensor  # (R, L)
    predict: Tensor  # (R, L) bool: is the next token a response token?
    token_ids: Tensor  # (M,) the response tokens
    flat_index: Tensor  # (M,) their places in the batch's flat tensors
    mask: Tensor  # (M,) 1.0, or 0.0 for a filler
    # FlashAttention's cu_seqlens: where each sample and each padding starts if all rows are laid
    # end to end. The last number is R * L. Rows of one sample have no borders.
    borders: Tensor | None  # (samples + paddings + 1,) int32
    longest: int  # tokens of the longest sample or padding

    def model_inputs(self) -> dict:
        """The arguments of a model of transformers."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # With a cache transformers does not separate the samples of a row.
            "use_cache": False,
            # varlen and FlashAttention need the samples' borders. sdpa and eager derive the borders
            # from the positions and ignore these arguments.
            "cu_seq_lens_q": self.borders,
            "cu_seq_lens_k": self.borders,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def make_batch(samples, device, cfg, rewards=None) -> Batch:
    """Makes a batch of samples. The samples of one problem form a group.

    rewards: (N). Without them rank 0 calls `paid`, and this function is a collective.
    """
    if rewards is None:
        # A variant's `paid` may be random. So rank 0 decides for all ranks. This `stop_together` is
        # inside the one of train.py, which lets Stopped pass.
        with stop_together():
            rewards = paid(samples, cfg) if dist.get_rank() == 0 else None
        rewards = gather(rewards)[0]
    prompt_ids = [sample.request.problem.prompt_ids for sample in samples]
    response_ids = [sample.response_ids for sample in samples]
    groups = torch.tensor([sample.request.group for sample in samples])  # (N,)
    rewards = torch.tensor(rewards, dtype=torch.float64)  # (N,)
    batch = Batch(prompt_ids, response_ids, groups, rewards, device, {}, samples)
    if samples[0].logprobs:
        logprobs = [x for sample in samples for x in sample.logprobs]
        batch.per_token["logprobs"] = torch.tensor(logprobs, device=device)  # (T,)
    return batch


# HACK HERE: the rewards to learn from. The logs show the grader's rewards too (sample.reward).
def paid(samples, cfg) -> list[float]:
    """A reward for each sample: the grader's."""
    return [sample.reward for sample in samples]


def samples_that_count(batch: Batch, cfg) -> list[int]:
    """The indices of the samples that the losses and the whitening use. A variant may leave some
    out. The mean of a group always uses all samples of the group."""
    return batch.all_indices()


# ---- packing ---------------------------------------------------------------------------------


def longest_first(sizes: list[int], indices: list[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-sizes[i], i))


def deal(sizes: list[int], indices: list[int], world: int) -> list[list[int]]:
    """Deals samples to ranks: the longest first, each to the rank with the fewest tokens."""
    loads = [0] * world  # tokens
    dealt = [[] for _ in range(world)]
    for i in longest_first(sizes, indices):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += sizes[i]
    return dealt


def pack(sizes: list[int], indices: list[int], row_limit: int) -> list[list[int]]:
    """Best-fit decreasing: each sample goes into the fullest row that has room for it."""
    rows = []
    rooms = []  # (tokens left, row), sorted
    for i in longest_first(sizes, indices):
        # (size,) sorts before (size, row). So this is the smallest room that is large enough.
        fitting = bisect_left(rooms, (sizes[i],))
        if fitting < len(rooms):
            room, row = rooms.pop(fitting)
        else:
            room = row_limit
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - sizes[i], row))
    return rows


def cut_by_length(sizes: list[int], indices: list[int], limit: int) -> list[list[list[int]]]:
    """Makes micro-batches of rows of one sample, the longest first. Each micro-batch has at most
    `limit` tokens, padding included."""
    ordered = longest_first(sizes, indices)
    micros = []
    while ordered:
        count = max(1, limit // sizes[ordered[0]])
        micros.append([[i] for i in ordered[:count]])
        ordered = ordered[count:]
    return micros


def build_rows(batch: Batch, rows: list[list[int]], alone=False) -> MicroBatch:
    """Makes the tensors of these rows. rows: the indices of the samples of each row.

    alone: each row has one sample. The positions of its padding count on from its last position. No
    token sees a later token, so the padding changes nothing.
    """
    longest_row = max(sum(batch.sample_lengths[i] for i in row) for row in rows)
    shape = (len(rows), longest_row)  # (R, L)
    ids = []  # of all rows
    parts = []  # (tokens, response tokens, start in the batch) of each sample and each padding
    for row in rows:
        for i in row:
            ids += batch.prompt_ids[i] + batch.response_ids[i]
            parts.append((batch.sample_lengths[i], len(batch.response_ids[i]), int(batch.start[i])))
        # The padding of a row is like one more sample without response tokens.
        padding = longest_row - sum(batch.sample_lengths[i] for i in row)
        if padding > 0:
            ids += [0] * padding
            parts.append((padding, 0, 0))
    parts = torch.tensor(parts)  # (P, 3)
    lengths = parts[:, 0]  # (P,)
    ends = lengths.cumsum(0)  # (P,)
    # From here on each token has the numbers of its part.
    length, response, start = parts.repeat_interleave(lengths, 0).unbind(1)  # (R * L,) each
    # The tokens from this one to the end of its part. Both are included.
    left = ends.repeat_interleave(lengths) - torch.arange(len(ids))  # (R * L,)
    # Position t predicts token t + 1. So the prompt's last position predicts the first response
    # token, and the last position predicts nothing.
    predict = (left <= response + 1) & (left > 1)  # (R * L,)
    positions = length - left  # (R * L,)
    if alone:
        positions = torch.arange(longest_row).repeat(len(rows))
    input_ids = torch.tensor(ids)  # (R * L,)
    tensors = {
        "input_ids": input_ids.view(shape),
        "position_ids": positions.view(shape),
        "predict": predict.view(shape),
        "token_ids": input_ids.roll(-1)[predict],  # (M,)
        "flat_index": (start + response + 1 - left)[predict],  # (M,)
        "mask": torch.ones(int(predict.sum())),  # (M,)
        "borders": None if alone else torch.cat([ends.new_zeros(1), ends]).int(),  # (P + 1,)
    }
    tensors = {name: x if x is None else x.to(batch.device) for name, x in tensors.items()}
    return MicroBatch(**tensors, longest=int(lengths.max()))


def filler(device) -> MicroBatch:
    """Makes a micro-batch of one token with mask 0, for a rank with fewer micro-batches."""
    # One response token, so that the head is called too.
    zero = torch.zeros(1, dtype=torch.int64, device=device)  # (1,)
    return MicroBatch(
        input_ids=zero[None],  # (1, 1)
        position_ids=zero[None],  # (1, 1)
        predict=torch.ones((1, 1), dtype=torch.bool, device=device),
        token_ids=zero,
        flat_index=zero,
        mask=zero.float(),
        borders=torch.arange(2, dtype=torch.int32, device=device),  # (2,)
        longest=1,
    )


def micro_batches(batch: Batch, indices: list[int], cfg):
    """Yields (micro-batch of this rank, is it the last one). Without indices there is none.

    Each rank gets the same number of micro-batches, because the forward and backward passes of ZeRO
    have collectives. Each micro-batch is made when the loop asks for it: all of them together would
    take 36 bytes a token, and a GPU computes while the CPU makes the next one.
    """
    mine = deal(batch.sample_lengths, indices, dist.get_world_size())[dist.get_rank()]
    rows_per_micro = cfg.micro_train_batch_size
    alone = cfg.packing == "alone"
    if alone:
        limit = rows_per_micro * cfg.packing_max_len
        cuts = cut_by_length(batch.sample_lengths, mine, limit)
    else:
        rows = pack(batch.sample_lengths, mine, cfg.packing_max_len)
        starts = range(0, len(rows), rows_per_micro)
        cuts = [rows[start : start + rows_per_micro] for start in starts]
    most = torch.tensor(len(cuts), device=batch.device)  # ()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for k in range(int(most)):
        micro = build_rows(batch, cuts[k], alone) if k < len(cuts) else filler(batch.device)
        yield micro, k == int(most) - 1


# ---- advantages ------------------------------------------------------------------------------


# HACK HERE: an estimator maps rewards (N,), values (N, S), mask (N, S) and groups (N,) to
# advantages (N, S), or to scores (N,), which all tokens of a sample get. All are float64.
def gae(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t
    (arXiv 1506.02438, eq. 16)."""
    if cfg.gamma == cfg.lambd == 1:
        # Then the sum is the reward minus V_t.
        return (rewards[:, None] - values).mul_(mask)
    last = mask.sum(1, keepdim=True) - 1  # (N, 1)
    # First `sums` holds the delta_t. Values are 0 after the response, so all delta are 0 there. The
    # last token has the reward.
    sums = -values  # (N, S)
    sums[:, :-1].add_(values[:, 1:], alpha=cfg.gamma)
    sums.scatter_add_(1, last, rewards[:, None])
    for t in reversed(range(values.shape[1] - 1)):
        sums[:, t] += cfg.gamma * cfg.lambd * sums[:, t + 1]
    return sums


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group population std (arXiv 2402.03300). In a group with equal
    rewards it is exactly 0."""
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    # Rounding could leave 1e-17 instead of 0. `samples_to_learn_from` looks for exact zeros.
    return torch.where(std > 0, (rewards - mean) / std, 0.0)


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of the *other* samples of the group (arXiv 2402.14740). It is the same as
    (r - mean of all n samples) * n / (n - 1)."""
    mean, std, count = group_stats(rewards, groups)  # (N,), (N,), (N,)
    return torch.where(std > 0, (rewards - mean) * count / (count - 1), 0.0)


def reinforce(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of all samples of the batch (Williams 1992 with the batch's mean as baseline)."""
    return rewards - rewards.mean()


@dataclass(frozen=True)
class Estimator:
    """The function of an estimator, and what the run must do for it."""

    function: Callable
    needs_critic: bool = False
    is_whitened: bool = False  # Does compute_advantages whiten the result?
    least_samples: int = 1  # of a problem; 2 where the function compares samples


# The keys are the values of --estimator. Other code asks for these fields and not for a name.
ESTIMATORS = {
    "gae": Estimator(gae, needs_critic=True, is_whitened=True),
    "grpo": Estimator(grpo, least_samples=2),
    "rloo": Estimator(rloo, least_samples=2),
    "reinforce": Estimator(reinforce, is_whitened=True),
}


def group_stats(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, population std and size of each sample's group, (N,) each.

    In a group with equal rewards the std is exactly 0.
    """
    # These tensors are small. On a GPU each round of the loop would wait for the GPU.
    on_cpu = rewards.cpu()
    groups = groups.cpu()
    mean, std, count = (torch.zeros_like(on_cpu) for _ in range(3))
    for group in groups.unique():
        members = groups == group  # (N,) bool
        mean[members] = on_cpu[members].mean()
        std[members] = on_cpu[members].std(correction=0)
        count[members] = members.sum().double()
    # A std below this is rounding: the rewards are equal.
    std[std < 1e-9] = 0.0
    return mean.to(rewards.device), std.to(rewards.device), count.to(rewards.device)


def compute_advantages(batch: Batch, cfg) -> dict[str, float]:
    """Adds `advantages` and `returns`, (T,), to the batch. Returns the numbers to log."""
    advantages = raw_advantages(batch, cfg)  # (T,)
    returns = critic_targets(batch, advantages, cfg)  # (T,)
    if ESTIMATORS[cfg.estimator].is_whitened:
        advantages = whiten(advantages, batch, cfg)
    stats = advantage_stats(batch, advantages, returns)
    batch.per_token["advantages"] = advantages.float()
    batch.per_token["returns"] = returns.float()
    return stats


def critic_targets(batch: Batch, advantages: Tensor, cfg) -> Tensor:
    """Returns what the critic learns: raw advantages + values, (T,)."""
    return advantages + flat_values(batch)


def raw_advantages(batch: Batch, cfg) -> Tensor:
    """Returns the estimator's advantages before whitening, (T,)."""
    # The tensors (N, S) are large. The sampler sleeps, so the GPU has room for them.
    mask = batch.mask.to(batch.device)  # (N, S)
    values = torch.zeros_like(mask, dtype=torch.float64)  # (N, S)
    values[mask] = flat_values(batch)
    inputs = (batch.rewards.to(batch.device), values, mask, batch.groups.to(batch.device), cfg)
    scores = ESTIMATORS[cfg.estimator].function(*inputs)  # (N,) or (N, S)
    # (N,) becomes (N, 1), and each token gets the score of its sample.
    return scores.reshape(len(mask), -1).expand_as(values)[mask]  # (T,)


def flat_values(batch: Batch) -> Tensor:
    """The critic's values in float64, (T,). Without a critic they are 0."""
    if "values" in batch.per_token:
        return batch.per_token["values"].double()
    count = int(batch.response_lengths.sum())
    return torch.zeros(count, dtype=torch.float64, device=batch.device)


def whiten(advantages: Tensor, batch: Batch, cfg) -> Tensor:
    """Mean 0 and population std 1 over the response tokens of all samples that count, (T,)."""
    parts = batch.split(advantages)
    # If no sample counts, use all of them. The mean of nothing would be NaN.
    used = torch.cat([parts[i] for i in samples_that_count(batch, cfg)] or parts)
    std = used.var(correction=0).sqrt().clamp(min=1e-8)
    return (advantages - used.mean()) / std


def advantage_stats(batch: Batch, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    stats = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    stats["return"] = returns.mean()
    variance = returns.var(correction=0)
    if "values" in batch.per_token and variance > 0:
        unexplained = (returns - flat_values(batch)).var(correction=0)
        stats["explained_variance"] = 1 - unexplained / variance
    return {key: value.item() for key, value in stats.items()}


# ---- passes and losses -----------------------------------------------------------------------


def token_passes(policy, critic, batch: Batch, cfg, step):
    """Adds the critic's values, (T,), to the batch. A variant may add passes of its own here, also
    passes of the policy. All of them come before the first update."""
    if critic:
        batch.per_token["values"] = compute_values(critic, batch, cfg)


def compute_values(critic, batch: Batch, cfg) -> Tensor:
    """V(s_t) of every response token, (T,), the same on every rank. A collective."""
    return forward_pass(batch, cfg, critic)


def compute_logprobs(policy, batch: Batch, cfg) -> Tensor:
    """log p of every response token, (T,), the same on every rank. A collective."""

    def forward(micro):
        return policy(micro, cfg.temperature)[0]  # (M,)

    return forward_pass(batch, cfg, forward)


@torch.no_grad()
def forward_pass(batch: Batch, cfg, forward) -> Tensor:
    """One number for each response token, (T,). forward(micro) returns those of a micro-batch."""
    numbers = torch.zeros(int(batch.response_lengths.sum()), device=batch.device)  # (T,)
    for micro, _ in micro_batches(batch, batch.all_indices(), cfg):
        numbers.index_add_(0, micro.flat_index, forward(micro) * micro.mask)
    # One rank has computed the token's number. The other ranks add 0.
    dist.all_reduce(numbers)
    return numbers


def samples_to_learn_from(batch: Batch, cfg) -> list[int]:
    """The indices of the samples with an advantage other than 0. The others have no gradient in
    `token_loss`. A variant whose loss has other terms replaces this function."""
    parts = batch.split(batch.per_token["advantages"].cpu())
    return [i for i in samples_that_count(batch, cfg) if parts[i].any()]


def policy_loss(policy, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """Returns the sum of `token_loss`, and the numbers to log as sums over tokens."""
    logprobs, entropy = policy(micro, cfg.temperature)  # (M,), (M,)
    advantages = batch.per_token["advantages"][micro.flat_index]  # (M,)
    stats = {"entropy": (entropy.detach() * micro.mask).sum()}
    losses = token_loss(logprobs, entropy, advantages, batch, micro, cfg, stats)  # (M,)
    loss = (losses * micro.mask).sum()
    stats["policy_loss"] = loss.detach()
    return loss, stats


# HACK HERE: the policy's loss.
def token_loss(logprobs, entropy, advantages, batch, micro, cfg, stats) -> Tensor:
    """-A_t log p(a_t), (M,). At ratio 1 its gradient is that of PPO's clipped objective
    (arXiv 1707.06347, eq. 7). logprobs, entropy and advantages are (M,). To log a number, put its
    sum over the tokens into `stats`."""
    return -(advantages * logprobs)


def critic_loss(critic, batch: Batch, micro: MicroBatch, cfg) -> tuple[Tensor, dict]:
    """The sum of 0.5 max((V - return)^2, (clip(V, V_old +- value_clip) - return)^2)
    (ORZ's ValueLoss). Returns it and the numbers to log."""
    values = critic(micro)  # (M,)
    old = batch.per_token["values"][micro.flat_index]  # (M,)
    returns = batch.per_token["returns"][micro.flat_index]  # (M,)
    clipped = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)  # (M,)
    worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)  # (M,)
    loss = 0.5 * (worse * micro.mask).sum()
    stats = {"critic_loss": loss.detach(), "critic_values": (values.detach() * micro.mask).sum()}
    return loss, stats


# ---- updates ---------------------------------------------------------------------------------


def train_critic(critic, batch: Batch, cfg, step):
    """Makes critic_updates updates. Each learns from its part of the samples."""
    indices = samples_that_count(batch, cfg)
    past = step * cfg.critic_updates
    rates = []
    for k in range(cfg.critic_updates):
        rates.append(learning_rate(cfg.critic_learning_rate, cfg.warmup_updates, past + k))
    return update_in_parts(critic, critic_loss, batch, indices, rates, cfg, step)


def train_policy(policy, batch: Batch, cfg, step, total_steps):
    """Makes one update over all samples. So PPO's ratio is 1, and its clip would do nothing."""
    lr = policy_rate(cfg, step, total_steps)
    # A sample without a gradient does not pass through the model. Its tokens still count.
    denominator = int(batch.response_lengths[samples_that_count(batch, cfg)].sum())
    indices = samples_to_learn_from(batch, cfg)
    return update(policy, policy_loss, batch, indices, lr, cfg, denominator)


def policy_rate(cfg, past_updates, total_updates):
    """The policy's learning rate after `past_updates` updates. Variants use `total_updates`."""
    return learning_rate(cfg.actor_learning_rate, cfg.warmup_updates, past_updates)


def update_in_parts(learner, loss_fn, batch: Batch, indices, rates, cfg, step):
    """Shuffles the samples, cuts them into one part for each rate, and makes an update per part.

    With fewer samples than rates there is one sample in each part. Returns {name: mean over the
    updates}, to log.
    """
    shuffled = np.random.default_rng(hash64(cfg.seed, step, learner.name)).permutation(indices)
    parts = np.array_split(shuffled, max(1, min(len(rates), len(indices))))
    history = []
    for part, lr in zip(parts, rates):
        history.append(update(learner, loss_fn, batch, part.tolist(), lr, cfg))
    return {key: float(np.mean([stats[key] for stats in history])) for key in history[0]}


def learning_rate(peak, warmup, past_updates):
    """The rate of the next update. It rises linearly from peak / warmup to peak, and stays."""
    if past_updates < warmup:
        return peak * (past_updates + 1) / warmup
    return peak


def update(learner, loss_fn, batch: Batch, indices: list[int], lr, cfg, denominator=None):
    """Makes one update over these samples, dealt to all ranks. Returns global means to log.

    The loss is a sum over response tokens divided by `denominator`. By default this is the number
    of response tokens of these samples, on all ranks together. It is known before the first pass,
    so packing, micro-batches and ranks do not change the gradient. Without indices there is no
    update. If a number is not finite, no weight is changed, and all ranks raise FloatingPointError.
    """
    tokens_in_passes = int(batch.response_lengths[indices].sum())
    if denominator is None:
        denominator = tokens_in_passes
    history = []
    for micro, is_last in micro_batches(batch, indices, cfg):
        loss, stats = loss_fn(learner, batch, micro, cfg)
        # The learner takes the mean of the ranks' gradients. We need their sum.
        scaled = loss * (dist.get_world_size() / denominator)
        learner.backward(scaled, is_last)
        history.append(stats)
    stats = {}
    grad_norm = 0.0
    if history:
        stats = reduce_stats(history, denominator, tokens_in_passes)
        if not np.isfinite(list(stats.values())).all():
            raise FloatingPointError(f"{learner.name}: the loss is not finite: {stats}")
        grad_norm = learner.apply_update(lr)
    own_stats = {"grad_norm": grad_norm, "lr": lr, "micro_batches": len(history)}
    # This count includes the prompts.
    own_stats["tokens"] = sum(batch.sample_lengths[i] for i in indices)
    return stats | {f"{learner.name}_{key}": value for key, value in own_stats.items()}


def reduce_stats(history, denominator, tokens_in_passes):
    """Joins the numbers to log of all micro-batches and ranks.

    A sum whose name ends in "loss" is divided by the update's denominator. Other sums are divided
    by the tokens in the passes. A name that ends in "_max" is a maximum.
    """
    totals = {}
    for key in history[0]:
        column = torch.stack([stats[key] for stats in history]).double()  # (micro-batches,)
        if key.endswith("_max"):
            total = column.max()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        else:
            divisor = denominator if key.endswith("loss") else tokens_in_passes
            total = column.sum() / divisor
            dist.all_reduce(total)
        totals[key] = total.item()
    return totals
