"""PPO with one update of the policy per rollout, so its ratio is 1 and is not computed.

The class Recipe has the decisions of a run as methods: edit one, or write a variant, which is a
subclass. The functions around it do the work that no variant changes. This file never reads text.
A step has a rollout, several updates of the critic and one of the policy. An update is one
optimizer step. A pass computes a number for each response token with a model, without an update.

Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py:
- All losses have one denominator. A loss is a sum over response tokens divided by the *global*
  number of response tokens in the update. So packing, micro-batches and ranks do not change the
  gradient. ORZ takes a mean of the means of its rows.
- The policy's loss has no old log-probs, no ratio of new to old and no clip. p_old is the policy
  before its only update. So p = p_old, the clip does nothing, and grad(p / p_old) = grad(p) / p =
  grad(log p). This is PPO's gradient.
- `grpo` divides by the group's standard deviation and does not whiten. ORZ's GRPO whitens and does
  not divide.

Shapes: N samples, S most response tokens of a sample, T response tokens of the batch, M response
tokens of a micro-batch, R packed rows, L row length. `indices` are always indices of samples. A
*response token* is one that the policy has drawn. A response may also have replies of a tool in it
(rollout.py). The models read their tokens, as those of the prompt, and nothing is learnt there.

A learner is the policy or the critic. Its input `micro` is a MicroBatch, which has the tokens of
some samples. `x[micro.flat_index]` takes their numbers, (M,), out of x, (T,). `micro.real` is 1,
and 0 for the only token of a filler (see `filler`). `policy(micro, temperature)` returns log-probs
and entropies, (M,) each, and `critic(micro)` returns values, (M,). A learner has `name`, `device`,
`backward(loss, is_last)` for each micro-batch, and `apply_update(lr)` after the last one, which
returns the gradient's norm. The class Learner of nanoorz/models.py is one.

To use this file elsewhere, copy nanoorz/ranks.py and nanoorz/flags.py, too. Call
`start_distributed` of ranks.py first.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanoorz.flags import flag, require
from nanoorz.ranks import UserError, gather, hash64

# ---- batch -----------------------------------------------------------------------------------


@dataclass
class Batch:
    """All samples of a step, the same on every rank.

    A flat tensor (T,) has a number for each response token of all samples, one sample after the
    other. The numbers of sample i begin at start[i]. There are response_lengths[i] of them.
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]  # with the tokens of replies
    groups: Tensor  # (N,) the same number for all samples of a problem
    rewards: Tensor  # (N,) float64, the rewards to learn from: those of Recipe.paid
    device: torch.device  # of the flat tensors. The other tensors are on the CPU.
    # {name: flat tensor}: values, advantages and returns, the sampler's logprobs if it was asked
    # for them, and what a variant adds.
    per_token: dict[str, Tensor]
    samples: list  # (N) the samples of rollout.py, for the methods of variants
    # of each id of response_ids: has the policy drawn it? None: it has drawn all
    drawn: list[list[bool]] | None = None

    def __post_init__(self):
        if self.drawn is None:
            self.drawn = [[True] * len(ids) for ids in self.response_ids]
        self.response_lengths = torch.tensor([sum(drawn) for drawn in self.drawn])  # (N,)
        self.start = self.response_lengths.cumsum(0) - self.response_lengths  # (N,)
        # N numbers: all tokens of prompt and response, also those of replies
        self.sample_lengths = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]
        # mask[i, t] is True if sample i has at least t + 1 response tokens.
        offsets = torch.arange(int(self.response_lengths.max()))  # (S,)
        self.mask = offsets < self.response_lengths[:, None]  # (N, S)

    def all_indices(self) -> list[int]:
        """The indices of all samples."""
        return list(range(len(self.sample_lengths)))

    def count_tokens(self, indices: list[int]) -> int:
        """The number of response tokens of these samples."""
        return int(self.response_lengths[indices].sum())

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cuts (T,) into one tensor for each sample."""
        return numbers.split(self.response_lengths.tolist())

    def select(self, numbers: Tensor, indices: list[int]) -> Tensor:
        """The numbers of some samples, at least of one: (T,) becomes a shorter tensor."""
        parts = self.split(numbers)
        return torch.cat([parts[i] for i in indices])

    def spread(self, numbers: Tensor) -> Tensor:
        """Repeats the number of a sample for each of its response tokens: (N,) becomes (T,)."""
        return numbers.repeat_interleave(self.response_lengths).to(self.device)


# ---- estimators ------------------------------------------------------------------------------


# An estimator maps rewards (N,), values (N, S), mask (N, S) and groups (N,) to advantages (N, S),
# or to scores (N,): then each token of a sample gets the score of the sample. All are float64.
# `cfg` is the recipe. Recipe.whiten subtracts the mean from the advantages of a whitened estimator.
# So a constant that is added to all advantages, as in `rewards - 0.5`, changes nothing there.


def gae(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t
    (arXiv 1506.02438, eq. 16)."""
    if cfg.gamma == cfg.lambd == 1:
        # (-V_t + V_{t+1}) + (-V_{t+1} + V_{t+2}) + ... + (-V_last + r) = r - V_t
        return (rewards[:, None] - values).mul_(mask)
    last = mask.sum(1, keepdim=True) - 1  # (N, 1)
    # Values are 0 after the response, so the deltas are 0 there. The last token has the reward.
    deltas = -values  # (N, S)
    deltas[:, :-1].add_(values[:, 1:], alpha=cfg.gamma)
    deltas.scatter_add_(1, last, rewards[:, None])
    return add_later_(deltas, cfg.gamma * cfg.lambd)


def grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """(r - group mean) / group population std, and 0 in a group with equal rewards.

    Source: arXiv 2402.03300. The paper's loss is the mean of the means over each response. Here it
    is the mean over all tokens. --variant loss_mean has the paper's.
    """
    mean, std, _ = group_stats(rewards, groups)  # (N,) each
    # `where` drops 0 / 0.
    return torch.where(std == 0, 0.0, (rewards - mean) / std)


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of the *other* samples of the group (arXiv 2402.14740). It is the same as
    (r - mean of all n samples) * n / (n - 1)."""
    mean, std, count = group_stats(rewards, groups)  # (N,) each
    # With equal rewards `where` drops what rounding leaves of the difference, or 0 / 0.
    return torch.where(std == 0, 0.0, (rewards - mean) * count / (count - 1))


def reinforce(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of all samples of the batch (Williams 1992 with the batch's mean as baseline)."""
    all_in_one = torch.zeros_like(groups)  # (N,)
    mean, std, _ = group_stats(rewards, all_in_one)  # (N,) each
    return torch.where(std == 0, 0.0, rewards - mean)


@dataclass(frozen=True)
class Estimator:
    """The function of an estimator, and what the run must do for it."""

    function: Callable
    needs_critic: bool = False
    is_whitened: bool = False  # Does Recipe.whiten change its advantages?
    least_samples: int = 1  # samples of a problem; 2 if the function compares them


# CHANGE HERE to add an estimator. The keys are the values of --estimator. Other code never asks for
# a key: it asks for the fields of the entry.
ESTIMATORS = {
    "gae": Estimator(gae, needs_critic=True, is_whitened=True),
    "grpo": Estimator(grpo, least_samples=2),
    "rloo": Estimator(rloo, least_samples=2),
    "reinforce": Estimator(reinforce, is_whitened=True),
}


def add_later_(numbers: Tensor, decay) -> Tensor:
    """Adds to each number x_t of a row the later ones: sum_k decay^k x_{t+k}. In place.

    numbers: (N, S). decay: a number, or (N,).
    """
    for t in reversed(range(numbers.shape[1] - 1)):
        numbers[:, t] += decay * numbers[:, t + 1]
    return numbers


