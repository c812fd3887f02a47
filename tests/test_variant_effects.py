"""Each variant does what its docstring says: a function check_NAME or a row of a table for each.

A check calls the functions of the stages while its variant is installed. The learner of a check is
a Recorder, whose gradient is compared with that of a plain loop. `python test_variant_effects.py
NAME ...` runs checks in one of several ranks.
"""

import contextlib
import dataclasses
import functools
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import naive
import pytest
import tiny
import torch
import torch.distributed as dist
from conftest import arguments, clean_environment, held_port
from test_ppo import CARD, Card, OnCard
from transformers import AutoModelForCausalLM

import ckpt
import ppo
import reward
import rollout
import train
from lib import check, common, metrics, models
from lib.common import UserError
from lib.variants import HOME, Variants
from tasks import countdown
from tools import convert

CPU = torch.device("cpu")
SETTINGS = {"seed": 1, "packing_max_len": 48, "attention": "sdpa", "warmup_updates": 1}
SETTINGS |= {"actor_learning_rate": 0.1, "critic_learning_rate": 0.1, "bf16": False}
# The variants that must stand before another one.
NEEDS = {"clip_higher": ["updates"]}
pytestmark = pytest.mark.usefixtures("process_group")
close = torch.testing.assert_close
replace = dataclasses.replace


def extended(names: list[str]):
    """Settings with the flags of these variants, which are not installed."""
    return Variants(names).extend(train.Config)(**SETTINGS)


def hold(name: str):
    """Calls the check of a variant while that variant is installed."""
    cfg = extended([*NEEDS.get(name, []), name])
    with cfg.variants.installed(train.stages()):
        CHECKS[name](cfg)


def sample(group, length, reward=1.0, reason="stop", prompt=2) -> rollout.Sample:
    problem = SimpleNamespace(prompt_ids=[7] * prompt, index=group)
    request = rollout.Request(problem, group, 0, 0, 50, 1.0, 1.0)
    return rollout.Sample(request, list(range(1, length + 1)), None, "", reason, reward)


def make_batch(cfg, samples=None) -> ppo.Batch:
    """Of these samples, or of three, the last of which is truncated."""
    three = [sample(0, 2, 1.0), sample(0, 3, 0.0), sample(1, 9, 0.0, "length")]
    return ppo.make_batch(samples or three, CPU, cfg)


class Recorder:
    """A learner whose only parameter is one number a response token."""

    device = CPU

    def __init__(self, name, tokens):
        self.name = name
        self.numbers = torch.linspace(-2, -0.1, tokens).requires_grad_()
        self.here = []  # response tokens that this rank has seen
        self.fillers = 0
        self.of_filler = 1e4  # the number that it returns for a filler
        self.gradients = []
        self.rates = []

    def __call__(self, micro, temperature=None):
        self.here += micro.flat_index[micro.mask > 0].tolist()
        self.fillers += not micro.mask.any()
        numbers = self.numbers[micro.flat_index] + self.of_filler * (1 - micro.mask)  # (t,)
        return numbers if self.name == "critic" else (numbers, numbers.cos())

    @property
    def seen(self):
        """The tokens that any rank has seen, sorted. A collective."""
        return sorted(sum(common.gather(self.here), []))

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        # The real engines average over the ranks too.
        dist.all_reduce(self.numbers.grad)
        self.gradients.append(self.numbers.grad / dist.get_world_size())
        self.rates.append(lr)
        self.numbers.grad = None
        return 1.0


# ---- losses --------------------------------------------------------------------------------------


