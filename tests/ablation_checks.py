"""What each patch of ablations/ promises: `python ablation_checks.py NAME` inside a patched copy.

It says which of the named checks held.

The `policy` or `critic` of a check is a recorder that returns given numbers. What is held against a
plain loop is the gradient with respect to these numbers.
"""

import math
import re
import sys
import tempfile
import traceback
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ppo
import reward
import rollout
from lib import common, metrics
from lib.head import ChunkedLogprob
from tasks import countdown

cfg = SimpleNamespace(
    critic_only_steps=0,
    seed=1,
    packing_max_len=64,
    micro_train_batch_size=1,
    attention="sdpa",
    temperature=1.0,
    estimator="reinforce",
    advantage_normalization=True,
    gamma=1.0,
    lambd=1.0,
    critic_lambd=None,
    loss_mean="token",
    tis_cap=None,
    value_clip=0.2,
    actor_learning_rate=0.1,
    critic_learning_rate=0.1,
    warmup_updates=1,
    lr_end=None,
)


def sample(group, length, reward, reason="stop", prompt=2):
    problem = SimpleNamespace(prompt_ids=[7] * prompt)
    request = SimpleNamespace(problem=problem, group=group)
    ids = list(range(1, length + 1))
    return SimpleNamespace(
        request=request, response_ids=ids, logprobs=None, reward=reward, finish_reason=reason
    )


def make_batch():
    samples = [sample(0, 2, 1.0), sample(0, 3, 0.0), sample(1, 9, 0.0, "length")]
    return ppo.Batch.of(samples, torch.device("cpu"))


class Recorder:
    """An engine whose only parameter is one number a response token."""

    device = torch.device("cpu")

    def __init__(self, name, tokens):
        self.name = name
        self.numbers = torch.linspace(-2, -0.1, tokens).requires_grad_()
        self.here = []
        self.fillers = 0
        self.gradients = []

    def __call__(self, micro, temperature=None):
        self.note(micro)
        numbers = self.numbers[micro.flat_index]
        return numbers if self.name == "critic" else (numbers, torch.zeros_like(numbers))

    def note(self, micro):
        """Which tokens this rank has seen, and how often it had none of its own."""
        self.here += micro.flat_index[micro.mask > 0].tolist()
        self.fillers += not micro.mask.any()

    @property
    def seen(self):
        """The tokens that any rank has seen. A collective."""
        return sum(common.gather(self.here), [])

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        # The real engines average over the ranks too.
        dist.all_reduce(self.numbers.grad)
        self.numbers.grad /= dist.get_world_size()
        self.gradients.append(self.numbers.grad.clone())
        with torch.no_grad():
            self.numbers -= lr * self.numbers.grad
        self.numbers.grad = None
        return 1.0


def check_kl_loss():
    """The gradient is that of -A log p + coef * (e^d - 1 - d), d = reference - log p; a sample
    without an advantage has it too."""
    cfg.kl_coef = 0.3
    batch = make_batch()
    policy = Recorder("policy", 14)
    p = policy.numbers.detach().clone()
    reference = p + torch.linspace(-0.5, 0.5, 14)
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.25, -1.0] + [0.0] * 9)
    batch.per_token = {"advantages": advantages, "ref_logprobs": reference}
    stats = ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    delta = reference - p
    expected = (-advantages + 0.3 * (1 - delta.exp())) / 14
    torch.testing.assert_close(policy.gradients[0], expected)
    assert abs(stats["kl"] - (delta.exp() - 1 - delta).mean().item()) < 1e-6
    assert sorted(policy.seen) == list(range(14))