def group_stats(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, population std and size of each sample's group, (N,) each.

    In a group with equal rewards the std is exactly 0.
    """
    # On a GPU each round of the loop would wait for the GPU.
    on_cpu = rewards.cpu()
    groups = groups.cpu()
    mean, std, count = (torch.zeros_like(on_cpu) for _ in range(3))
    for group in groups.unique():
        members = groups == group  # (N,) bool
        mean[members] = on_cpu[members].mean()
        std[members] = on_cpu[members].std(correction=0)
        count[members] = members.sum().double()
    # A std below this comes from rounding: the rewards are equal.
    std[std < 1e-9] = 0.0
    return mean.to(rewards.device), std.to(rewards.device), count.to(rewards.device)


# ---- the recipe ------------------------------------------------------------------------------


# CHANGE HERE a decision of a run: edit a method, or write a variant (docs/change.md).
@dataclass
class Recipe:
    """The decisions of a run. The fields are flags, and the methods come in the order of a run.

    train.Config inherits this class, so in a method `self` is the config of the run. A variant is a
    subclass in a file of its own, and calls `super()`. `Recipe()` alone is enough to use this file
    in a loop of your own. All ranks call a method with the same arguments, and it must return the
    same on all ranks. Losses are the exception: each rank has its own micro-batches.
    """

    seed: int = flag(42, "Each random choice depends on a hash of this seed and of its purpose.")
    # vLLM raises a lower temperature to 0.01, and refuses one above 2.
    temperature: float = flag(
        1.0, "The sampling temperature. The losses use it too.", least=0.01, most=2
    )
    estimator: str = flag(
        "gae", "How rewards become advantages: gae (PPO with a critic), grpo, rloo or reinforce."
    )
    gamma: float = flag(
        1.0, "The discount of gae, per token. Below 1 it favours short responses.", most=1
    )
    lambd: float = flag(
        1.0,
        "The lambda of gae. Below 1 late rewards count less: that is less noise, and a bias.",
        most=1,
    )
    critic_updates: int = flag(
        12, "Updates of the critic in a step, each with an equal part of the samples.", least=1
    )
    actor_learning_rate: float = flag(1e-6, "The policy's rate. 1e-6 suits 0.5B to 32B parameters.")
    critic_learning_rate: float = flag(
        5e-6, "The critic's rate. It can be higher than the policy's."
    )
    warmup_updates: int = flag(
        50, "Each learning rate rises in so many updates. 1: no rise.", least=1
    )
    value_clip: float = flag(0.2, "The critic's loss clips a value's change to this. 1e9: no clip.")
    reward_weights: list[str] = flag(
        [], "NAME=WEIGHT for some of a task's rewards. Without it the first has 1, all others 0."
    )
    skip_flat: bool = flag(
        False,
        "Samples whose advantages are all 0 do not pass through the policy, which is faster. This "
        "is wrong if the loss has a term without the advantage.",
    )

    # The next three decide how fast a run is, and not what is learnt. train.Config has their
    # advice, and a resumed run may change them.
    packing: str = "packed"  # alone: each row has one sample, which some families of models need
    packing_max_len: int = 16384
    micro_train_batch_size: int = 1

    estimators = ESTIMATORS  # The values of --estimator. Those of a variant are added to these.

    @cached_property
    def memory(self) -> dict:
        """{name of a variant's class: a dict of what this variant must know after a resume}.

        It holds what JSON can hold. A checkpoint saves it, and a resume fills it before the first
        step.
        """
        return {}

    def check(self, world):
        """Raises UserError for flags that cannot work. world: the number of ranks.

        A variant calls super() first. Before that train.check_flags checks the flags of the core.
        """

    # ---- the models: each of these methods gets what the run would use, and returns what it uses

    def sampler_settings(self, settings: dict) -> dict:
        """The arguments of vLLM's LLM."""
        return settings

    def sampling_params(self, params, request):
        """vLLM's SamplingParams for each turn of a request of rollout.py.

        `params.logprobs = 0` asks for the log-prob of each sampled token. Then
        batch.per_token["logprobs"] holds them, (T,).
        """
        return params

    def allowed_gap(self, of_mean: float, of_worst: float) -> tuple[float, float]:
        """How far the log-probs of sampler and trainer may differ in the start check.

        Two limits: of the mean over all tokens, and of the mean over the tokens of the worst
        sample.
        """
        return of_mean, of_worst

    def training_dtype(self, dtype):
        """The dtype of weights and passes: torch.bfloat16 or, without --bf16, torch.float32."""
        return dtype

    def engine_settings(self, settings: dict) -> dict:
        """DeepSpeed's settings, for each learner."""
        return settings

    def policy_model(self, model):
        """The causal LM of transformers that is trained. It is called once, before DeepSpeed."""
        return model

    def named_weights(self, learner, named):
        """The (name, full tensor) pairs of a learner, for the sampler and the export.

        All ranks must take all pairs, because ZeRO-3 gathers each tensor from all ranks.
        """
        return named

    # ---- 1. prompts, 2. rollout, 3. reward

    def episode_order(self, problems, episode) -> list[int]:
        """The order of the problems in an episode, as indices. Each episode has another order."""
        rng = np.random.default_rng(hash64(self.seed, "order", episode))
        return rng.permutation(len(problems)).tolist()

    def draw_step(self, rollout, requests, problems, step, clock) -> list:
        """The graded samples of a step. step: the number of finished steps.

        `rollout.draw(requests, clock)` draws samples, and `clock.numbers[name]` takes a number to
        log. A variant may first change the requests by `dataclasses.replace`.
        """
        return rollout.draw(requests, clock)

    def reply_function(self, task):
        """The function that replies to a turn, or None: then a response has one turn.

        By default it is the function `reply` of the task, if there is one: docs/change.md.
        """
        return getattr(task, "reply", None)

    # ---- 4. batch

    def paid(self, samples) -> list[float]:
        """One reward for each sample, from which the policy learns. By default it is the reward of
        the grader, or the weighted sum if the task names several rewards. The logs have the reward
        of the grader, and this one as `paid`. samples: whole groups of a step. Rank 0 decides, so
        the rewards may be random."""
        return [weighted_reward(sample, self) for sample in samples]

    def samples_that_count(self, batch: Batch) -> list[int]:
        """The indices of the samples that the losses, the whitening and the logged numbers use.

        The mean and the std of a group still use all samples of the group.
        """
        return batch.all_indices()

    # ---- 5. passes before the first update

    def token_passes(self, policy, critic, batch: Batch, step):
        """Adds flat tensors to batch.per_token: the critic's values.

        A variant may add others under names of its own, such as the log-probs of a reference model.
        step: the number of finished steps.
        """
        if critic:
            batch.per_token["values"] = forward_pass(batch, self, critic)

    # ---- 6. advantages

    def raw_advantages(self, batch: Batch) -> Tensor:
        """The estimator's advantages before whitening, (T,) in float64."""
        mask = batch.mask.to(batch.device)  # (N, S)
        # An estimator may change its input in place.
        rewards = batch.rewards.to(batch.device, copy=True)  # (N,)
        groups = batch.groups.to(batch.device)  # (N,)
        values = torch.zeros_like(mask, dtype=torch.float64)  # (N, S)
        values[mask] = flat_values(batch)
        estimate = self.estimators[self.estimator].function
        scores = estimate(rewards, values, mask, groups, self)  # (N,) or (N, S)
        is_right = scores.shape in (mask.shape, mask.shape[:1])
        assert is_right, f"--estimator {self.estimator} must return (N,) or (N, S)"
        if scores.dim() == 1:
            # Each token gets the score of its sample.
            scores = scores[:, None].expand_as(values)  # (N, S)
        return scores[mask]  # (T,)

    def critic_targets(self, batch: Batch, advantages: Tensor) -> Tensor:
        """What the critic learns to predict, (T,): raw advantages + values. The logs call it
        returns."""
        return advantages + flat_values(batch)

    def whiten(self, advantages: Tensor, batch: Batch) -> Tensor:
        """The final advantages, (T,).

        If the estimator is whitened, they have mean 0 and population std 1 over the response tokens
        of all samples that count. If not, they are the raw ones.
        """
        counted = self.samples_that_count(batch)
        if not (self.estimators[self.estimator].is_whitened and counted):
            return advantages
        used = batch.select(advantages, counted)
        std = used.var(correction=0).sqrt().clamp(min=1e-8)
        return (advantages - used.mean()) / std

    # ---- 7. learn

    def train_critic(self, critic, batch: Batch, step) -> dict[str, float]:
        """Makes critic_updates updates, each with its own part of the samples. Returns the numbers
        to log. step: the number of finished steps."""
        updates = range(step * self.critic_updates, (step + 1) * self.critic_updates)
        rates = [learning_rate(self.critic_learning_rate, k, self) for k in updates]
        return update_in_parts(critic, critic_losses, batch, rates, self, step)

    def critic_loss(self, values, batch: Batch, micro, stats: dict) -> Tensor:
        """The loss of each token, (M,): 0.5 max((V - return)^2, (clip(V, V_old +- value_clip) -
        return)^2) (ORZ's ValueLoss). values: (M,). token_loss explains `stats`."""
        old = batch.per_token["values"][micro.flat_index]  # (M,)
        returns = batch.per_token["returns"][micro.flat_index]  # (M,)
        clipped = old + (values - old).clamp(-self.value_clip, self.value_clip)  # (M,)
        return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)

    def train_policy(self, policy, batch: Batch, step, total_steps) -> dict[str, float]:
        """Makes one update. So PPO's ratio is 1, and its clip would do nothing. Returns the numbers
        to log. step: the number of finished steps, each of which has made one update."""
        indices = self.samples_that_count(batch)
        denominator = batch.count_tokens(indices)
        if self.skip_flat:
            # A sample whose advantages are all 0 has gradient 0. The denominator still counts it.
            advantages = batch.split(batch.per_token["advantages"].cpu())
            indices = [i for i in indices if advantages[i].any()]
        lr = self.policy_rate(step, total_steps)
        return update(policy, policy_losses, batch, indices, lr, self, denominator)

    def policy_rate(self, past_updates, total_updates) -> float:
        """The policy's learning rate after `past_updates` updates.

        total_updates: those of the whole run, for a variant whose rate falls towards its end.
        """
        return learning_rate(self.actor_learning_rate, past_updates, self)

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats: dict) -> Tensor:
        """The loss of each token, (M,): -A_t log p(a_t).

        At ratio 1 its gradient is that of PPO's clipped objective (arXiv 1707.06347, eq. 7).
        logprobs, entropy and advantages are (M,). `stats["name"] = x` logs the mean of x, (M,),
        over all response tokens that pass through the policy. Set each name in every micro-batch.
        """
        return -(advantages * logprobs)

    # ---- 9. report

    def metrics(self, line: dict, samples, batch: Batch) -> dict:
        """The line of metrics.jsonl. Only rank 0 calls this method."""
        return line