def clipped(low, high, advantages, p, old):
    ratio = (p - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def capped(advantages, p, old):
    """CISPO: a ratio of at most 1.5 weighs a token, and has no gradient."""
    return -((p - old).exp().clamp(max=1.5).detach() * advantages * p)


def of_sequences(advantages, p, old):
    """GSPO's own objective, times the samples' lengths."""
    losses = []
    for parts in zip(*(numbers.split(LENGTHS) for numbers in (advantages, p, old))):
        advantage, own, before = parts
        loss = clipped(0.03, 0.04, advantage[0], own.mean(), before.mean())
        losses.append(len(own) * loss)
    return torch.stack(losses)


LENGTHS = [2, 3, 9, 12, 40]
# Of each variant: flags, the other log-probs of its loss, the loss by a plain formula.
LOSSES = {
    "kl_loss": (
        {"kl_loss_coef": 0.3},
        "ref_logprobs",
        lambda a, p, reference: -a * p + 0.3 * ((reference - p).exp() - 1 - (reference - p)),
    ),
    # The entropy is the Recorder's. test_models.py proves the gradient of the head's.
    "entropy_bonus": ({"entropy_coef": 0.3}, "any", lambda a, p, _: -a * p - 0.3 * p.cos()),
    "updates": ({}, "old_logprobs", functools.partial(clipped, 0.2, 0.2)),
    "clip_higher": ({}, "old_logprobs", functools.partial(clipped, 0.2, 0.28)),
    "cispo": ({"cispo_cap": 1.5}, "old_logprobs", capped),
    # It is CISPO whose old policy is the sampler.
    "tis_cap": ({"tis_cap": 1.5}, "logprobs", capped),
    "gspo": ({"policy_clip": 0.03, "policy_clip_high": 0.04}, "old_logprobs", of_sequences),
}


def check_loss(name, cfg):
    """The gradient is that of the plain formula. A sample without an advantage is left out only
    where it has no gradient. A filler adds nothing."""
    flags, other, loss = LOSSES[name]
    cfg = replace(cfg, **flags)
    if hasattr(cfg, "policy_updates"):
        cfg = replace(cfg, policy_updates=1)
    batch = make_batch(cfg, [sample(k, length) for k, length in enumerate(LENGTHS)])
    policy = Recorder("policy", sum(LENGTHS))
    p = policy.numbers.detach().clone().requires_grad_()
    # Log-ratios go from -0.7 to 0.7 in a sample. Three of the means are beyond GSPO's clip.
    means = (0.0, 0.03, 0.05, -0.05, -0.05)
    ratios = [m + torch.linspace(-0.7, 0.7, length) for m, length in zip(means, LENGTHS)]
    before = p.detach() - torch.cat(ratios)
    advantages = batch.spread(torch.tensor([0.0, -0.5, 1.5, -1.0, 0.7]))
    batch.per_token = {"advantages": advantages, other: before}
    stats = ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    (loss(advantages, p, before).sum() / len(p)).backward()
    close(policy.gradients[0], p.grad)
    assert len(policy.seen) == (64 if name == "tis_cap" else 66)
    for policy.of_filler in (1e4, -1e4):
        nothing, _ = ppo.policy_loss(policy, batch, ppo.filler(CPU), cfg)
        nothing.backward()
        assert nothing.item() == 0 and not policy.numbers.grad.any()
    if name == "gspo":
        # Tokens may have advantages of their own.
        assert abs(stats["clipped"] - (9 + 12 + 40) / 66) < 1e-6
        batch.per_token["advantages"] = torch.linspace(-1, 1, 66)
        ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
        of_tokens = torch.tensor([0.0, 0.0, 0.03, 0.03, 0.03]).exp()
        close(policy.gradients[1][:5], torch.linspace(1, -1, 66)[:5] * of_tokens / 66)


def check_updates(name, cfg):
    """The old log-probs are the policy's own. Eight updates share the samples, and the rate counts
    updates. There are never more updates than samples."""
    check_loss(name, cfg)
    cfg = replace(cfg, policy_updates=8, warmup_updates=4, lr_end=0.0)
    # Two samples an update, so that each of two ranks has one.
    batch = make_batch(cfg, [sample(k, 2) for k in range(16)])
    policy = Recorder("policy", 32)
    ppo.token_passes(policy, None, None, batch, cfg, 0)
    assert batch.per_token["old_logprobs"].equal(policy.numbers)
    batch.per_token["advantages"] = torch.ones(32)
    policy.here = []
    for step in (0, 1):
        ppo.train_policy(policy, batch, cfg, step, total_steps=2)
    assert policy.seen == sorted([*range(32)] * 2)
    # All ranks have shuffled alike: an update has the gradient of two whole samples.
    assert [(gradient != 0).sum() for gradient in policy.gradients] == [4] * 16
    rates = [min(k / 4, (16 - k) / 12) for k in range(1, 17)]
    close(torch.tensor(policy.rates), 0.1 * torch.tensor(rates))
    batch = make_batch(cfg)
    batch.per_token = dict.fromkeys(("advantages", "old_logprobs"), torch.ones(14))
    policy = Recorder("policy", 14)
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    assert len(policy.gradients) == 3


def check_overlong_drop(cfg):
    """A truncated sample is in no loss and in no whitening, but in its group's mean. Where all
    samples are truncated nothing is learnt."""
    cfg = replace(cfg, estimator="reinforce", critic_updates=3)
    batch, policy, critic, stats = learn(make_batch(cfg), cfg)
    raw = torch.tensor([1 - 1 / 3] * 2 + [-1 / 3] * 3)
    used = (raw - raw.mean()) / raw.std(correction=0)
    close(batch.per_token["advantages"][:5], used)
    assert policy.seen == critic.seen == list(range(5))
    close(policy.gradients[0][:5], -used / 5)
    # There is an update for each of the two samples that count.
    assert len(critic.gradients) == 2
    values = critic.numbers.detach()
    assert abs(stats["critic_values"] - (values[:2].mean() + values[2:5].mean()) / 2) < 1e-6
    cut = [sample(0, 2, 0.0, "length"), sample(0, 3, 0.0, "length")]
    batch, policy, critic, stats = learn(make_batch(cfg, cut), cfg)
    assert not (policy.seen or critic.seen or policy.gradients or critic.gradients)
    assert all(map(math.isfinite, stats.values()))
    assert batch.per_token["advantages"].isfinite().all()


def learn(batch, cfg):
    tokens = int(batch.response_lengths.sum())
    policy, critic = Recorder("policy", tokens), Recorder("critic", tokens)
    stats = ppo.compute_advantages(batch, cfg)
    batch.per_token["values"] = torch.zeros(tokens)
    stats |= ppo.train_critic(critic, batch, cfg, step=0)
    return batch, policy, critic, stats | ppo.train_policy(policy, batch, cfg, 0, 9)


def check_fuse_values(cfg):
    """A value is the critic's from before the update that learns from it, on every rank, and the
    critic learns once. Of five samples in three updates a second rank has none in the last one. Its
    filler adds nothing to the first token's value."""
    cfg = replace(cfg, critic_updates=3)
    batch = make_batch(cfg, [sample(k, 3, float(k % 2)) for k in range(5)])
    critic = Recorder("critic", 15)
    before = critic.numbers.detach()
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]).repeat_interleave(3)
    ppo.token_passes(Recorder("policy", 15), critic, None, batch, cfg, step=0)
    ppo.critic_loss(critic, batch, ppo.filler(CPU), cfg)
    close(batch.per_token["values"], before)
    ppo.compute_advantages(batch, cfg)
    stats = ppo.train_critic(critic, batch, cfg, step=0)
    assert len(critic.gradients) == 3 and critic.seen == list(range(15))
    # All ranks' fillers, with the one above.
    assert sum(common.gather(critic.fillers)) == 2 * dist.get_world_size() - 1
    assert stats["critic_micro_batches"] == 1 and "critic_loss" in stats
    close(batch.per_token["returns"], returns)
    for gradient in critic.gradients:
        mine = gradient != 0
        close(gradient[mine], (before - returns)[mine] / mine.sum())