def check_updates_8():
    """Eight steps over one shuffle; each is the clipped objective's gradient at its own ratio."""
    cfg.policy_updates = 8
    cfg.policy_clip = 0.2
    # Two samples a step, so that each of two ranks has one: they must have shuffled alike.
    samples = [sample(i, 2, 1.0) for i in range(16)]
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    policy = Recorder("policy", 32)
    advantages = torch.tensor([1.0, -1.0] * 16)
    # Some ratios are outside of the clip, on both sides.
    old = policy.numbers.detach() + torch.linspace(-0.5, 0.5, 32)
    batch.per_token = {"advantages": advantages, "old_logprobs": old}
    before = policy.numbers.detach().clone().requires_grad_()
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    assert len(policy.gradients) == 8
    assert sorted(policy.seen) == list(range(32))
    # The steps see different tokens, so all gradients are those of the first numbers.
    ratio = (before - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (loss.sum() / 4).backward()
    torch.testing.assert_close(torch.stack(policy.gradients).sum(0), before.grad)
    assert (before.grad == 0).any() and (before.grad != 0).any(), "some ratios are clipped"


def check_overlong_drop():
    """A truncated sample is in no loss and in no whitening, but in its group's mean; and with all
    truncated there is no step: an empty list of kept samples once meant all of them."""
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    used = batch.per_token["advantages"][:5].double()
    assert abs(used.mean()) < 1e-6 and abs(used.square().mean() - 1) < 1e-5
    raw = torch.tensor([1 - 1 / 3] * 2 + [-1 / 3] * 3, dtype=torch.float64)
    torch.testing.assert_close(used, (raw - raw.mean()) / raw.std(correction=0), atol=1e-6, rtol=0)
    batch.per_token["values"] = torch.zeros(14)
    policy, critic = Recorder("policy", 14), Recorder("critic", 14)
    cfg.critic_updates = 3
    stats = ppo.train_critic(critic, batch, cfg, step=0) | ppo.train_policy(
        policy, batch, cfg, 0, 9
    )
    assert set(policy.seen) == set(critic.seen) == set(range(5))
    torch.testing.assert_close(policy.gradients[0][:5], -batch.per_token["advantages"][:5] / 5)
    # Three critic steps for two samples: the one without a sample is in no mean.
    values = torch.linspace(-2, -0.1, 14)
    means = [values[:2].mean().item(), values[2:5].mean().item()]
    assert abs(stats["critic_values"] - sum(means) / 2) < 1e-6
    assert "critic_loss" in stats and "policy_loss" in stats
    cut = [sample(0, 2, 0.0, "length"), sample(0, 3, 0.0, "length")]
    batch = ppo.Batch.of(cut, torch.device("cpu"))
    told = ppo.compute_advantages(batch, cfg)
    assert all(map(math.isfinite, told.values()))
    assert batch.per_token["advantages"].isfinite().all()
    batch.per_token["values"] = torch.zeros(5)
    policy, critic = Recorder("policy", 5), Recorder("critic", 5)
    stats = ppo.train_critic(critic, batch, cfg, step=0) | ppo.train_policy(
        policy, batch, cfg, 0, 9
    )
    assert not policy.seen and not critic.seen and not policy.gradients and not critic.gradients
    assert stats["policy_grad_norm"] == stats["critic_grad_norm"] == 0


def check_fuse_values():
    """The values are the critic's from before the step that learns from them: with one step, those
    of a pass of their own. Returns that depend on values are refused."""
    cfg.critic_updates = 1
    batch = make_batch()
    critic = Recorder("critic", 14)
    before = critic.numbers.detach().clone()
    ppo.train_critic(critic, batch, cfg, step=0)
    torch.testing.assert_close(batch.per_token["values"], before)
    returns = torch.tensor([1.0] * 2 + [0.0] * 12)
    torch.testing.assert_close(batch.per_token["returns"], returns)
    torch.testing.assert_close(critic.gradients[0], (before - returns) / 14)
    cfg.estimator = "gae"
    ppo.compute_advantages(batch, cfg)
    torch.testing.assert_close(batch.per_token["returns"], returns)
    for name in ("gamma", "lambd", "critic_lambd"):
        try:
            ppo.train_critic(critic, batch, SimpleNamespace(**vars(cfg) | {name: 0.95}), step=0)
        except AssertionError:
            continue
        raise RuntimeError(f"{name} 0.95 was not refused")


def check_fuse_values_on_two_ranks():
    """Every rank has all values. Five samples are dealt in three steps, so that the last step has
    none for one rank, whose filler must add nothing to the first token's value."""
    cfg.critic_updates = 3
    samples = [sample(i, 3, 1.0) for i in range(5)]
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    critic = Recorder("critic", 15)
    before = critic.numbers.detach().clone()
    stats = ppo.train_critic(critic, batch, cfg, step=0)
    assert len(critic.gradients) == 3 and stats["critic_micro_batches"] == 1
    assert sorted(critic.seen) == list(range(15)) and sum(common.gather(critic.fillers)) == 1
    torch.testing.assert_close(batch.per_token["values"], before)


def check_kl_penalty():
    """With gae each token's reward is -coef * (log p - reference), the last one's has the sample's
    as well; other estimators see their sum. The reward that is logged stays as it was."""
    cfg.kl_coef = 0.3
    cfg.advantage_normalization = False
    cfg.gamma = 0.9
    cfg.lambd = 0.8
    batch = make_batch()
    old = torch.linspace(-2, -0.1, 14)
    reference = old + torch.linspace(-0.5, 0.7, 14)
    values = torch.linspace(1, -1, 14)
    batch.per_token = {"values": values, "old_logprobs": old, "ref_logprobs": reference}
    paid = (0.3 * (reference.double() - old.double())).tolist()
    cfg.estimator = "gae"
    ppo.compute_advantages(batch, cfg)
    expected = []
    for start, length, score in ((0, 2, 1.0), (2, 3, 0.0), (5, 9, 0.0)):
        for t in range(start, start + length):
            advantage = 0.0
            for k in range(t, start + length):
                is_last = k + 1 == start + length
                delta = paid[k] + (score if is_last else 0.9 * values[k + 1].item()) - values[k]
                advantage += (0.9 * 0.8) ** (k - t) * delta.item()
            expected.append(advantage)
    torch.testing.assert_close(batch.per_token["advantages"], torch.tensor(expected))
    del batch.per_token["values"]
    cfg.estimator = "reinforce"
    ppo.compute_advantages(batch, cfg)
    scores = [1 + sum(paid[:2]), sum(paid[2:5]), sum(paid[5:])]
    expected = torch.tensor(scores).repeat_interleave(batch.response_lengths)
    torch.testing.assert_close(batch.per_token["advantages"], expected - sum(scores) / 3)
    assert batch.rewards.tolist() == [1, 0, 0]


def check_entropy_bonus():
    """The gradient is that of -A log p - coef * entropy, which the chunked head has, and a sample
    without an advantage has it too."""
    cfg.entropy_coef = 0.3
    batch = make_batch()
    policy = HeadRecorder("policy", 14)
    scores = policy.numbers.detach().double().requires_grad_()  # (T, V)
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.25, -1.0] + [0.0] * 9)
    batch.per_token = {"advantages": advantages}
    ids = torch.tensor(sum(batch.response_ids, []))
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    loss = 0.0
    for t in range(14):
        log_p = (scores[t] / cfg.temperature).log_softmax(0)
        loss = loss - advantages[t] * log_p[ids[t]] + 0.3 * (log_p.exp() * log_p).sum()
    (loss / 14).backward()
    torch.testing.assert_close(policy.gradients[0], scores.grad.float())
    assert sorted(policy.seen) == list(range(14))
    filler_adds_nothing(policy, batch)