# ---- advantages ------------------------------------------------------------------------------


def compute_advantages(batch: Batch, cfg) -> dict[str, float]:
    """Adds `advantages` and `returns`, (T,), to the batch. Returns the numbers to log, which are
    those of the samples that count. If no sample counts, it returns {}."""
    raw = cfg.raw_advantages(batch)  # (T,)
    returns = cfg.critic_targets(batch, raw)  # (T,)
    advantages = cfg.whiten(raw, batch)  # (T,)
    batch.per_token["advantages"] = advantages.float()
    batch.per_token["returns"] = returns.float()
    counted = cfg.samples_that_count(batch)
    if not counted:
        return {}
    advantages = batch.select(advantages, counted)
    returns = batch.select(returns, counted)
    stats = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    stats["return"] = returns.mean()
    variance = returns.var(correction=0)
    if "values" in batch.per_token and variance > 0:
        unexplained = returns - batch.select(flat_values(batch), counted)
        stats["explained_variance"] = 1 - unexplained.var(correction=0) / variance
    return {name: number.item() for name, number in stats.items()}


def flat_values(batch: Batch) -> Tensor:
    """The critic's values in float64, (T,). Without a critic they are 0."""
    if "values" in batch.per_token:
        return batch.per_token["values"].double()
    count = int(batch.response_lengths.sum())
    return torch.zeros(count, dtype=torch.float64, device=batch.device)