# ---- rewards and advantages ----------------------------------------------------------------------


def check_kl_penalty(cfg):
    """With gae each token's reward is -coef * (log p - reference), and the last one's has the
    sample's as well. Other estimators see their sum. The logged reward stays as it was."""
    cfg = replace(cfg, kl_penalty_coef=0.3, advantage_normalization=False, gamma=0.9, lambd=0.8)
    batch = make_batch(cfg)
    policy, critic, reference = (Recorder(name, 14) for name in ("policy", "critic", "reference"))
    apart = torch.linspace(-0.5, 0.7, 14)
    reference.numbers = policy.numbers + apart
    ppo.token_passes(policy, critic, reference, batch, cfg, step=0)
    paid = (0.3 * apart.double()).tolist()
    values = critic.numbers.tolist()
    ppo.compute_advantages(batch, cfg)
    expected = []
    for start, length, score in ((0, 2, 1.0), (2, 3, 0.0), (5, 9, 0.0)):
        end = start + length
        later = values[start + 1 : end] + [0.0]
        rewards = paid[start : end - 1] + [paid[end - 1] + score]
        deltas = [r + 0.9 * v - now for r, v, now in zip(rewards, later, values[start:end])]
        for t in range(length):
            expected.append(sum(0.72 ** (k - t) * deltas[k] for k in range(t, length)))
    close(batch.per_token["advantages"], torch.tensor(expected))
    del batch.per_token["values"]
    ppo.compute_advantages(batch, replace(cfg, estimator="reinforce"))
    scores = torch.tensor([1 + sum(paid[:2]), sum(paid[2:5]), sum(paid[5:])])
    close(batch.per_token["advantages"], batch.spread(scores - scores.mean()))
    assert batch.rewards.tolist() == [1, 0, 0]


def check_estimator(name, cfg):
    """The score is that of a plain loop, for groups of any size and order, and is not whitened. It
    is exactly 0 where the loop's is. Who compares samples says that two are needed."""
    cfg = replace(cfg, estimator=name)
    rng = random.Random(3)
    # The mean of equal rewards is rounded. Of ten samples each number is right.
    drawn = [(r, r) for r in (0.0, 1.0, 0.1, 1 / 3, 1e-9, 12345.678) for _ in range(7)]
    drawn += [(10 + k, float(j < k)) for k in range(11) for j in range(10)]
    for size in (1, 5, 6, 7, 8):
        drawn += [(50 + size, rng.choice([0.0, 0.01, rng.random()])) for _ in range(size)]
    rng.shuffle(drawn)
    numbers = {group: number for number, (group, _) in enumerate(drawn)}
    groups = [numbers[group] for group, _ in drawn]
    rewards = [r for _, r in drawn]
    batch = make_batch(cfg, [sample(g, rng.randint(1, 4), r) for g, r in zip(groups, rewards)])
    for k in (1, 2, 4):
        cfg = replace(cfg, pass_k=k) if name == "pass_at_k" else cfg
        stats = ppo.compute_advantages(batch, cfg)
        scores = naive.scores(name, rewards, groups, k)
        expected = batch.spread(torch.tensor(scores))
        for key in ("advantages", "returns"):
            close(batch.per_token[key], expected, rtol=1e-6, atol=1e-6)
        for score, part in zip(scores, batch.split(batch.per_token["advantages"])):
            assert bool(score) == bool(part.any())
        assert all(map(math.isfinite, stats.values()))
    assert naive.VARIANTS_COMPARE[name] == (ppo.ESTIMATORS[name].least_samples == 2)


