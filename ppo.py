"""PPO without its ratio and its clip: batch, estimators, recipe, packing, passes, updates.

The class Recipe has the decisions of a run as methods. The functions around it do the work that
no variant changes. This file never reads text. An update is one optimizer step. A pass computes a
number for each response token with a model, without an update.

A learner is the policy or the critic. Its input is a MicroBatch, `micro`. `policy(micro,
temperature)` returns log-probs (M,) and entropies (M,), and `critic(micro)` returns values (M,).
The temperature is a number, or (M,). A learner has `name`, `device`, `backward(loss, is_last)` for
each micro-batch, and `apply_update(lr)` after the last one, which returns the gradient's norm. The
class Learner of nanoorz/models.py is one.

Deviations from Open-Reasoner-Zero (ORZ), proved in tests/test_ppo.py:
- All losses have one denominator. A loss is a sum over response tokens divided by the *global*
  number of response tokens in the update. So packing, micro-batches and ranks do not change the
  gradient. ORZ takes a mean of the means of its rows.
- The policy's loss has no old log-probs, no ratio of new to old and no clip. With one update per
  rollout this ratio is 1 and the clip does nothing, so the gradient is PPO's.
- `grpo` divides by the group's standard deviation and does not whiten. ORZ's GRPO whitens and does
  not divide.

Shapes: N samples, S most response tokens of a sample, T response tokens of the batch, M response
tokens of a micro-batch, R packed rows, L row length. `indices` are always indices of samples.

A response may have replies in it (rollout.py). Here a *response token* is one that the policy has
drawn. The models read the tokens of replies, as those of the prompt, and nothing is learnt there.

To use this file elsewhere, copy nanoorz/ranks.py and nanoorz/flags.py, too. Call
`start_distributed` of ranks.py first.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanoorz.flags import flag, require
from nanoorz.ranks import UserError, check_result, gather, hash64, print0, stop_together

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
    rewards: Tensor  # (N,) float64, the rewards to learn from: cfg.paid may change the grader's
    device: torch.device  # of the flat tensors. The other tensors are on the CPU.
    # {name: flat tensor}. The names are values, advantages and returns. Sometimes there are
    # logprobs: those of the sampler; temperatures: if a request has another one than
    # cfg.temperature; policy_weights and critic_weights: if they are not all 1.
    per_token: dict[str, Tensor]
    samples: list  # (N) the samples of rollout.py, for the methods of variants
    # of each of response_ids: has the policy drawn it? None: all
    drawn: list[list[bool]] | None = None

    def __post_init__(self):
        if self.drawn is None:
            self.drawn = [[True] * len(ids) for ids in self.response_ids]
        self.response_lengths = torch.tensor([sum(drawn) for drawn in self.drawn])  # (N,)
        self.start = self.response_lengths.cumsum(0) - self.response_lengths  # (N,)
        # N numbers: all tokens of prompt and response, also those of replies
        self.sample_lengths = [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids)]
        # True where the place is below the response's length. A padding id would not tell, because
        # a response may have that id.
        self.mask = (
            torch.arange(int(self.response_lengths.max())) < self.response_lengths[:, None]
        )  # (N, S)

    def all_indices(self) -> list[int]:
        """The indices of all samples."""
        return list(range(len(self.sample_lengths)))

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Cuts (T,) into one tensor for each sample."""
        return numbers.split(self.response_lengths.tolist())

    def spread(self, numbers: Tensor) -> Tensor:
        """Repeats the number of a sample for each of its response tokens: (N,) becomes (T,)."""
        return numbers.repeat_interleave(self.response_lengths).to(self.device)


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
    # of all rows, one row after the other. A mask would do the same, but a GPU must count a mask,
    # and the CPU would wait for the count.
    places: Tensor
    token_ids: Tensor  # (M,) the response tokens
    flat_index: Tensor  # (M,) their places in the flat tensors: `values[micro.flat_index]`
    # (M,) 1.0. A rank with fewer micro-batches than other ranks runs fillers, which have one
    # response token (see `filler`). Of this token it is 0.0.
    real: Tensor
    # FlashAttention's cu_seqlens: where each sample starts, and each padding at the end of a row,
    # if all rows stand one after the other. The last number is R * L. None with --packing alone.
    borders: Tensor | None  # (samples + paddings + 1,) int32
    longest: int  # tokens of the longest sample or padding

    def __post_init__(self):
        # (M,) how much each token counts in the loss. `update` multiplies by cfg.token_weights.
        self.weights = self.real

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