# ---- updates ---------------------------------------------------------------------------------


def policy_losses(policy, batch: Batch, micro, cfg, stats: dict) -> Tensor:
    """The policy's loss of each token of a micro-batch, (M,)."""
    logprobs, entropy = policy(micro, cfg.temperature)  # (M,), (M,)
    advantages = batch.per_token["advantages"][micro.flat_index]  # (M,)
    stats["entropy"] = entropy
    return cfg.token_loss(logprobs, entropy, advantages, batch, micro, stats)


def critic_losses(critic, batch: Batch, micro, cfg, stats: dict) -> Tensor:
    """The critic's loss of each token of a micro-batch, (M,)."""
    values = critic(micro)  # (M,)
    stats["critic_values"] = values
    return cfg.critic_loss(values, batch, micro, stats)


def update(learner, losses_of, batch: Batch, indices, lr, cfg, denominator=None):
    """Makes one update over these samples, dealt to all ranks. Returns global means to log.

    losses_of: policy_losses or critic_losses. The loss is a sum over response tokens divided by
    `denominator`, by default the number of the response tokens of these samples, on all ranks
    together. Each micro-batch is divided by the same number, so packing, micro-batches and ranks do
    not change the gradient. Without indices there is no update. If a loss or a logged number is not
    finite, all ranks raise a FloatingPointError before the weights change.
    """
    tokens = batch.count_tokens(indices)
    if denominator is None:
        denominator = tokens
    loss_name = f"{learner.name}_loss"
    history = []  # of each micro-batch of this rank: the sum of each number over its tokens
    for micro, is_last in micro_batches(batch, indices, cfg):
        stats = {}  # {name: (M,)}
        losses = losses_of(learner, batch, micro, cfg, stats)  # (M,)
        stats[loss_name] = losses
        is_right = all(x.shape == micro.real.shape for x in stats.values())
        assert is_right, "losses, and what `stats` logs, must be (M,), one number a token"
        # The learner takes the mean of the ranks' gradients. We need their sum.
        factor = dist.get_world_size() / denominator
        learner.backward((losses * micro.real).sum() * factor, is_last)
        history.append(torch.stack([(x.detach() * micro.real).sum() for x in stats.values()]))
    numbers = {}
    grad_norm = 0.0
    if history:
        totals = torch.stack(history, 1).double().sum(1)  # (names,)
        dist.all_reduce(totals)
        # On a GPU `tolist` waits until the GPU has computed all numbers. So it is called once.
        for name, total in zip(stats, totals.tolist()):
            # The denominator of the loss also counts the samples that --skip_flat leaves out.
            numbers[name] = total / (denominator if name == loss_name else tokens)
        if not np.isfinite(list(numbers.values())).all():
            raise FloatingPointError(f"{learner.name}: numbers are not finite: {numbers}")
        grad_norm = learner.apply_update(lr)
    numbers[f"{learner.name}_grad_norm"] = grad_norm
    numbers[f"{learner.name}_lr"] = lr
    numbers[f"{learner.name}_micro_batches"] = len(history)
    # Tokens of prompts and responses.
    numbers[f"{learner.name}_tokens"] = sum(batch.sample_lengths[i] for i in indices)
    return numbers


