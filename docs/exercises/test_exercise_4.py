"""Exercise 4: lambda by length. It fails until ppo.gae has it."""

import os
import sys
from types import SimpleNamespace

import torch

# This folder has the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def test_each_sample_has_the_lambda_of_its_own_length():
    lengths = [1, 30, 60]
    rewards = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    rng = torch.Generator().manual_seed(0)
    values = torch.rand(3, 60, generator=rng, dtype=torch.float64) * mask
    cfg = SimpleNamespace(gamma=1.0, lambd=0.5)
    got = ppo.gae(rewards, values, mask, torch.zeros(3), cfg)
    for i, length in enumerate(lengths):
        lambd = max(0.0, 1 - 1 / (0.05 * length))
        v = [*values[i, :length].tolist(), 0.0]
        delta = [v[t + 1] - v[t] for t in range(length)]
        delta[-1] += rewards[i].item()
        expected = []
        for t in range(length):
            expected.append(sum(lambd ** (k - t) * delta[k] for k in range(t, length)))
        expected = torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(got[i, :length], expected), f"length {length}"
    assert not got[~mask].any(), "past the end of a response there is nothing"
    cfg.lambd = 1.0
    plain = ppo.gae(rewards, values, mask, torch.zeros(3), cfg)
    assert torch.allclose(plain, (rewards[:, None] - values) * mask), "a lambda of 1 stays"
