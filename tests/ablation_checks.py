"""What each patch of ablations/ promises: `python ablation_checks.py NAME` inside a patched copy.

The `policy` or `critic` of a check is a recorder that returns given numbers. What is held against a
plain loop is the gradient with respect to these numbers.
"""

import math
import sys
from types import SimpleNamespace

import torch

import ppo
from lib import common

cfg = SimpleNamespace(
    critic_warmup_steps=0,
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
    num_warmup_steps=1,
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
        self.seen = []
        self.gradients = []

    def __call__(self, micro, temperature=None):
        self.seen += micro.index.tolist()
        numbers = self.numbers[micro.index]
        return numbers if self.name == "critic" else (numbers, torch.zeros_like(numbers))

    def backward(self, loss, is_last):
        loss.backward()

    def step(self, lr):
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
    batch.tokens = {"advantages": advantages, "ref_logprobs": reference}
    stats = ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    delta = reference - p
    expected = (-advantages + 0.3 * (1 - delta.exp())) / 14
    torch.testing.assert_close(policy.gradients[0], expected)
    assert abs(stats["kl"] - (delta.exp() - 1 - delta).mean().item()) < 1e-6
    assert sorted(policy.seen) == list(range(14))


def check_updates_8():
    """Eight steps over one shuffle; each is the clipped objective's gradient at its own ratio."""
    cfg.policy_update_steps = 8
    cfg.policy_clip = 0.2
    samples = [sample(i, 2, 1.0) for i in range(8)]
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    policy = Recorder("policy", 16)
    advantages = torch.tensor([1.0, -1.0] * 8)
    # Some ratios are outside of the clip, on both sides.
    old = policy.numbers.detach() + torch.linspace(-0.5, 0.5, 16)
    batch.tokens = {"advantages": advantages, "old_logprobs": old}
    before = policy.numbers.detach().clone().requires_grad_()
    ppo.train_policy(policy, batch, cfg, step=0, total_steps=9)
    assert len(policy.gradients) == 8
    assert sorted(policy.seen) == list(range(16))
    # The steps see different tokens, so all gradients are those of the first numbers.
    ratio = (before - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (loss.sum() / 2).backward()
    torch.testing.assert_close(torch.stack(policy.gradients).sum(0), before.grad)
    assert (before.grad == 0).any() and (before.grad != 0).any(), "some ratios are clipped"


def check_overlong_drop():
    """A truncated sample is in no loss and in no whitening, but in its group's mean; and with all
    truncated there is no step: an empty list of kept samples once meant all of them."""
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    used = batch.tokens["advantages"][:5].double()
    assert abs(used.mean()) < 1e-6 and abs(used.square().mean() - 1) < 1e-5
    raw = torch.tensor([1 - 1 / 3] * 2 + [-1 / 3] * 3, dtype=torch.float64)
    torch.testing.assert_close(used, (raw - raw.mean()) / raw.std(correction=0), atol=1e-6, rtol=0)
    batch.tokens["values"] = torch.zeros(14)
    policy, critic = Recorder("policy", 14), Recorder("critic", 14)
    cfg.critic_update_steps = 3
    stats = ppo.train_critic(critic, batch, cfg, step=0) | ppo.train_policy(
        policy, batch, cfg, 0, 9
    )
    assert set(policy.seen) == set(critic.seen) == set(range(5))
    torch.testing.assert_close(policy.gradients[0][:5], -batch.tokens["advantages"][:5] / 5)
    # Three critic steps for two samples: the one without a sample is in no mean.
    values = torch.linspace(-2, -0.1, 14)
    means = [values[:2].mean().item(), values[2:5].mean().item()]
    assert abs(stats["critic_values"] - sum(means) / 2) < 1e-6
    assert "critic_loss" in stats and "policy_loss" in stats
    cut = [sample(0, 2, 0.0, "length"), sample(0, 3, 0.0, "length")]
    batch = ppo.Batch.of(cut, torch.device("cpu"))
    told = ppo.compute_advantages(batch, cfg)
    assert all(map(math.isfinite, told.values()))
    assert batch.tokens["advantages"].isfinite().all()
    batch.tokens["values"] = torch.zeros(5)
    policy, critic = Recorder("policy", 5), Recorder("critic", 5)
    stats = ppo.train_critic(critic, batch, cfg, step=0) | ppo.train_policy(
        policy, batch, cfg, 0, 9
    )
    assert not policy.seen and not critic.seen and not policy.gradients and not critic.gradients
    assert stats["policy_grad_norm"] == stats["critic_grad_norm"] == 0


def check_fuse_values():
    """The values are the critic's from before the step that learns from them: with one step, those
    of a pass of their own. Returns that depend on values are refused."""
    cfg.critic_update_steps = 1
    batch = make_batch()
    critic = Recorder("critic", 14)
    before = critic.numbers.detach().clone()
    ppo.train_critic(critic, batch, cfg, step=0)
    torch.testing.assert_close(batch.tokens["values"], before)
    returns = torch.tensor([1.0] * 2 + [0.0] * 12)
    torch.testing.assert_close(batch.tokens["returns"], returns)
    torch.testing.assert_close(critic.gradients[0], (before - returns) / 14)
    cfg.estimator = "gae"
    ppo.compute_advantages(batch, cfg)
    torch.testing.assert_close(batch.tokens["returns"], returns)
    for name in ("gamma", "lambd"):
        try:
            ppo.train_critic(critic, batch, SimpleNamespace(**vars(cfg) | {name: 0.95}), step=0)
        except AssertionError:
            continue
        raise RuntimeError(f"{name} 0.95 was not refused")


def check_fuse_values_on_two_ranks():
    """Every rank has all values. Five samples are dealt in three steps, so that the last step has
    none for one rank, whose filler must add nothing to the first token's value."""
    cfg.critic_update_steps = 3
    samples = [sample(i, 3, 1.0) for i in range(5)]
    batch = ppo.Batch.of(samples, torch.device("cpu"))
    critic = Recorder("critic", 15)
    before = critic.numbers.detach().clone()
    stats = ppo.train_critic(critic, batch, cfg, step=0)
    assert len(critic.gradients) == 3 and stats["critic_micro_batches"] == 1
    seen = sum(common.gather(critic.seen), [])
    assert sorted(seen) == [0, *range(15)], "the filler sees the first token as well"
    torch.testing.assert_close(batch.tokens["values"], before)


if __name__ == "__main__":
    common.start_distributed()
    globals()[f"check_{sys.argv[1]}"]()
    print("held")