def update_in_parts(learner, losses_of, batch: Batch, rates, cfg, step) -> dict[str, float]:
    """Shuffles the samples that count, cuts them into a part for each rate, and makes an update for
    each part. Returns {name: mean over the updates}.

    With fewer samples than rates there is one sample in each part. Without samples there is one
    empty part, which only has numbers to log.
    """
    indices = cfg.samples_that_count(batch)
    shuffled = np.random.default_rng(hash64(cfg.seed, step, learner.name)).permutation(indices)
    parts = np.array_split(shuffled, max(1, min(len(rates), len(indices))))
    history = []
    for part, lr in zip(parts, rates):
        history.append(update(learner, losses_of, batch, part.tolist(), lr, cfg))
    return {name: float(np.mean([numbers[name] for numbers in history])) for name in history[0]}


def learning_rate(peak, past_updates, cfg) -> float:
    """The rate of the next update. It rises linearly from peak / warmup to peak, and stays."""
    if past_updates < cfg.warmup_updates:
        return peak * (past_updates + 1) / cfg.warmup_updates
    return peak


# ---- passes ----------------------------------------------------------------------------------


def compute_logprobs(policy, batch: Batch, cfg) -> Tensor:
    """log p of every response token, (T,), the same on every rank. All ranks must call it."""

    def forward(micro):
        return policy(micro, cfg.temperature)[0]  # (M,)

    return forward_pass(batch, cfg, forward)


@torch.no_grad()
def forward_pass(batch: Batch, cfg, forward) -> Tensor:
    """One number for each response token, (T,). forward(micro) returns those of a micro-batch."""
    numbers = torch.zeros(int(batch.response_lengths.sum()), device=batch.device)  # (T,)
    for micro, _ in micro_batches(batch, batch.all_indices(), cfg):
        numbers.index_add_(0, micro.flat_index, forward(micro) * micro.real)
    # Each number was computed by one rank. The other ranks have 0 there.
    dist.all_reduce(numbers)
    return numbers


# ---- from samples to a batch -----------------------------------------------------------------