def make_batch(samples, device, cfg, rewards=None) -> Batch:
    """Makes a batch of samples. The samples of one problem form a group.

    rewards: (N). If they are absent, rank 0 calls cfg.paid and sends the rewards to all ranks: then
    this function is a collective. Raises UserError for a wrong result of cfg.draw_step or cfg.paid.
    """
    is_right = isinstance(samples, list) and len(samples) > 0
    check_result(cfg, "draw_step", is_right, "a list of at least one sample", samples)
    is_right = all(len(sample.drawn) == len(sample.response_ids) for sample in samples)
    check_result(cfg, "draw_step", is_right, "samples with a `drawn` for each id", "others")
    if rewards is None:
        # `paid` may be random. So rank 0 decides for all ranks. An error in it must not leave the
        # other ranks alone in the `gather` below, so they meet at the end of this `stop_together`.
        with stop_together():
            rewards = checked_rewards(samples, cfg) if dist.get_rank() == 0 else None
        rewards = gather(rewards)[0]
    prompt_ids = [sample.request.problem.prompt_ids for sample in samples]
    response_ids = [sample.response_ids for sample in samples]
    drawn = [sample.drawn for sample in samples]
    groups = torch.tensor([sample.request.group for sample in samples])  # (N,)
    rewards = torch.tensor(rewards, dtype=torch.float64)  # (N,)
    batch = Batch(prompt_ids, response_ids, groups, rewards, device, {}, samples, drawn)
    if samples[0].logprobs:
        logprobs = [x for sample in samples for x in sample.logprobs]
        batch.per_token["logprobs"] = torch.tensor(logprobs, device=device)  # (T,)
    temperatures = torch.tensor([sample.request.temperature for sample in samples])  # (N,)
    if (temperatures != cfg.temperature).any():
        # The trainer takes the log-probs of a sample at its own temperature. vLLM allows none below
        # 0.01.
        is_right = bool((temperatures >= 0.01).all())
        wanted = "samples with temperatures of 0.01 or more"
        check_result(cfg, "draw_step", is_right, wanted, temperatures.min().item())
        batch.per_token["temperatures"] = batch.spread(temperatures)  # (T,)
    return batch


def checked_rewards(samples, cfg) -> list[float]:
    rewards = cfg.paid(samples)
    is_right = isinstance(rewards, (list, tuple, np.ndarray)) and len(rewards) == len(samples)
    check_result(cfg, "paid", is_right, f"a list of {len(samples)} rewards", rewards)
    # Much larger numbers do not fit into float32.
    wrong = [x for x in rewards if not (isinstance(x, Real) and abs(x) < 1e30)]
    check_result(cfg, "paid", not wrong, "numbers below 1e30 in size", wrong[:1])
    return [float(reward) for reward in rewards]


def reward_weights_of(cfg, names) -> dict[str, float]:
    """{name: weight} of a task's rewards. Raises UserError for a wrong --reward_weights."""
    # Of a task without REWARDS this is {}.
    weights = {name: float(k == 0) for k, name in enumerate(names)}
    given = set()
    for word in cfg.reward_weights:
        name, _, number = word.partition("=")
        known = f"the task names {', '.join(weights)}; write NAME=WEIGHT"
        known = known if weights else "the task names no rewards; leave the flag out"
        require(name in weights, f"--reward_weights {word}: {known}")
        require(name not in given, f"--reward_weights {word}: {name} has two weights")
        given.add(name)
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = math.nan
        is_right = abs(weights[name]) < 1e6
        require(is_right, f"--reward_weights {word}: write NAME=WEIGHT, with a number below 1e6")
    words = " ".join(cfg.reward_weights)
    told = f"--reward_weights {words}: all weights are 0; give a reward another weight"
    require(not weights or any(weights.values()), told)
    return weights


def weighted_reward(sample, cfg) -> float:
    """The grader's reward of a sample, or the weighted sum of its rewards."""
    # A sample of your own may have no field `rewards`.
    rewards = getattr(sample, "rewards", None)
    if not rewards:
        return sample.reward
    weights = reward_weights_of(cfg, rewards)
    return sum(weights[name] * reward for name, reward in rewards.items())


# ---- estimators ------------------------------------------------------------------------------


# An estimator maps rewards (N,), values (N, S), mask (N, S) and groups (N,) to advantages (N, S),
# or to scores (N,): then each token of a sample gets the score of the sample. All are float64.
# `cfg` is the recipe. A sample whose advantages are all exactly 0 is left out of the update
# (samples_to_learn_from). So an estimator must not return rounding errors in place of 0.


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
    """(r - group mean) / group population std (arXiv 2402.03300). In a group with equal
    rewards it is exactly 0."""
    mean, std, _ = group_stats(rewards, groups)  # (N,) each
    # With equal rewards the std is 0 and the quotient is NaN or infinite. `where` drops it.
    return torch.where(std > 0, (rewards - mean) / std, 0.0)


def rloo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of the *other* samples of the group (arXiv 2402.14740). It is the same as
    (r - mean of all n samples) * n / (n - 1)."""
    mean, std, count = group_stats(rewards, groups)  # (N,) each
    # With equal rewards `where` drops what rounding leaves of the difference, or 0 / 0.
    return torch.where(std > 0, (rewards - mean) * count / (count - 1), 0.0)


def reinforce(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - mean of all samples of the batch (Williams 1992 with the batch's mean as baseline). If
    all rewards are equal, it is exactly 0."""
    all_in_one = torch.zeros_like(groups)  # (N,)
    mean, std, _ = group_stats(rewards, all_in_one)  # (N,) each
    return torch.where(std > 0, rewards - mean, 0.0)


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
    # On a GPU each round of the loop would wait for the GPU. These small tensors are faster on the
    # CPU.
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