def check_overlong_penalty(cfg):
    """It is 0 up to the last tokens before the limit, and rises to 1 there. The limit is the
    request's or that of prompt and response together."""
    cfg = replace(cfg, max_len=12, overlong_cache=4)
    samples = [sample(0, length, 1.0) for length in (1, 6, 7, 9, 10)]
    samples += [sample(0, length, 0.0, "length", prompt=3) for length in (9, 6)]
    samples[-1].request = replace(samples[-1].request, max_tokens=6)
    assert make_batch(cfg, samples).rewards.tolist() == [1, 1, 0.75, 0.25, 0, -1, -1]


# ---- what is paid --------------------------------------------------------------------------------

# The miniature: two of four numbers make the target.
MINI = {"numbers": [5, 9, 8, 4], "target": 17, "pick": 2}
CUT = "(cut)"  # behind a response that did not stop by itself
TRIES = ["8+5=13<\n9+8=17!", "9+8=17!" + CUT, "8+5=13<", "1+1=17!", "8+=17", "", "9*5=45>"]
TRIES += ["8+9=17!", "9+8=17!\n8+5"]
RIGHT = [1, 0, 0, 0, 0, 0, 0, 1, 0]
VOTES = ["9+8=17!", "1+1=2<", "4-2=2<", "9+8=17!" + CUT, "8/4=2"]
VOTES += ["", "9*5=45>", "8+9=17!", "9+8", "5*9"] + ["nothing", "9+8=17!" + CUT, "", "", ""]
VOTES_RIGHT = [1, 0, 0, 0, 0] + [0, 0, 1, 1, 0] + [0] * 5
BOX = "<answer>\\boxed{5}</answer>"
BOX4 = "<answer>\\boxed{4}</answer>"
EMPTY = "<answer>\\boxed{}</answer>"
# Of each variant: labels, as many responses to each, their rewards, and what is paid.
PAID = {
    "inverted_reward": [([MINI], TRIES, RIGHT, [0, 1, 1, 1, 1, 1, 1, 0, 1])],
    "format_reward": [
        ([MINI], TRIES, RIGHT, [1, 0, 1, 1, 1, 0, 1, 1, 0]),
        (["4"], [BOX, BOX + CUT, "<answer>5</answer>", "5"], [0, 0, 0, 0], [1, 0, 0, 0]),
    ],
    "lenient_reward": [
        ([MINI], TRIES, RIGHT, [1, 0, 0, 1, 1, 0, 0, 1, 0]),
        (["4"], ["perhaps 3, or 4", "4" + CUT, BOX, BOX4], [0, 0, 0, 1], [1, 0, 0, 1]),
    ],
    # In the first group 2 is the most frequent value, which is wrong. In the second group two
    # values are as frequent. In the third group nobody has an answer.
    "majority_vote": [
        ([MINI] * 3, VOTES, VOTES_RIGHT, [0, 1, 1, 0, 1] + [0, 1, 0, 0, 1] + [0] * 5),
        (["4"], [BOX, BOX4, BOX], [0, 1, 0], [1, 0, 1]),
        (["4"], [EMPTY, EMPTY, BOX4], [0, 0, 1], [0, 0, 1]),
    ],
}