def make_batch(samples, device, cfg, rewards=None) -> Batch:
    """Makes a batch of samples. The samples of one problem form a group. All ranks must call it.

    rewards: (N). By default those of cfg.paid.
    """
    if rewards is None:
        # `paid` may be random, so rank 0 decides.
        rewards = cfg.paid(samples) if dist.get_rank() == 0 else None
        rewards = gather(rewards)[0]
    assert len(rewards) == len(samples), "paid must return one reward for each sample"
    temperatures = {sample.request.temperature for sample in samples}
    told = f"the losses have --temperature {cfg.temperature}, and samples have {temperatures}"
    assert temperatures == {cfg.temperature}, told
    batch = Batch(
        prompt_ids=[sample.request.problem.prompt_ids for sample in samples],
        response_ids=[sample.response_ids for sample in samples],
        groups=torch.tensor([sample.request.group for sample in samples]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        device=device,
        per_token={},
        samples=samples,
        drawn=[sample.drawn for sample in samples],
    )
    if samples[0].logprobs:
        logprobs = [x for sample in samples for x in sample.logprobs]
        batch.per_token["logprobs"] = torch.tensor(logprobs, device=device)  # (T,)
    return batch


def reward_weights_of(cfg, names) -> dict[str, float]:
    """{name: weight} of a task's rewards. Raises UserError for wrong --reward_weights."""
    weights = {name: float(k == 0) for k, name in enumerate(names)}
    for word in cfg.reward_weights:
        name, _, number = word.partition("=")
        known = ", ".join(weights) or "no rewards"
        told = f"--reward_weights {word}: write NAME=WEIGHT; the task names {known}"
        require(name in weights, told)
        try:
            weights[name] = float(number)
        except ValueError as error:
            raise UserError(told) from error
    return weights


def weighted_reward(sample, cfg) -> float:
    """The grader's reward of a sample, or the weighted sum of its rewards."""
    if not sample.rewards:
        return sample.reward
    weights = reward_weights_of(cfg, sample.rewards)
    return sum(weights[name] * reward for name, reward in sample.rewards.items())


# ---- packing ---------------------------------------------------------------------------------


@dataclass
class MicroBatch:
    """R rows of packed samples. A model computes them in one forward pass.

    Call a model of transformers as `model(**micro.model_inputs())`. If one of these arguments were
    absent, the samples of a row would see each other, and no error would tell. `micro.select` takes
    the outputs that predict a response token: each is at the position before its token.
    """

    input_ids: Tensor  # (R, L)
    # In each sample the positions restart at 0. transformers finds the samples by these zeros, and
    # lets no token see another sample.
    position_ids: Tensor  # (R, L)
    # (M,) the places whose next token is a response token. Place p is token p of the R * L tokens
    # of all rows, one row after the other.
    places: Tensor
    token_ids: Tensor  # (M,) the response tokens
    flat_index: Tensor  # (M,) their indices in the flat tensors: `values[micro.flat_index]`
    # (M,) 1.0, and 0.0 for the only response token of a filler. A rank with fewer micro-batches
    # than other ranks runs fillers.
    real: Tensor
    # FlashAttention's cu_seqlens: where each sample starts, and each padding at the end of a row,
    # if all rows stand one after the other. The last number is R * L. None with --packing alone.
    borders: Tensor | None  # (samples + paddings + 1,) int32
    longest: int  # tokens of the longest sample or padding

    def select(self, output: Tensor) -> Tensor:
        """The outputs that predict a response token: (R, L, ...) becomes (M, ...)."""
        return output.flatten(0, 1).index_select(0, self.places)

    def model_inputs(self) -> dict:
        """The arguments of a model of transformers."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # If there is a cache, transformers does not separate the samples of a row.
            "use_cache": False,
            # varlen and FlashAttention need the borders of the samples. sdpa and eager find the
            # borders in the positions and ignore these arguments.
            "cu_seq_lens_q": self.borders,
            "cu_seq_lens_k": self.borders,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


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
        # The pair with the smallest room that is large enough: (size,) sorts before (size, row).
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
        # All rows are padded to the length of the first.
        count = max(1, limit // sizes[ordered[0]])
        micros.append([[i] for i in ordered[:count]])
        ordered = ordered[count:]
    return micros


def build_rows(batch: Batch, rows: list[list[int]], alone=False) -> MicroBatch:
    """Makes the tensors of these rows. rows: the indices of the samples of each row.

    alone: --packing alone, for recurrent models above all. Each row has one sample, and the
    positions go on through the padding, so that the model finds no second sample in the row. No
    token sees a later token, so the padding changes nothing.

    Example: a row of 9 tokens. A prompt of 2 tokens, a turn of 2, a reply of 1, a turn of 2.

        token          p  p  d  d  r  d  d | 0  0
        position       0  1  2  3  4  5  6 | 0  1
        places            1  2     4  5             the next token is drawn
        flat_index        0  1     2  3             if batch.start of this sample is 0
    """
    longest_row = max(sum(batch.sample_lengths[i] for i in row) for row in rows)
    shape = (len(rows), longest_row)  # (R, L)
    ids = []  # of all rows, one after the other
    drawn = []  # Has the policy drawn this token?
    lengths = []  # of each part: a sample, or the padding at the end of a row
    for row in rows:
        for i in row:
            ids += batch.prompt_ids[i] + batch.response_ids[i]
            drawn += [False] * len(batch.prompt_ids[i]) + batch.drawn[i]
            lengths.append(batch.sample_lengths[i])
        padding = longest_row - sum(batch.sample_lengths[i] for i in row)
        if padding > 0:
            ids += [0] * padding
            drawn += [False] * padding
            lengths.append(padding)
    lengths = torch.tensor(lengths)  # (P,) of P parts
    ends = lengths.cumsum(0)  # (P,)
    part_start = (ends - lengths).repeat_interleave(lengths)  # (R * L,) in the rows
    position = torch.arange(len(ids)) - part_start  # (R * L,) in the part
    # torch would take five times as long to read these lists.
    input_ids = torch.from_numpy(np.array(ids))  # (R * L,)
    is_drawn = torch.frombuffer(bytearray(drawn), dtype=torch.bool)  # (R * L,)
    # The output at a place predicts the next token. The first token of a sample is never drawn, so
    # the place before a drawn token is in the same sample.
    places = is_drawn.nonzero()[:, 0] - 1  # (M,)
    indices = sum(rows, [])
    counts = batch.response_lengths[indices]
    # of each sample: the index in the flat tensors minus the index in this micro-batch
    shifts = batch.start[indices] - (counts.cumsum(0) - counts)
    flat_index = torch.arange(len(places)) + shifts.repeat_interleave(counts)  # (M,)
    if alone:
        position = torch.arange(longest_row).repeat(len(rows))
    tensors = {
        "input_ids": input_ids.view(shape),
        "position_ids": position.view(shape),
        "places": places,
        "token_ids": input_ids[places + 1],  # (M,)
        "flat_index": flat_index,  # (M,)
        "real": torch.ones(len(places)),  # (M,)
        "borders": None if alone else torch.cat([ends.new_zeros(1), ends]).int(),  # (P + 1,)
    }

    def move(x):
        # A GPU copies pinned memory while this process goes on.
        x = x.pin_memory() if batch.device.type == "cuda" else x
        return x.to(batch.device, non_blocking=True)

    tensors = {name: x if x is None else move(x) for name, x in tensors.items()}
    return MicroBatch(**tensors, longest=int(lengths.max()))


def filler(device) -> MicroBatch:
    """Makes a micro-batch that does not count, for a rank with fewer micro-batches.

    All ranks must make the same passes through body and head, because ZeRO has collectives in them.
    So it has a response token, which the head gets. Its row has two tokens, because torch would
    compile a layer anew for a row of one token.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=device)  # (1,)
    return MicroBatch(
        input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device),
        position_ids=torch.arange(2, device=device)[None],  # (1, 2)
        places=zero,
        token_ids=zero,
        flat_index=zero,
        real=zero.float(),
        borders=2 * torch.arange(2, dtype=torch.int32, device=device),  # (2,)
        longest=2,
    )