# CHANGE HERE a decision of a run: edit a method, or write a variant (CONTRIBUTING.md).
@dataclass
class Recipe:
    """The decisions of a run. The fields are flags, and the methods come in the order of a run.

    train.Config inherits this class, so in a method `self` is the config of the run. A variant is a
    subclass in a file of its own, and calls `super()`. `Recipe()` alone is enough to use this file
    in a loop of your own.

    All ranks call a method, with the same arguments, and it must return the same on all ranks, if
    its docstring does not say otherwise. The results of the methods are checked where they are
    used. A wrong result raises a UserError, which names the method.
    """

    seed: int = flag(42, "Each random choice depends on a hash of this seed and of its purpose.")
    temperature: float = flag(1.0, "The sampling temperature. The losses use it too.")
    estimator: str = flag("gae", "How rewards become advantages. gae is PPO with a critic.")
    gamma: float = flag(1.0, "The discount of gae, per token. Below 1 it favours short responses.")
    lambd: float = flag(
        1.0, "The lambda of gae. Below 1 late rewards count less: that is less noise, and a bias."
    )
    critic_updates: int = flag(
        12, "Updates of the critic in a step, each with an equal part of the samples."
    )
    actor_learning_rate: float = flag(1e-6, "The policy's rate. 1e-6 suits 0.5B to 32B parameters.")
    critic_learning_rate: float = flag(
        5e-6, "The critic's rate. It can be higher than the policy's."
    )
    warmup_updates: int = flag(50, "Each learning rate rises in so many updates. 1: no rise.")
    value_clip: float = flag(0.2, "The critic's loss clips a value's change to this. 1e9: no clip.")
    reward_weights: list[str] = flag(
        [], "NAME=WEIGHT for some of a task's rewards. Without it the first has 1, all others 0."
    )

    # The next three decide how fast a run is, and not what is learnt. In train.Config they are
    # flags, which a resumed run may change.
    packing = "packed"  # alone: each row has one sample, which some families of models need
    packing_max_len = 16384
    micro_train_batch_size = 1

    estimators = ESTIMATORS  # The values of --estimator. A variant writes `ppo.ESTIMATORS | {...}`.

    _has_told = False  # Has samples_to_learn_from printed its line?

    @cached_property
    def memory(self) -> dict:
        """{name of a variant's class: a dict of what this variant must know after a resume}.

        The dicts have texts as keys, and hold what JSON can hold. A checkpoint saves them, and a
        resume fills them before the first step.
        """
        return {}

    def check(self, world):
        """Raises UserError for flags that cannot work. world: the number of ranks.

        A variant calls super() first. Before that train.check_flags checks the flags of the core.
        """

    def check_run(self, total_steps):
        """Raises UserError for a run that cannot start on this machine: a package may be absent.

        It is called before the models are made. `memory` is filled. tools/plan.py does not call it.
        """

    # ---- the models: each of these methods gets what the run would use, and returns what it uses

    def sampler_settings(self, settings: dict) -> dict:
        """The arguments of vLLM's LLM."""
        return settings

    def sampling_params(self, params, request):
        """vLLM's SamplingParams for each turn of a request of rollout.py.

        `params.logprobs = 0` asks for the log-prob of each sampled token. Then
        batch.per_token["logprobs"] holds them, (T,). The temperature must stay that of the request.
        To change it, change the request in draw_step.
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

    def frozen_models(self) -> dict[str, str]:
        """{flag: folder or name on the hub} of models that never learn, for models.make_frozen.

        They need the tokenizer of --model. The plan of memory counts them. A resumed run compares
        them.
        """
        return {}

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
        log. A variant may first change the requests by `dataclasses.replace`. If it changes the
        temperature, the losses use that temperature for these samples.
        """
        return rollout.draw(requests, clock)

    def reply_function(self, task):
        """The function that replies to a turn, or None: then a response has one turn.

        It is called once, at the start. By default it returns the function `reply` of the task, if
        there is one. reply(text, finish_reason, label) gets the response so far, and returns the
        text that comes next, None if the response is finished, or a concurrent.futures.Future of a
        text or None (docs/turns.md). Only the first rank of a sampler calls reply.
        """
        return getattr(task, "reply", None)

    # ---- 4. batch

    def paid(self, samples) -> list[float]:
        """One reward for each sample, from which the policy learns. By default it is the reward of
        the grader, or the weighted sum if the task names several rewards. The logs have the reward
        of the grader, and this one as `paid`. Only rank 0 calls this method."""
        return [weighted_reward(sample, self) for sample in samples]

    def samples_that_count(self, batch: Batch) -> list[int]:
        """The indices of the samples that the losses and the whitening use.

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
            batch.per_token["values"] = compute_values(critic, batch, self)

    # ---- 6. advantages

    def token_rewards(self, batch: Batch) -> Tensor:
        """Rewards of single tokens, beside those of `paid`, (T,) in float64. By default all are 0.

        With a critic they are rewards of GAE: they change the advantages of their token and of
        earlier tokens. Without a critic their sum over a sample is added to its reward.
        """
        return torch.zeros_like(flat_values(batch))

    def raw_advantages(self, batch: Batch) -> Tensor:
        """The estimator's advantages before whitening, (T,) in float64."""
        # The tensors (N, S) are large. In this phase the sampler sleeps, so the GPU has room.
        mask = batch.mask.to(batch.device)  # (N, S)
        values = torch.zeros_like(mask, dtype=torch.float64)  # (N, S)
        values[mask] = flat_values(batch)
        token_rewards = self.token_rewards(batch)  # (T,)
        check_numbers(self, "token_rewards", batch, token_rewards)
        estimator = self.estimators[self.estimator]
        rewards = batch.rewards.to(batch.device)  # (N,)
        if not estimator.needs_critic:
            owner = batch.spread(torch.arange(len(rewards)))  # (T,) index of each token's sample
            rewards = rewards.index_add(0, owner, token_rewards.double())
        inputs = (rewards, values, mask, batch.groups.to(batch.device), self)
        scores = estimator.function(*inputs)  # (N,) or (N, S)
        name = f"--estimator {self.estimator}"
        is_right = has_shape(scores, mask.shape) or has_shape(scores, mask.shape[:1])
        wanted = f"a tensor {tuple(mask.shape)} or {tuple(mask.shape[:1])}"
        check_result(self, name, is_right, wanted, scores)
        # If the values are NaN, the critic has diverged. Its update will say so.
        is_finite = scores.isfinite().all() or not values.isfinite().all()
        check_result(self, name, is_finite, "finite numbers", "NaN or infinity")
        if scores.dim() == 1:
            # Each token gets the score of its sample.
            scores = scores[:, None].expand_as(values)  # (N, S)
        advantages = scores[mask]  # (T,)
        if estimator.needs_critic and token_rewards.any():
            # GAE is linear: GAE(r + x, V) = GAE(r, V) + GAE(x, 0), where x are the token rewards.
            later = torch.zeros_like(values)  # (N, S)
            later[mask] = token_rewards.double()
            advantages = advantages + add_later_(later, self.gamma * self.lambd)[mask]
        return advantages

    def critic_targets(self, batch: Batch, advantages: Tensor) -> Tensor:
        """What the critic learns to predict, (T,): raw advantages + values. The logs call it
        returns."""
        return advantages + flat_values(batch)

    def whiten(self, advantages: Tensor, batch: Batch) -> Tensor:
        """The final advantages, (T,).

        If the estimator is whitened, they have mean 0 and population std 1 over the response tokens
        of all samples that count. If not, they are the raw ones.
        """
        if not self.estimators[self.estimator].is_whitened:
            return advantages
        # A variant may leave out all samples. The mean of nothing would be NaN, so use all then.
        counted = indices_of(self.samples_that_count, batch) or batch.all_indices()
        parts = batch.split(advantages)
        used = torch.cat([parts[i] for i in counted])
        std = used.var(correction=0).sqrt().clamp(min=1e-8)
        return (advantages - used.mean()) / std

    # ---- 7. learn

    def token_weights(self, batch: Batch, name: str) -> Tensor:
        """How much each token counts in a loss, (T,): numbers of 0 or more, or bools.

        By default all are 1. The loss is a mean with these weights. name: policy or critic.
        """
        return torch.ones(int(batch.response_lengths.sum()), device=batch.device)

    def train_critic(self, critic, batch: Batch, step) -> dict[str, float]:
        """Makes critic_updates updates, each with its own part of the samples. Returns the numbers
        to log. step: the number of finished steps."""
        past = step * self.critic_updates
        rates = [self.critic_rate(past + k) for k in range(self.critic_updates)]
        return update_in_parts(critic, self.critic_loss, batch, rates, self, step)

    def critic_rate(self, past_updates) -> float:
        """The critic's learning rate after `past_updates` updates."""
        return learning_rate(self.critic_learning_rate, self.warmup_updates, past_updates)

    def critic_loss(self, critic, batch: Batch, micro: MicroBatch) -> tuple[Tensor, "Stats"]:
        """Returns the sum of the loss over a micro-batch, and the numbers to log.

        The loss of a token is 0.5 max((V - return)^2, (clip(V, V_old +- value_clip) - return)^2)
        (ORZ's ValueLoss). `update` divides the sum by the number of tokens of the update. Each rank
        has its own micro-batches.
        """
        values = critic(micro)  # (M,)
        old = batch.per_token["values"][micro.flat_index]  # (M,)
        returns = batch.per_token["returns"][micro.flat_index]  # (M,)
        clipped = old + (values - old).clamp(-self.value_clip, self.value_clip)  # (M,)
        worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)  # (M,)
        loss = 0.5 * (worse * micro.weights).sum()
        stats = Stats(micro)
        stats.loss("critic_loss", loss)
        stats.mean("critic_values", values)
        return loss, stats

    def train_policy(self, policy, batch: Batch, step, total_steps) -> dict[str, float]:
        """Makes one update. So PPO's ratio is 1, and its clip would do nothing. Returns the numbers
        to log. step: the number of finished steps."""
        # Each finished step has made one update.
        lr = self.policy_rate(step, total_steps)
        counted = indices_of(self.samples_that_count, batch)
        denominator = sum_of_weights(batch, policy.name, counted)
        # A sample without a gradient does not pass through the model. The denominator counts it.
        indices = indices_of(self.samples_to_learn_from, batch)
        return update(policy, self.policy_loss, batch, indices, lr, self, denominator)

    def policy_rate(self, past_updates, total_updates) -> float:
        """The policy's learning rate after `past_updates` updates.

        total_updates: those of the whole run, for a variant whose rate falls towards its end.
        """
        return learning_rate(self.actor_learning_rate, self.warmup_updates, past_updates)

    def samples_to_learn_from(self, batch: Batch) -> list[int]:
        """The indices of the samples that pass through the policy.

        A sample without advantages has no gradient, so it is left out. If the loss has other terms
        (has_other_terms), such as an entropy bonus, all samples that count pass.
        """
        counted = self.samples_that_count(batch)
        advantages = batch.per_token["advantages"]  # (T,)
        if "policy_weights" in batch.per_token:
            advantages = advantages * batch.per_token["policy_weights"]
        parts = batch.split(advantages.cpu())
        useful = [i for i in counted if parts[i].any()]
        skipped = sorted(set(counted) - set(useful))
        if not skipped or not has_other_terms(self, batch, skipped):
            return useful
        if not self._has_told:
            told = "the policy's loss has a gradient where the advantage is 0"
            print0(f"{told}, so samples without an advantage are not skipped")
            self._has_told = True
        return counted

    def policy_loss(self, policy, batch: Batch, micro: MicroBatch) -> tuple[Tensor, "Stats"]:
        """Returns the sum of `token_loss` over a micro-batch, and the numbers to log.

        Each rank has its own micro-batches. has_other_terms calls this method with a function in
        place of the policy.
        """
        logprobs, entropy = policy(micro, temperature_of(batch, micro, self))  # (M,), (M,)
        advantages = batch.per_token["advantages"][micro.flat_index]  # (M,)
        stats = Stats(micro)
        stats.mean("entropy", entropy)
        losses = self.token_loss(logprobs, entropy, advantages, batch, micro, stats)  # (M,)
        shape = tuple(micro.real.shape)
        check_result(self, "token_loss", has_shape(losses, shape), f"a tensor {shape}", losses)
        wanted = "a tensor that depends on logprobs or entropy"
        check_result(self, "token_loss", losses.requires_grad, wanted, "one without a gradient")
        loss = (losses * micro.weights).sum()
        stats.loss("policy_loss", loss)
        return loss, stats

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats) -> Tensor:
        """The loss of each token, (M,): -A_t log p(a_t).

        At ratio 1 its gradient is that of PPO's clipped objective (arXiv 1707.06347, eq. 7).
        logprobs, entropy and advantages are (M,). `stats.mean("name", x)` logs the mean of x, (M,),
        over all tokens. Call it for each micro-batch.
        """
        return -(advantages * logprobs)

    # ---- 9. report

    def metrics(self, line: dict, samples, batch: Batch) -> dict:
        """The line of metrics.jsonl. Only rank 0 calls this method."""
        return line