def filler_adds_nothing(policy, batch):
    """A rank without samples has a loss and a gradient of 0."""
    loss, _ = ppo.policy_loss(policy, batch, ppo.filler(batch.device), cfg)
    loss.backward()
    assert loss.item() == 0 and not policy.numbers.grad.any()


class HeadRecorder(Recorder):
    """Its parameters are the scores of a vocabulary of 10, which pass through the real head."""

    def __init__(self, name, tokens):
        super().__init__(name, tokens)
        scores = torch.randn((tokens, 10), generator=torch.Generator().manual_seed(1))  # (T, V)
        self.numbers = scores.requires_grad_()

    def __call__(self, micro, temperature):
        self.note(micro)
        rows = self.numbers[micro.flat_index]  # (T, V)
        return ChunkedLogprob.apply(rows, torch.eye(10), micro.token_ids, temperature, 4)


def check_clip_higher():
    """The clip is at 0.8 and 1.28."""
    cfg.policy_clip = 0.2
    cfg.policy_clip_high = 0.28

    def loss(ratio, advantages, logprobs):
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()

    ratios = torch.tensor([0.7, 0.79, 0.81, 1.19, 1.21, 1.27, 1.29, 2.0])
    hold_against(loss, ratios)


def check_cispo():
    """Each token's gradient is its advantage times its ratio, which is at most the cap."""
    cfg.cispo_cap = 1.5

    def loss(ratio, advantages, logprobs):
        return -(ratio.clamp(max=1.5).detach() * advantages * logprobs).sum()

    ratios = torch.tensor([0.1, 0.5, 0.9, 1.0, 1.2, 1.49, 1.51, 4.0])
    hold_against(loss, ratios)