def micro_batches(batch: Batch, indices: list[int], cfg):
    """Yields (micro-batch of this rank, is it the last one).

    All ranks get the same number of micro-batches. A rank with fewer of them ends with fillers.
    Without indices there is none. Each micro-batch is made when the loop asks for it, because all
    of them together would take up to 44 bytes a token. While a GPU computes one, the CPU makes the
    next one.
    """
    shares = deal(batch.sample_lengths, indices, dist.get_world_size())
    # Each rank plans for all ranks. So it knows how many micro-batches the others have.
    plans = [plan_micro_batches(batch.sample_lengths, share, cfg) for share in shares]
    mine = plans[dist.get_rank()]
    count = max(map(len, plans))
    for k in range(count):
        if k < len(mine):
            micro = build_rows(batch, mine[k], alone=cfg.packing == "alone")
        else:
            micro = filler(batch.device)
        yield micro, k == count - 1


def plan_micro_batches(sizes: list[int], indices: list[int], cfg) -> list[list[list[int]]]:
    """Puts the samples of a rank into rows, and the rows into micro-batches.

    plan[micro-batch][row] are the indices of the samples of a row.
    """
    rows_per_micro = cfg.micro_train_batch_size
    if cfg.packing == "alone":
        # Short samples make short rows. So a micro-batch is full by its tokens, and not by its
        # rows.
        return cut_by_length(sizes, indices, rows_per_micro * cfg.packing_max_len)
    rows = pack(sizes, indices, cfg.packing_max_len)
    starts = range(0, len(rows), rows_per_micro)
    return [rows[start : start + rows_per_micro] for start in starts]