def has_shape(found, shape) -> bool:
    return isinstance(found, Tensor) and found.shape == tuple(shape)


def indices_of(method, batch: Batch) -> list[int]:
    """Calls a method of the recipe that returns indices. Raises UserError for a wrong result."""
    indices = method(batch)
    is_right = isinstance(indices, list) and set(indices) <= set(batch.all_indices())
    is_right = is_right and len(set(indices)) == len(indices)
    wanted = f"a list of indices of the {len(batch.sample_lengths)} samples, each at most once"
    check_result(method.__self__, method.__name__, is_right, wanted, indices)
    return indices


def has_other_terms(cfg, batch: Batch, indices: list[int]) -> bool:
    """Has cfg.policy_loss a gradient in these samples if all advantages are 0? A collective.

    An entropy bonus or a KL has one. It calls the loss with made-up log-probs and entropies, so no
    model is needed. A term whose gradient is 0 for all of these numbers is not found.
    """
    zeros = torch.zeros_like(batch.per_token["advantages"])  # (T,)
    batch = replace(batch, per_token=batch.per_token | {"advantages": zeros})
    found = torch.zeros((), device=batch.device)
    for micro, _ in micro_batches(batch, indices, cfg):
        count = len(micro.real)
        logprobs = torch.linspace(-9, -1, count, device=batch.device, requires_grad=True)  # (M,)
        entropy = torch.linspace(3, 0.1, count, device=batch.device, requires_grad=True)  # (M,)
        outputs = (logprobs, entropy)

        def policy(micro, temperature, outputs=outputs):
            return outputs

        loss, _ = cfg.policy_loss(policy, batch, micro)
        for gradient in torch.autograd.grad(loss, outputs, allow_unused=True):
            if gradient is not None:
                found += (gradient != 0).any()
    dist.all_reduce(found)
    return bool(found > 0)


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
    # What to add to the number of a response token in this micro-batch, for its index in the flat
    # tensors.
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
    """Returns an iterator over (micro-batch of this rank, is it the last one).

    All ranks get the same number of micro-batches. A rank with fewer of them ends with fillers.
    Without indices there is none.
    """
    shares = deal(batch.sample_lengths, indices, dist.get_world_size())
    # Each rank plans for all ranks. So it knows how many micro-batches the others have.
    plans = [plan_micro_batches(batch.sample_lengths, share, cfg) for share in shares]
    most = max(map(len, plans))
    mine = plans[dist.get_rank()]
    mine += [[]] * (most - len(mine))
    return make_micro_batches(batch, mine, alone=cfg.packing == "alone")


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