def graded(cfg, labels, texts, step=0) -> list[rollout.Sample]:
    """Samples with the grader's rewards, the same number to each label."""
    task = reward if labels == ["4"] else countdown
    problems = [SimpleNamespace(prompt_ids=[7, 7], label=label) for label in labels]
    seeds = rollout.problem_seeds(1, step, "train", len(problems))
    requests = rollout.make_requests(problems, seeds, len(texts) // len(labels), 9, 1.0, 1.0)
    samples = []
    with task.Grader(1) as grader:
        for position, (request, text) in enumerate(zip(requests, texts)):
            reason = "length" if text.endswith(CUT) else "stop"
            text = text.removesuffix(CUT)
            answer = grader.submit(position, text, reason, request.problem.label)
            samples.append(rollout.Sample(request, [1, 2, 3], None, text, reason, answer=answer))
        for position, score in grader.results().items():
            samples[position].reward = score
    return samples


def compare_paid(cfg, samples, right, paid):
    """What is learnt from is what is paid. Samples and logs keep the grader's rewards."""
    assert [sample.reward for sample in samples] == right
    batch = make_batch(cfg, samples)
    assert batch.rewards.tolist() == paid
    line = metrics.of_samples(samples, batch, 9)
    assert (line["reward"], line["paid"]) == (sum(right) / len(right), sum(paid) / len(paid))


def check_paid(name, cfg):
    """What is paid is what the table says."""
    for labels, texts, right, paid in PAID[name]:
        cfg = replace(cfg, task="math" if labels == ["4"] else "countdown")
        compare_paid(cfg, graded(cfg, labels, texts), right, paid)


def check_random_reward(cfg):
    """The coin is fair. It is the same in another run of the step and for another text, and another
    one in another step, problem or sample."""
    coins = ppo.paid(graded(cfg, [MINI], TRIES), cfg)
    compare_paid(cfg, graded(cfg, [MINI], TRIES), RIGHT, coins)
    assert ppo.paid(graded(cfg, [MINI], TRIES[::-1]), cfg) == coins
    flips = []
    for step in range(20):
        paid = ppo.paid(graded(cfg, [MINI] * 2, ["9+8=17!"] * 32, step), cfg)
        flips += [tuple(paid[:16]), tuple(paid[16:])]
    assert len(set(flips)) == 40 and set(sum(flips, ())) == {0.0, 1.0}
    # 640 fair coins: this is within three standard deviations.
    assert abs(sum(map(sum, flips)) - 320) < 38


def check_hash_reward(cfg):
    """What is paid is a function of the text alone, and about half of all texts are."""
    samples = graded(cfg, [MINI], TRIES)
    paid = {sample.text: coin for sample, coin in zip(samples, ppo.paid(samples, cfg))}
    compare_paid(cfg, samples, RIGHT, [paid[sample.text] for sample in samples])
    others = graded(cfg, [MINI] * 3, TRIES[::-1], step=3)
    assert ppo.paid(others, cfg) == [paid[sample.text] for sample in others]
    texts = [f"{n}+1={n + 1}<" for n in range(400)]
    assert abs(sum(ppo.paid(graded(cfg, [MINI], texts), cfg)) - 200) < 30


# ---- drawing -------------------------------------------------------------------------------------


def draw_step(cfg, respond, requests, problems=(), step=0):
    """The samples of a step, its clock, and (group, index) of each request of each call of `draw`.

    respond: makes reward, tokens and finish reason of a request.
    """
    calls = []

    def draw(_, requests, clock):
        calls.append([(request.group, request.index) for request in requests])
        samples = []
        for request in requests:
            score, length, reason = respond(request)
            samples.append(rollout.Sample(request, [1] * length, None, "", reason, score))
        return samples

    clock = metrics.Clock(step + 1)
    with mock.patch.object(rollout, "draw", draw):
        return rollout.draw_step(None, requests, problems, cfg, step, clock), clock, calls


def make_problems(count: int) -> list[reward.Problem]:
    return [reward.Problem(index, "", "", "", [7] * 3) for index in range(count)]


def check_dynamic_sampling(cfg):
    """Flat groups are replaced, for at most so many rounds. A round asks for the groups that are
    still flat alone. A resumed run draws the same, and the rate counts dropped tokens."""
    cfg = replace(cfg, rollout_batch_size=4, n_samples_per_prompt=2)
    problems = make_problems(40)

    def respond(request):
        """Problems of an even number have a right and a wrong sample, the others two wrong ones."""
        is_right = request.problem.index % 2 == 0 and request.index == 0
        return float(is_right), request.index + 1, "stop"

    counts = set()
    for step in range(8):
        requests = rollout.requests_of_step(problems, cfg, step)
        runs = []
        for rounds in (0, 1, 20, 20):
            limited = replace(cfg, sampling_rounds=rounds)
            runs.append(draw_step(limited, respond, requests, problems, step))
        assert [x.request for x in runs[0][0]] == requests
        assert len(runs[1][0]) == 8 and len(runs[1][2]) <= 2
        assert runs[2][0] == runs[3][0]
        samples, clock, calls = runs[2]
        assert [(x.request.group, x.request.index) for x in samples] == calls[0]
        kept = 0
        for old, new in zip(requests, [x.request for x in samples]):
            assert new.problem.index % 2 == 0
            assert (new == old) == (new.seed == old.seed) == (old.problem.index % 2 == 0)
            kept += new == old
        assert calls == sorted(calls, key=len, reverse=True)
        dropped = (sum(map(len, calls)) - 8) // 2 * (3 + 1 + 3 + 2)
        assert clock.numbers == {"tokens_dropped": dropped, "reward_drawn": kept / 2 / 8}
        line = metrics.of_time(clock, 100)
        close(line["tokens_per_second"] * line["seconds"], 100.0 + dropped)
        counts.add(len(calls))
    assert len(counts) > 1, "some steps need more rounds than others"


def check_first_stage(cfg):
    """The other samples are drawn where the first rewards differ, or where all are 0 and a sample
    was right at the last visit, or at the first visit. Code that passes no test gets no more."""
    memory = cfg.variants.modules["first_stage"].MEMORY
    cfg = replace(cfg, first_stage=2, n_samples_per_prompt=5)
    requests = rollout.make_requests(make_problems(3), [0] * 3, 5, 99, 1.0, 1.0)
    # Group 0 is all right, 1 is mixed, 2 is all wrong.
    rewards = {0: [1.0, 1.0, 0, 0, 0], 1: [0, 1.0, 0, 0, 0], 2: [0, 0, 0, 0, 0]}
    cases = [("math", {}, [1, 2]), ("math", {"2": False}, [1]), ("math", {"2": True}, [1, 2])]
    for task, saved, expanded in [*cases, ("code", {}, [1])]:
        memory.clear()
        memory.update(saved)
        samples, clock, calls = draw_step(
            replace(cfg, task=task), lambda x: (rewards[x.group][x.index], 4, "stop"), requests
        )
        few = [(group, index) for group in range(3) for index in (0, 1)]
        rest = [(group, index) for group in expanded for index in (2, 3, 4)]
        assert calls == [few, rest], "the second call goes on where the first one ended"
        assert [(x.request.group, x.request.index) for x in samples] == sorted(few + rest)
        assert memory == {"0": True, "1": True, "2": False}
        saved = (3 - len(expanded)) * 3 * 4
        assert clock.numbers == {"prompts_expanded": len(expanded) / 3, "tokens_saved": saved}
    # Shares of the tests that pass are neither all right nor all wrong.
    partly = draw_step(replace(cfg, task="code"), lambda x: (x.index / 5, 4, "stop"), requests)
    assert len(partly[0]) == 15


def check_adaptive_len(cfg):
    """A problem's limit is half as much again as its longest finished response, and is doubled
    where more than a tenth are cut. A new problem has the last batch's limit."""
    memory = cfg.variants.modules["adaptive_len"].MEMORY
    cfg = replace(cfg, generate_max_len=1000)
    problems = make_problems(10)

    def visit(*answers):
        """Draws these (problem, tokens, finish reason), each with the limit of its problem."""
        limits = [memory.get(str(index), memory.get("", 1000)) for index, *_ in answers]
        asked = [problems[index] for index, *_ in answers]
        requests = rollout.make_requests(asked, [0] * 99, 1, 1000, 1.0, 1.0)
        samples, *_ = draw_step(cfg, lambda x: (0.0, *answers[x.group][1:]), requests)
        assert [x.request.max_tokens for x in samples] == limits
        return memory

    first = [(7, length, "stop") for length in (10, 20, 40)] + [(8, 100, "stop")]
    assert visit(*first) == {"": 150, "7": 60, "8": 150}
    assert visit(*first, (9, 150, "stop")) == {"": 225, "7": 60, "8": 150, "9": 225}
    # One in ten is not too many, and what was cut does not count.
    assert visit(*[(7, 60, "stop")] * 9, (7, 70, "length"))["7"] == 90
    assert visit(*[(7, 60, "stop")] * 8, *[(7, 90, "length")] * 2)["7"] == 180
    assert visit(*[(7, 12, "stop")] * 19, (7, 180, "length"))["7"] == 18
    for limit in (36, 72, 144, 288, 576, 1000, 1000):
        assert visit((7, 9, "length"))["7"] == limit, "none has finished"


def check_curriculum(cfg):
    """A pass goes from easy to hard and has every problem once. Equals are shuffled, anew in each
    pass. The order does not depend on where a run begins."""
    cfg = replace(cfg, rollout_batch_size=7)
    label = {"numbers": [5, 9, 8, 4], "pick": 2}
    problems = [
        countdown.Problem(k, "", label | {"target": 10 + k % 5}, "", [1]) for k in range(40)
    ]
    passes = [rollout.pass_order(problems, cfg, number) for number in range(3)]
    for one in passes:
        targets = [problems[k].label["target"] for k in one]
        assert sorted(one) == list(range(40)) and targets == sorted(targets, reverse=True)
    assert len(set(map(tuple, passes))) == 3
    assert rollout.pass_order(problems, replace(cfg, seed=2), 0) != passes[0]
    for step in range(17):
        asked = [problem.index for problem in rollout.problem_order(problems, cfg, step)]
        assert asked == sum(passes, [])[7 * step : 7 * step + 7]
    # Few numbers come first, and then large targets. In other tasks short questions come first.
    three = countdown.Problem(40, "", {"numbers": [1, 2, 3], "target": 50, "pick": None}, "", [1])
    assert rollout.pass_order([three, problems[0]], cfg, 0) == [1, 0]
    texts = [reward.Problem(k, "1" + "+1" * (9 - k), "", "", [1]) for k in range(9)]
    assert rollout.pass_order(texts, cfg, 0) == list(reversed(range(9)))


# ---- engines -------------------------------------------------------------------------------------


def check_lora(cfg):
    """Only adapters are learnt. At first they change nothing, later they change each linear layer
    of the body by a matrix of their rank. What the sampler gets and what is exported is a plain
    model that computes the policy's log-probs. A checkpoint comes back whole, but is not
    converted."""
    pytest.importorskip("peft", reason="pip install --no-deps -r requirements-extras.txt")
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny.make_model(Path(folder) / "model", tied=False))
        for stage in (0, 3):
            settings = replace(cfg, lora_rank=4, model=model, zero_stage=stage)
            check_adapters(settings, Path(folder) / str(stage))