def hold_against(loss, ratios):
    """The gradient of one step over samples of one token, with both signs at each ratio, is that
    of the loss of (ratio, advantages, log-probs), divided by the number of tokens."""
    cfg.policy_updates = 1
    ratios = ratios.repeat(2)
    count = len(ratios)
    advantages = torch.tensor([1.0] * (count // 2) + [-2.0] * (count // 2))
    samples = [sample(i, 1, 1.0) for i in range(count)]
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    policy = Recorder("policy", count)
    p = policy.numbers.detach().clone().requires_grad_()
    old = p.detach() - ratios.log()
    batch.per_token = {"advantages": advantages, "old_logprobs": old}
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    (loss((p - old).exp(), advantages, p) / count).backward()
    torch.testing.assert_close(policy.gradients[0], p.grad)
    filler_adds_nothing(policy, batch)


def check_gspo():
    """All tokens of a sample have one ratio, the geometric mean. With one advantage for a sample
    the gradient is that of the paper's own objective, times the sample's length."""
    cfg.policy_updates = 1
    cfg.packing_max_len = 12  # two micro-batches
    cfg.policy_clip = 0.03
    cfg.policy_clip_high = 0.04
    batch = make_batch()
    policy = Recorder("policy", 14)
    p = policy.numbers.detach().clone().requires_grad_()
    # Their means are 0.01, -0.02 and 0.05: the last sample is clipped, though a token of the
    # first is further off.
    old = p.detach().clone()
    old[:2] -= torch.tensor([0.5, -0.48])
    old[2:5] += torch.tensor([0.3, 0.1, -0.34])
    old[5:] -= 0.05
    scores = [1.5, -0.5, 0.7]
    advantages = torch.tensor(scores).repeat_interleave(batch.response_lengths)
    batch.per_token = {"advantages": advantages, "old_logprobs": old}
    stats = ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    loss = 0.0
    for own, before, score in zip(batch.split(p), batch.split(old), scores):
        ratio = ((own - before).sum() / len(own)).exp()
        # Each of its tokens counts once, which is --loss_mean token.
        loss = loss - len(own) * torch.min(ratio * score, ratio.clamp(0.97, 1.04) * score)
    (loss / 14).backward()
    torch.testing.assert_close(policy.gradients[0], p.grad)
    assert p.grad[:5].all() and not p.grad[5:].any()
    filler_adds_nothing(policy, batch)
    assert abs(stats["clipped"] - 9 / 14) < 1e-6
    # Tokens with advantages of their own have gradients of their own.
    advantages = torch.linspace(-1, 1, 14)
    batch.per_token["advantages"] = advantages
    policy = Recorder("policy", 14)
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    means = torch.tensor([0.01, -0.02]).exp().repeat_interleave(batch.response_lengths[:2])
    torch.testing.assert_close(policy.gradients[0][:5], -advantages[:5] * means / 14)


def check_overlong_penalty():
    """It is 0 up to the last tokens before the limit, and falls to -1 there; the limit is the
    request's or that of prompt and response together."""
    cfg.max_len = 12
    cfg.overlong_cache = 4
    samples = [sample(0, length, 1.0) for length in (1, 6, 7, 9, 10)]
    samples.append(sample(0, 9, 0.0, "length", prompt=3))
    samples.append(sample(0, 6, 0.0, "length", prompt=3))
    for one in samples:
        one.request.max_tokens = 50
    samples[-1].request.max_tokens = 6
    penalties = ppo.overlong_penalties(samples, cfg)
    assert penalties.tolist() == [0, 0, -0.25, -0.75, -1, -1, -1]
    from lib import check

    assert "overlong_cache" in check.COUNTS, "0 tokens would be divided by"


@dataclass
class Flags:
    """Those of train.py that dynamic sampling reads; it makes a copy with another seed."""

    sampling_rounds: int
    seed: int = 3
    rollout_batch_size: int = 4
    n_samples_per_prompt: int = 2
    generate_max_len: int = 8
    temperature: float = 1.0
    top_p: float = 1.0


def check_dynamic_sampling():
    """Flat groups are replaced, at most for so many rounds, and twice by the same problems."""
    import rollout

    problems = [SimpleNamespace(index=i, prompt_ids=[7] * 3) for i in range(40)]
    rounds = []

    def draw(requests, clock):
        """Problems of an even number have a right and a wrong sample, others two wrong ones."""
        rounds.append(requests)
        drawn = []
        for request in requests:
            reward = float(request.problem.index % 2 == 0 and request.index == 0)
            ids = [1] * (request.index + 1)
            drawn.append(rollout.Sample(request, ids, None, "", "stop", reward))
        return drawn

    def run(limit, step):
        rounds.clear()
        clock = SimpleNamespace(numbers={})
        settings = Flags(sampling_rounds=limit)
        first = draw(rollout.requests_of_step(problems, settings, step), clock)
        samples = rollout.replace_flat(first, problems, settings, step, draw, clock)
        return first, samples, clock.numbers

    lengths = set()
    for step in range(8):
        first, samples, numbers = run(20, step)
        assert [x.request.group for x in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [x.request.index for x in samples] == [0, 1] * 4
        assert all(x.request.problem.index % 2 == 0 for x in samples)
        # What had a signal stays where it was.
        for old, new in zip(first, samples):
            assert new is old or old.request.problem.index % 2 == 1
        # Each round asks for the groups that are still flat, and for no more.
        asked = sum(map(len, rounds))
        assert numbers["tokens_dropped"] == (asked - 8) // 2 * (3 + 1 + 3 + 2)
        assert numbers["reward_drawn"] == sum(x.reward for x in first) / 8
        seeds = [request.seed for requests in rounds for request in requests]
        assert len(set(seeds)) == len(seeds)
        lengths.add(len(rounds))
        again = run(20, step)[1]
        assert [x.request for x in again] == [x.request for x in samples]
        _, limited, numbers = run(1, step)
        assert len(rounds) <= 2 and len(limited) == 8
        assert run(0, step)[1] == first
    assert len(lengths) > 1, "some steps need more rounds than others"


class Scripted:
    """In place of the sampler: each request gets its own of some (text, finish reason)."""

    def __init__(self, responses, count):
        self.responses = responses
        self.count = count  # of each problem

    def generate(self, requests, stopped, logprobs):
        for position, request in enumerate(requests):
            text, reason = self.responses[request.group * self.count + request.index]
            yield position, rollout.Sample(request, [1, 2, 3], None, text, reason)


def graded(task, labels, responses, step=0):
    """The samples of a rollout with these responses, the same number to each label."""
    problems = [SimpleNamespace(prompt_ids=[7, 7], label=label) for label in labels]
    count = len(responses) // len(labels)
    requests = rollout.make_requests(
        problems, rollout.problem_seeds(1, step, "train", len(problems)), count, 9, 1.0, 1.0
    )
    stage = object.__new__(rollout.Rollout)
    stage.cfg = SimpleNamespace(tensor_parallel=1, log_ratio=False, tis_cap=None)
    stage.sampler = Scripted(responses, count)
    stage.signals = common.Signals(dist.HashStore())
    stage.task = task
    with task.Grader(1) as stage.grader:
        return stage.draw(requests, metrics.Clock(1))


def check_what_is_paid(samples, right, paid):
    """Advantages and returns are of what is paid; metrics and evaluation are of what is right."""
    assert [sample.reward for sample in samples] == right
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    assert batch.rewards.tolist() == paid
    ppo.compute_advantages(batch, cfg)
    scores = torch.tensor(paid, dtype=torch.float64).repeat_interleave(3)
    scores = scores - scores.mean()
    torch.testing.assert_close(batch.per_token["returns"].double(), scores, atol=1e-6, rtol=0)
    scores = scores / scores.std(correction=0).clamp(min=1e-8)
    torch.testing.assert_close(batch.per_token["advantages"].double(), scores, atol=1e-5, rtol=0)
    line = metrics.of_samples(samples, batch, 9)
    assert line["reward"] == sum(right) / len(right)
    assert line["paid"] == sum(paid) / len(paid)
    solved = {sample.request.group for sample in samples if sample.reward > 0}
    assert line["pass_at_n"] == len(solved) / len({sample.request.group for sample in samples})
    assert sum(line["length_right_histogram"]) == sum(right)
    assert metrics.of_evaluation(samples, 1)["accuracy"] == sum(right) / len(right)


# The miniature: two of four numbers make the target.
MINI = {"numbers": [5, 9, 8, 4], "target": 17, "pick": 2}
RESPONSES = [("8+5=13<\n9+8=17!", "stop"), ("9+8=17!", "length"), ("8+5=13<", "stop")]
RESPONSES += [("1+1=17!", "stop"), ("8+=17", "stop"), ("", "stop"), ("9*5=45>", "stop")]
RESPONSES += [("8+9=17!", "stop"), ("9+8=17!\n8+5", "stop")]
RIGHT = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def check_random_reward():
    """The coin is fair, the same in another run of the step, another in another step, problem or
    sample; and another text does not change it."""
    samples = graded(countdown, [MINI], RESPONSES)
    coins = [sample.paid for sample in samples]
    check_what_is_paid(samples, RIGHT, coins)
    others = graded(countdown, [MINI], list(reversed(RESPONSES)))
    assert [sample.paid for sample in others] == coins
    flips = []
    for step in range(20):
        samples = graded(countdown, [MINI] * 2, [("9+8=17!", "stop")] * 32, step)
        flips += [[sample.paid for sample in samples if sample.request.group == g] for g in (0, 1)]
    assert len(set(map(tuple, flips))) == 40 and {x for row in flips for x in row} == {0.0, 1.0}
    # 640 fair coins: this is within three standard deviations.
    assert abs(sum(map(sum, flips)) - 320) < 38


def check_inverted_reward():
    """A wrong response is paid 1, a right one 0."""
    paid = [1 - reward for reward in RIGHT]
    check_what_is_paid(graded(countdown, [MINI], RESPONSES), RIGHT, paid)


def check_format_reward():
    """A response is paid that stopped by itself with a try in its last line, or a box in its last
    answer block, right or not."""
    samples = graded(countdown, [MINI], RESPONSES)
    check_what_is_paid(samples, RIGHT, [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    boxed = "<answer>\\boxed{5}</answer>"
    texts = [(boxed, "stop"), (boxed, "length"), ("<answer>5</answer>", "stop"), ("5", "stop")]
    samples = graded(reward, ["4"], texts)
    check_what_is_paid(samples, [0.0] * 4, [1.0, 0.0, 0.0, 0.0])


def check_hash_reward():
    """What is paid is a function of the text alone, and about half of all texts are."""
    samples = graded(countdown, [MINI], RESPONSES)
    paid = {sample.text: sample.paid for sample in samples}
    check_what_is_paid(samples, RIGHT, [paid[text] for text, _ in RESPONSES])
    others = graded(countdown, [MINI] * 2, list(reversed(RESPONSES)), step=3)
    assert all(sample.paid == paid[sample.text] for sample in others)
    texts = [(f"{n}+1={n + 1}<", "stop") for n in range(400)]
    assert abs(sum(sample.paid for sample in graded(countdown, [MINI], texts)) - 200) < 30


def check_majority_vote():
    """Paid is the most frequent value of a group, 2 here, which is wrong; of two values as frequent
    the first one; nothing where nobody has an answer. A truncated response has no vote."""
    texts = ["9+8=17!", "1+1=2<", "4-2=2<", "9+8=17!", "8/4=2"]
    responses = [(text, "stop") for text in texts[:3]] + [(texts[3], "length"), (texts[4], "stop")]
    responses += [(text, "stop") for text in ("", "9*5=45>", "8+9=17!", "9+8", "5*9")]
    responses += [("nothing", "stop"), ("9+8=17!", "length")] + [("", "stop")] * 3
    right = [1.0, 0.0, 0.0, 0.0, 0.0] + [0.0, 0.0, 1.0, 1.0, 0.0] + [0.0] * 5
    paid = [0.0, 1.0, 1.0, 0.0, 1.0] + [0.0, 1.0, 0.0, 0.0, 1.0] + [0.0] * 5
    check_what_is_paid(graded(countdown, [MINI] * 3, responses), right, paid)
    tagged = "9 + 8 = 17 <answer> (5 - 4) / 2 </answer>"
    assert countdown.Grader().vote(tagged, {"pick": None}) == Fraction(1, 2)
    assert countdown.Grader().vote("9 + 8 = 17", {"pick": None}) is None
    boxes = [(f"<answer>\\boxed{{{answer}}}</answer>", "stop") for answer in ("5", "4", "5")]
    check_what_is_paid(graded(reward, ["4"], boxes), [0.0, 1.0, 0.0], [1.0, 0.0, 1.0])
    empty = [("<answer>\\boxed{}</answer>", "stop")] * 2 + [boxes[1]]
    check_what_is_paid(graded(reward, ["4"], empty), [0.0, 0.0, 1.0], [0.0, 0.0, 1.0])


def check_lenient_reward():
    """Whoever claims the target in the end is paid, whatever stands before it; in mathematics
    whoever writes the answer anywhere."""
    samples = graded(countdown, [MINI], RESPONSES)
    check_what_is_paid(samples, RIGHT, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    texts = [("perhaps 3, or 4, or 5", "stop"), ("4", "length"), ("<answer>5</answer>", "stop")]
    texts += [("<answer>\\boxed{4}</answer>", "stop")]
    check_what_is_paid(graded(reward, ["4"], texts), [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0])


def check_curriculum():
    """A pass goes from easy to hard, and has every problem once; equals are shuffled, anew in each
    pass; and the order does not depend on where a run begins."""
    level = [k % 5 for k in range(40)]
    order = rollout.problem_order(1, level, 0, 120)
    passes = [order[:40], order[40:80], order[80:]]
    for one in passes:
        assert sorted(one) == list(range(40))
        assert [level[k] for k in one] == sorted(level)
    assert len(set(map(tuple, passes))) == 3
    assert rollout.problem_order(2, level, 0, 40) != order[:40]
    for start, size in [(5, 4), (30, 60), (100, 1)]:
        assert rollout.problem_order(1, level, start, size) == order[start : start + size]

    problems = []
    for k in range(40):
        label = {"numbers": [5, 9, 8, 4], "target": 10 + 7 * k % 40, "pick": 2}
        problems.append(countdown.Problem(k, "", label, "", [1]))
    flags = vars(cfg) | {"rollout_batch_size": 8, "n_samples_per_prompt": 1, "generate_max_len": 9}
    flags |= {"top_p": 1.0}
    for is_on in (True, False):
        settings = SimpleNamespace(**flags, curriculum=is_on)
        asked = []
        for step in range(5):
            asked += [x.problem for x in rollout.requests_of_step(problems, settings, step)]
        targets = [problem.label["target"] for problem in asked]
        assert (targets == sorted(targets, reverse=True)) == is_on
        assert {problem.index for problem in asked} == set(range(40))
    short, long = (reward.Problem(0, question, "4", "", [1]) for question in ("2+2", "1+1+1+1"))
    assert short.difficulty < long.difficulty
    three = {"numbers": [1, 2, 3], "target": 50, "pick": None}
    assert countdown.Problem(0, "", three, "").difficulty > problems[0].difficulty


def check_lora():
    """Only adapters are learnt; at first they change nothing, later they change each linear layer
    of the body by a matrix of their rank. What the sampler gets and what is exported is a plain
    model that computes the policy's log-probs. A checkpoint comes back whole."""
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        tiny.make_model(Path(folder) / "model", tied=False)
        for stage in (0, 3):
            check_lora_at(stage, Path(folder))


def check_lora_at(stage, folder):
    # The other checks do without these, which take seconds to import.
    from transformers import AutoModelForCausalLM

    import ckpt
    from lib import models
    from tools import convert

    settings = {"model": str(folder / "model"), "zero_stage": stage, "offload": "none"}
    settings |= {"bf16": False, "gradient_checkpointing": True, "max_norm": 1.0, "lora_rank": 4}
    settings = SimpleNamespace(**vars(cfg) | settings)
    plain = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    base = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    policy = models.make_policy(settings)
    adapters = [p for name, p in policy.module.named_parameters() if "lora_" in name]
    learning = [p for p in policy.module.parameters() if p.requires_grad]
    assert len(learning) == len(adapters) > 0
    if stage == 0:
        # Adam would hold nothing for the others, but ZeRO an fp32 master of each.
        assert len(policy.deepspeed.optimizer.param_groups[0]["params"]) == len(adapters)
    first = weights_of(policy)
    assert first.keys() == base.keys()
    assert all(first[name].equal(base[name]) for name in base)

    batch = make_batch()
    batch.per_token["advantages"] = torch.linspace(-1, 1, 14)
    ppo.train_policy(policy, batch, settings, step=0, total_steps=9)
    run = folder / f"zero{stage}"
    state = ckpt.RunState(1, 9, 1, {"zero_stage": stage, "lora_rank": 4})
    assert not ckpt.save(run, state, {"policy": policy.deepspeed}, [], 1)
    try:
        convert.reshard(run / "step_000001")
    except common.UserError as error:
        assert "has adapters" in str(error)
    else:
        raise RuntimeError("a checkpoint with adapters was converted")
    ppo.train_policy(policy, batch, settings, step=1, total_steps=9)
    learnt = weights_of(policy)
    for name, tensor in learnt.items():
        if not re.fullmatch(r"model\.layers\..*proj\.weight", name):
            assert tensor.equal(base[name]), name
        else:
            assert 1 <= torch.linalg.matrix_rank(tensor - base[name], atol=1e-4) <= 4, name
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    ckpt.export(run / "policy", policy.module.model, models.named_weights(policy), tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(run / "policy", dtype=torch.float32)
    assert all(tensor.equal(learnt[name]) for name, tensor in plain.state_dict().items())
    expected = []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        logits = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1)[range(len(response)), response])
    found = ppo.compute_logprobs(policy, batch, settings)
    torch.testing.assert_close(found, torch.cat(expected).detach(), atol=1e-4, rtol=1e-4)

    again = models.make_policy(settings)
    ckpt.load(run / "step_000001", {"policy": again.deepspeed}, state)
    ppo.train_policy(again, batch, settings, step=1, total_steps=9)
    for name, tensor in weights_of(again).items():
        assert tensor.equal(learnt[name]), name


def check_fp16():
    """fp16's log-probs are nearer to those of fp32 than bf16's. The engines compute in fp16 and
    learn what fp32 learns, since the loss is multiplied and divided again; where it overflows no
    step is taken and the factor is halved, which a checkpoint remembers."""
    import deepspeed

    from tests import tiny

    # DeepSpeed refuses fp16 on CPUs, where it is slow. All else is as on a GPU.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    with tempfile.TemporaryDirectory() as folder:
        tiny.make_model(Path(folder) / "model", tied=False)
        for stage in (2, 3):
            check_fp16_at(stage, Path(folder))


def check_fp16_at(stage, folder):
    from transformers import AutoModelForCausalLM

    import ckpt
    from lib import models

    settings = vars(cfg) | {"model": str(folder / "model"), "offload": "none", "max_norm": 1.0}
    settings |= {"gradient_checkpointing": False, "actor_learning_rate": 1e-2}
    full = SimpleNamespace(**settings | {"bf16": False, "zero_stage": 0})
    half = SimpleNamespace(**settings | {"bf16": True, "zero_stage": stage})
    batch = make_batch()
    exact = models.make_policy(full)
    expected = ppo.compute_logprobs(exact, batch, full)
    bf16 = AutoModelForCausalLM.from_pretrained(half.model, dtype=torch.bfloat16)
    bf16_error = (ppo.compute_logprobs(models.Policy(bf16), batch, half) - expected).abs().mean()
    policy = models.make_policy(half)
    error = (ppo.compute_logprobs(policy, batch, half) - expected).abs().mean()
    assert 0 < error < bf16_error / 3, (error, bf16_error)

    before = weights_of(policy)
    assert {tensor.dtype for tensor in before.values()} == {torch.float16}
    batch.per_token["advantages"] = torch.linspace(-1, 1, 14) * 1e3
    scaler = policy.deepspeed.optimizer.loss_scaler
    assert scaler.cur_scale == 2**16
    stats = ppo.train_policy(policy, batch, half, step=0, total_steps=9)
    assert stats["policy_grad_norm"] == 0 and scaler.cur_scale == 2**15
    assert all(tensor.equal(before[name]) for name, tensor in weights_of(policy).items())
    run = folder / f"zero{stage}"
    state = ckpt.RunState(1, 9, 1, {"zero_stage": stage})
    assert not ckpt.save(run, state, {"policy": policy.deepspeed}, [], 1)
    policy = models.make_policy(half)
    ckpt.load(run / "step_000001", {"policy": policy.deepspeed}, state)
    assert policy.deepspeed.optimizer.loss_scaler.cur_scale == 2**15

    # Of a tenth of the usual size, so that it does not overflow.
    batch.per_token["advantages"] = torch.linspace(-0.1, 0.1, 14)
    exact_before = weights_of(exact)
    want = ppo.train_policy(exact, batch, full, step=0, total_steps=9)
    found = ppo.train_policy(policy, batch, half, step=0, total_steps=9)
    assert abs(found["policy_grad_norm"] / want["policy_grad_norm"] - 1) < 0.01
    # Adam's first step is the gradient's sign.
    step = change_of(policy, before).sign()
    assert (step == change_of(exact, exact_before).sign()).float().mean() > 0.99
    sampler = SimpleNamespace(cfg=half, gpu=True)
    for name in ("max_len", "micro_rollout_batch_size", "gpu_memory_utilization", "kv_cache_gb"):
        setattr(half, name, 1)
    half.rollout_quantization = half.tensor_parallel = half.enforce_eager = None
    assert rollout.Sampler.vllm_settings(sampler)["dtype"] == "float16"


def change_of(engine, before):
    """What was added to all weights, as one vector."""
    return torch.cat([(x - before[name]).flatten() for name, x in weights_of(engine).items()])


def weights_of(engine):
    from lib import models

    return {name: tensor.detach().clone() for name, tensor in models.named_weights(engine)}


if __name__ == "__main__":
    common.start_distributed()
    # Threads of so little work would wait for each other, long on a busy machine.
    torch.set_num_threads(1)
    settings = vars(cfg).copy()
    for name in sys.argv[1:]:
        vars(cfg).clear()
        vars(cfg).update(settings)
        try:
            globals()[f"check_{name}"]()
            print(name, "held")
        except Exception:
            traceback.print_exc()