def make_micro_batches(batch: Batch, plan: list[list[list[int]]], alone):
    """Yields (micro-batch, is it the last one). plan: of plan_micro_batches, with [] for a filler.

    Each micro-batch is made when the loop asks for it, because all of them together would take up
    to 44 bytes a token. While a GPU computes one, the CPU makes the next one.
    """
    for k, rows in enumerate(plan):
        micro = build_rows(batch, rows, alone) if rows else filler(batch.device)
        yield micro, k == len(plan) - 1


# ---- passes ----------------------------------------------------------------------------------


def compute_values(critic, batch: Batch, cfg) -> Tensor:
    """V(s_t) of every response token, (T,), the same on every rank. A collective."""
    return forward_pass(batch, cfg, critic)


def compute_logprobs(policy, batch: Batch, cfg) -> Tensor:
    """log p of every response token, (T,), the same on every rank. A collective."""

    def forward(micro):
        return policy(micro, temperature_of(batch, micro, cfg))[0]  # (M,)

    return forward_pass(batch, cfg, forward)


def temperature_of(batch: Batch, micro: MicroBatch, cfg):
    """At which temperature the tokens were drawn: a number, or (M,) if requests differ in it."""
    if "temperatures" in batch.per_token:
        return batch.per_token["temperatures"][micro.flat_index]
    return cfg.temperature