def check_adapters(cfg, run):
    base = {name: tensor.clone() for name, tensor in load(cfg.model).state_dict().items()}
    policy = models.make_policy(cfg)
    adapters = [p for name, p in policy.module.named_parameters() if "lora_" in name]
    assert len(models.trainable(policy.module)) == len(adapters) > 0
    if cfg.zero_stage == 0:
        # Adam would hold nothing for the others, but ZeRO an fp32 master of each.
        assert len(policy.deepspeed.optimizer.param_groups[0]["params"]) == len(adapters)
    assert_equal(weights_of(policy), base)
    batch = make_batch(cfg)
    batch.per_token["advantages"] = torch.linspace(-1, 1, 14)
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    state = ckpt.RunState(1, 9, 1, vars(cfg))
    assert not ckpt.save(run, state, {"policy": policy.deepspeed}, [], 1)
    ppo.train_policy(policy, batch, cfg, step=1, total_steps=9)
    learnt = weights_of(policy)
    for name, tensor in learnt.items():
        is_linear = re.fullmatch(r"model\.layers\..*proj\.weight", name)
        rank = torch.linalg.matrix_rank(tensor - base[name], atol=1e-4) if is_linear else 0
        assert 1 <= rank <= 4 if is_linear else tensor.equal(base[name]), name
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    ckpt.export(run / "policy", policy.module.model, models.named_weights(policy), tokenizer)
    plain = load(run / "policy")
    assert_equal(plain.state_dict(), learnt)
    expected, _ = naive.logprobs(plain, batch, 1.0)
    close(ppo.compute_logprobs(policy, batch, cfg), expected, atol=1e-4, rtol=1e-4)
    again = models.make_policy(cfg)
    ckpt.load(run / "step_000001", {"policy": again.deepspeed}, state)
    ppo.train_policy(again, batch, cfg, step=1, total_steps=9)
    assert_equal(weights_of(again), learnt)
    with pytest.raises(UserError, match="adapters"):
        convert.reshard(run / "step_000001")