@torch.no_grad()
def forward_pass(batch: Batch, cfg, forward) -> Tensor:
    """One number for each response token, (T,). forward(micro) returns those of a micro-batch."""
    numbers = torch.zeros(int(batch.response_lengths.sum()), device=batch.device)  # (T,)
    for micro, _ in micro_batches(batch, batch.all_indices(), cfg):
        numbers.index_add_(0, micro.flat_index, forward(micro) * micro.real)
    # Each number was computed by one rank. The other ranks have 0 there.
    dist.all_reduce(numbers)
    return numbers


# ---- advantages ------------------------------------------------------------------------------


def compute_advantages(batch: Batch, cfg) -> dict[str, float]:
    """Adds `advantages`, `returns` and token weights, (T,), to the batch. Returns the numbers to
    log. Raises UserError for a wrong result of a method of the recipe."""
    # cfg.token_passes has added these.
    for tensor in batch.per_token.values():
        check_shape(cfg, "token_passes", batch, tensor)
    advantages = cfg.raw_advantages(batch)  # (T,)
    check_numbers(cfg, "raw_advantages", batch, advantages)
    returns = cfg.critic_targets(batch, advantages)  # (T,)
    check_numbers(cfg, "critic_targets", batch, returns)
    advantages = cfg.whiten(advantages, batch)
    check_numbers(cfg, "whiten", batch, advantages)
    add_weights(batch, cfg)
    stats = advantage_stats(batch, advantages, returns)
    batch.per_token["advantages"] = advantages.float()
    batch.per_token["returns"] = returns.float()
    return stats


def add_weights(batch: Batch, cfg):
    """Adds `policy_weights` and `critic_weights`, (T,), to the batch where they are not all 1."""
    for name in ("policy", "critic"):
        weights = cfg.token_weights(batch, name)  # (T,)
        check_shape(cfg, "token_weights", batch, weights)
        weights = weights.float()
        is_right = bool(((weights >= 0) & weights.isfinite()).all())
        check_result(cfg, "token_weights", is_right, "finite numbers of 0 or more", "others")
        if (weights != 1).any():
            batch.per_token[f"{name}_weights"] = weights


def check_shape(cfg, method, batch: Batch, tensor):
    shape = (int(batch.response_lengths.sum()),)
    check_result(cfg, method, has_shape(tensor, shape), f"a tensor {shape}", tensor)


def check_numbers(cfg, method, batch: Batch, tensor):
    """Raises UserError if the tensor is not (T,), or has NaN or infinity."""
    check_shape(cfg, method, batch, tensor)
    wanted = f"a tensor of floats, and not of {tensor.dtype}"
    check_result(cfg, method, tensor.is_floating_point(), wanted, tensor)
    # If the critic has diverged, its values are NaN, and its update will say so.
    has_diverged = not all(x.isfinite().all() for x in batch.per_token.values())
    is_finite = has_diverged or tensor.isfinite().all()
    check_result(cfg, method, is_finite, "finite numbers", "NaN or infinity")