def check_fp16(cfg):
    """fp16's log-probs are nearer to those of fp32 than bf16's. The engines compute in fp16 and
    learn what fp32 learns, since the loss is multiplied and divided again. Where it overflows no
    update is taken and the factor is halved, which a checkpoint remembers."""
    cfg = replace(cfg, gradient_checkpointing=False, actor_learning_rate=1e-2)
    accelerator = models.deepspeed.get_accelerator()
    # DeepSpeed refuses fp16 on CPUs, where it is slow. All else is as on a GPU.
    allowed = mock.patch.object(accelerator, "is_fp16_supported", lambda: True)
    with allowed, tempfile.TemporaryDirectory() as folder:
        cfg.model = str(tiny.make_model(Path(folder) / "model", tied=False))
        for stage in (2, 3):
            check_halves(replace(cfg, bf16=True, zero_stage=stage), Path(folder) / str(stage))
    assert rollout.sampler_settings(replace(cfg, bf16=True), True)["dtype"] == "float16"
    assert rollout.sampler_settings(cfg, True)["dtype"] == "float32"


def check_halves(half, run):
    full = replace(half, bf16=False, zero_stage=0)
    batch = make_batch(half)
    exact = models.make_policy(full)
    expected = ppo.compute_logprobs(exact, batch, full)
    bf16 = models.Policy(load(half.model, torch.bfloat16))
    bf16_error = (ppo.compute_logprobs(bf16, batch, half) - expected).abs().mean()
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
    assert_equal(weights_of(policy), before)
    state = ckpt.RunState(1, 9, 1, vars(half))
    assert not ckpt.save(run, state, {"policy": policy.deepspeed}, [], 1)
    policy = models.make_policy(half)
    ckpt.load(run / "step_000001", {"policy": policy.deepspeed}, state)
    assert policy.deepspeed.optimizer.loss_scaler.cur_scale == 2**15
    # Of a tenth of the usual size, so that it does not overflow.
    batch.per_token["advantages"] = torch.linspace(-0.1, 0.1, 14)
    signs = []
    norms = []
    for learner, cfg in ((exact, full), (policy, half)):
        before = weights_of(learner)
        norms.append(ppo.train_policy(learner, batch, cfg, 0, 9)["policy_grad_norm"])
        # Adam's first update is the gradient's sign.
        change = [(x - before[name]).flatten() for name, x in weights_of(learner).items()]
        signs.append(torch.cat(change).sign())
    assert abs(norms[1] / norms[0] - 1) < 0.01
    assert (signs[0] == signs[1]).float().mean() > 0.99


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def weights_of(learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in models.named_weights(learner)}


def assert_equal(one: dict, two: dict):
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


# ---- the tests -----------------------------------------------------------------------------------

CHECKS = {name: functools.partial(check_loss, name) for name in LOSSES}
CHECKS |= {name: functools.partial(check_updates, name) for name in ("updates", "cispo", "gspo")}
CHECKS |= {name: functools.partial(check_estimator, name) for name in naive.VARIANTS_COMPARE}
CHECKS |= {name: functools.partial(check_paid, name) for name in PAID}
for function in (check_overlong_drop, check_fuse_values, check_kl_penalty, check_overlong_penalty):
    CHECKS[function.__name__.removeprefix("check_")] = function
for function in (check_random_reward, check_hash_reward, check_curriculum):
    CHECKS[function.__name__.removeprefix("check_")] = function
for function in (check_dynamic_sampling, check_first_stage, check_adaptive_len):
    CHECKS[function.__name__.removeprefix("check_")] = function
QUICK = list(CHECKS)
CHECKS |= {"lora": check_lora, "fp16": check_fp16}
# DeepSpeed's engines take seconds.
EACH = [*QUICK, pytest.param("lora", marks=pytest.mark.slow)]
EACH += [pytest.param("fp16", marks=pytest.mark.slow)]


def test_each_variant_has_a_check():
    assert sorted(CHECKS) == sorted(path.stem for path in HOME.glob("*.py"))


@pytest.mark.parametrize("name", EACH)
def test_a_variant_does_what_it_says(name):
    hold(name)