def flat_values(batch: Batch) -> Tensor:
    """The critic's values in float64, (T,). Without a critic they are 0."""
    if "values" in batch.per_token:
        return batch.per_token["values"].double()
    count = int(batch.response_lengths.sum())
    return torch.zeros(count, dtype=torch.float64, device=batch.device)


def advantage_stats(batch: Batch, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    stats = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    stats["return"] = returns.mean()
    variance = returns.var(correction=0)
    if "values" in batch.per_token and variance > 0:
        unexplained = (returns - flat_values(batch)).var(correction=0)
        stats["explained_variance"] = 1 - unexplained / variance
    return {key: value.item() for key, value in stats.items()}


# ---- updates ---------------------------------------------------------------------------------


def update_in_parts(learner, loss_fn, batch: Batch, rates, cfg, step, needed=None):
    """Shuffles the samples that count, cuts them into a part for each rate, and makes an update per
    part.

    With fewer samples than rates there is one sample in each part. A part without a gradient is
    left out, because Adam's momentum would still move the model: all its token weights are 0, or it
    has none of the samples `needed`. None: all are needed. Returns {name: mean over the updates}.
    """
    indices = indices_of(cfg.samples_that_count, batch)
    shuffled = np.random.default_rng(hash64(cfg.seed, step, learner.name)).permutation(indices)
    parts = np.array_split(shuffled, max(1, min(len(rates), len(indices))))
    history = []
    for part, lr in zip(parts, rates):
        part = part.tolist()
        if needed is not None and set(needed).isdisjoint(part):
            continue
        denominator = sum_of_weights(batch, learner.name, part)
        if denominator > 0:
            history.append(update(learner, loss_fn, batch, part, lr, cfg, denominator))
    if not history:
        # Without samples `update` only returns the numbers to log.
        return update(learner, loss_fn, batch, [], rates[0], cfg)
    return {key: float(np.mean([stats[key] for stats in history])) for key in history[0]}


def sum_of_weights(batch: Batch, name: str, indices: list[int]):
    """The sum of cfg.token_weights over these samples. By default it is the number of tokens."""
    weights = batch.per_token.get(f"{name}_weights")  # (T,)
    if weights is None:
        return int(batch.response_lengths[indices].sum())
    parts = batch.split(weights.double().cpu())
    return float(sum(parts[i].sum() for i in indices))


def learning_rate(peak, warmup, past_updates):
    """The rate of the next update. It rises linearly from peak / warmup to peak, and stays."""
    if past_updates < warmup:
        return peak * (past_updates + 1) / warmup
    return peak


def update(learner, loss_fn, batch: Batch, indices: list[int], lr, cfg, denominator=None):
    """Makes one update over these samples, dealt to all ranks. Returns global means to log.

    The loss is a sum over response tokens divided by `denominator`. By default the denominator is
    the sum of the token weights of these samples, on all ranks together, which is the number of
    their response tokens if all weights are 1. Each micro-batch is divided by the same number, so
    packing, micro-batches and ranks do not change the gradient. Without indices, or with a
    denominator of 0, there is no update. If a number is not finite, the model stays as it is, and
    all ranks raise an error (check_finite).
    """
    name = f"{learner.name}_loss"
    is_rate = isinstance(lr, Real) and 0 <= lr < float("inf")
    check_result(cfg, f"{learner.name}_rate", is_rate, "a learning rate of 0 or more", lr)
    if denominator is None:
        denominator = sum_of_weights(batch, learner.name, indices)
    weights = batch.per_token.get(f"{learner.name}_weights")  # (T,)
    history = []  # a Stats of each micro-batch
    for micro, is_last in micro_batches(batch, indices if denominator else [], cfg):
        if weights is not None:
            micro.weights = micro.real * weights[micro.flat_index]
        result = loss_fn(learner, batch, micro)
        is_pair = isinstance(result, tuple) and len(result) == 2
        is_right = is_pair and has_shape(result[0], ()) and isinstance(result[1], Stats)
        is_right = is_right and name in result[1].losses
        wanted = f"a pair: a sum over tokens (), and a Stats with {name}"
        check_result(cfg, name, is_right, wanted, result)
        loss, stats = result
        # The learner takes the mean of the ranks' gradients. We need their sum.
        scaled = loss * (dist.get_world_size() / denominator)
        learner.backward(scaled, is_last)
        history.append(stats)
    numbers = {}
    grad_norm = 0.0
    if history:
        # Means are over the response tokens of these samples. Losses are divided by the
        # denominator, which may also count samples that were left out.
        response_tokens = int(batch.response_lengths[indices].sum())
        numbers = join_stats(history, denominator, response_tokens)
        check_finite(cfg, learner.name, name, numbers)
        grad_norm = learner.apply_update(lr)
    numbers[f"{learner.name}_grad_norm"] = grad_norm
    numbers[f"{learner.name}_lr"] = lr
    numbers[f"{learner.name}_micro_batches"] = len(history)
    # Tokens of prompts and responses.
    numbers[f"{learner.name}_tokens"] = sum(batch.sample_lengths[i] for i in indices)
    return numbers


def check_finite(cfg, learner_name, loss_name, numbers):
    """Raises an error on all ranks if a number of an update is NaN or infinite.

    The error is a UserError if the loss function is the cause: if the outputs of the model are
    finite, and the loss is not. Otherwise it is a FloatingPointError.
    """
    outputs = [numbers.get("entropy", 0.0), numbers.get("critic_values", 0.0)]
    is_blamed = np.isfinite(outputs).all() and not np.isfinite(numbers[loss_name])
    # The policy_loss of the recipe only sums up token_loss. So token_loss is the cause.
    is_own_loss = getattr(type(cfg), loss_name) is not Recipe.policy_loss
    method = loss_name if is_own_loss else "token_loss"
    found = "NaN or infinity; if the method is right, a learning rate may be too high"
    check_result(cfg, method, not is_blamed, "finite numbers", found)
    wrong = {key: number for key, number in numbers.items() if not np.isfinite(number)}
    if wrong:
        raise FloatingPointError(f"{learner_name}: numbers are not finite: {wrong}")


class Stats:
    """Numbers of one micro-batch to log. join_stats joins those of an update.

    All micro-batches of an update must have the same names, on all ranks. Its methods raise
    UserError.
    """

    def __init__(self, micro: MicroBatch):
        self.real = micro.real
        # {name: number ()} each. Losses and sums are sums over the tokens of the micro-batch.
        self.losses = {}
        self.sums = {}
        self.maxima = {}

    def loss(self, name, total: Tensor):
        """Logs the loss of the update: the sum over all micro-batches, divided by the denominator.

        total: () of this micro-batch.
        """
        self.check(name, total, ())
        self.losses[name] = total.detach()

    def mean(self, name, numbers: Tensor):
        """Logs the mean over all response tokens that pass through the model. numbers: (M,)."""
        self.check(name, numbers, self.real.shape)
        self.sums[name] = (numbers.detach() * self.real).sum()

    def maximum(self, name, numbers: Tensor):
        """Logs the maximum over all response tokens that pass through the model. numbers: (M,)."""
        self.check(name, numbers, self.real.shape)
        # The token of a filler must not be the maximum.
        numbers = numbers.detach().float().masked_fill(self.real == 0, -float("inf"))
        self.maxima[name] = numbers.max()

    def check(self, name, numbers, shape):
        found = f"{tuple(numbers.shape)}" if isinstance(numbers, Tensor) else f"{numbers!r:.99}"
        if not has_shape(numbers, shape):
            raise UserError(f"stats: {name} must be a tensor {tuple(shape)}, and is {found}")
        if name in self.names():
            raise UserError(f"stats: {name} is logged twice in a micro-batch; choose another name")

    def names(self) -> list[str]:
        return [*self.losses, *self.sums, *self.maxima]

    def __setitem__(self, name, number):
        raise UserError(f"stats: write `stats.mean({name!r}, x)`, where x is (M,)")


def join_stats(history: list[Stats], denominator, response_tokens) -> dict[str, float]:
    """The numbers to log of an update. A collective. history: of this rank's micro-batches."""
    names = history[0].names()
    for stats in history:
        require_same_names(names, stats.names())
    # A rank with other names would call other collectives below, and all would hang.
    if dist.get_world_size() > 1:
        # Of the ranks' hashes this is max(h) and max(-h). Their sum is max(h) - min(h), which is 0
        # if all are equal. To gather the names would make the CPU wait for the GPU more often.
        hashes = torch.tensor([hash64(names), -hash64(names)], device=history[0].real.device)
        dist.all_reduce(hashes, op=dist.ReduceOp.MAX)
        if hashes.sum() != 0:
            for other in gather(names):
                require_same_names(names, other)
    sums = []
    for name in history[0].losses:
        column = torch.stack([stats.losses[name] for stats in history])  # (micro-batches,)
        sums.append(column.double().sum() / denominator)
    for name in history[0].sums:
        column = torch.stack([stats.sums[name] for stats in history])  # (micro-batches,)
        sums.append(column.double().sum() / response_tokens)
    joined = torch.stack(sums)  # (losses and sums,)
    dist.all_reduce(joined)
    if history[0].maxima:
        maxima = []
        for name in history[0].maxima:
            column = torch.stack([stats.maxima[name] for stats in history])  # (micro-batches,)
            maxima.append(column.double().max())
        maxima = torch.stack(maxima)  # (maxima,)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        joined = torch.cat([joined, maxima])
    # On a GPU `tolist` waits until the GPU has computed all numbers. So it is called once.
    return dict(zip(names, joined.tolist()))


def require_same_names(names, others):
    if names != others:
        differing = sorted(set(names) ^ set(others)) or names
        raise UserError(
            f"stats: {', '.join(differing)}: log the same names in each micro-batch, in one order"
        )