@pytest.mark.parametrize("name", EACH)
def test_without_its_variant_a_check_fails(name):
    """Otherwise the check would prove nothing."""
    before = NEEDS.get(name, [])
    # clip_higher is nothing but a default. The flags of the others do nothing by themselves.
    cfg = extended(before or [name])
    with Variants(before).installed(train.stages()), pytest.raises((AssertionError, KeyError)):
        CHECKS[name](cfg)


@pytest.mark.parametrize("name", naive.VARIANTS_COMPARE)
def test_an_estimator_computes_on_the_device(name):
    """Large tensors that go to the CPU and back take seconds of a step."""
    cfg = extended([name])
    batches = [make_batch(cfg, [sample(k % 2, 2, k % 3 / 2) for k in range(12)]) for _ in "12"]
    batches[1].device = CARD
    with cfg.variants.installed(train.stages()):
        stats = ppo.compute_advantages(batches[0], cfg)
        with Card():
            assert ppo.compute_advantages(batches[1], cfg) == stats
    here, there = (batch.per_token["advantages"] for batch in batches)
    assert type(there) is OnCard and there.tolist() == here.tolist()


@pytest.fixture(scope="module")
def on_two_ranks():
    """What two ranks say of the quick checks: a rank has its share of the samples only."""
    processes = []
    with held_port() as port, contextlib.ExitStack() as stack:
        for rank in ("0", "1"):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port}
            env = clean_environment() | env | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, *QUICK]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, env=env, **pipes))
            stack.callback(processes[-1].kill)
        return [process.communicate(timeout=300)[0] for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_variant_does_the_same_on_two_ranks(name, on_two_ranks):
    """What is learnt is that of all samples."""
    for said in on_two_ranks:
        assert f"{name} held" in said.splitlines(), said[-3000:]


REFUSED = [
    (["kl_loss"], {"log_kl": "false"}, "--log_kl false.* kl_loss"),
    (["kl_penalty"], {"log_kl": "false"}, "--log_kl false.* kl_penalty"),
    (["kl_penalty", "maxrl"], {}, "--estimator maxrl.* kl_penalty"),
    (["updates"], {"policy_updates": 0}, "--policy_updates 0.*at least 1"),
    (["cispo"], {"policy_updates": 0}, "--policy_updates 0.*at least 1"),
    (["gspo"], {"policy_updates": 0}, "--policy_updates 0.*at least 1"),
    (["fuse_values"], {"estimator": "grpo"}, "fuse_values needs --estimator gae"),
    (["fuse_values"], {"gamma": 0.95}, "depend on values"),
    (["fuse_values"], {"lambd": 0.95}, "depend on values"),
    (["fuse_values"], {"critic_lambd": 0.95}, "depend on values"),
    (["overlong_penalty"], {"overlong_cache": 0}, "--overlong_cache 0.*at least 1"),
    (["maxrl", "overlong_penalty"], {}, "--estimator maxrl.* negative"),
    (["tis_cap"], {"tis_cap": 0.5}, "--tis_cap 0.5.*at least 1"),
    (["tis_cap"], {"log_ratio": "false"}, "--log_ratio false.* tis_cap"),
    (["tis_cap"], {"top_p": 0.9}, "--top_p 0.9.*choose 1 with --log_ratio"),
    (["first_stage"], {"first_stage": 0}, "--first_stage 0.*at least 1"),
    (["first_stage"], {"first_stage": 64}, "--first_stage 64.*--n_samples_per_prompt 64"),
    (["first_stage"], {"first_stage": 1, "estimator": "grpo"}, "--first_stage 1.* at least 2"),
    (["pass_at_k"], {"pass_k": 0}, "--pass_k 0.*at least 1"),
    # A set of k has no other set to be compared with.
    (["pass_at_k"], {"n_samples_per_prompt": 4}, "--n_samples_per_prompt 4.* at least 5"),
    (["pass_at_k"], {"n_samples_per_prompt": 1, "pass_k": 1}, "--n_samples_per_prompt 1.* least 2"),
    (["pass_at_k", "first_stage"], {}, "--first_stage 4.* at least 5"),
    (["lora"], {"lora_rank": 0}, "--lora_rank 0.*at least 1"),
]


def check_flags(names, flags):
    cfg = train.parse_flags(["--variant", *names, *arguments({"data": "x"} | flags)])
    with cfg.variants.installed(train.stages()):
        check.check_config(cfg, 2, ppo.ESTIMATORS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_defaults_of_a_variant_are_accepted(name):
    check_flags([*NEEDS.get(name, []), name], {})


@pytest.mark.parametrize("names, flags, words", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(names, flags, words):
    with pytest.raises(UserError, match=words) as error:
        check_flags(names, flags)
    assert "\n" not in str(error.value)


if __name__ == "__main__":
    common.start_distributed()
    # Threads of so little work would wait for each other, long on a busy machine.
    torch.set_num_threads(1)
    for wanted in sys.argv[1:]:
        # Where a check fails, this rank ends, and the other one with it.
        hold(wanted)
        print(wanted, "held", flush=True)
    dist.barrier()
