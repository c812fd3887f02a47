"""Exercise 4: lambda by length. Red until ppo.gae has it."""
import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))  # where the ppo.py under test lies
import ppo  # noqa: E402


def test_each_sample_has_the_lambda_of_its_own_length():
    lengths, rewards = [1, 30, 60], torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    values = torch.rand(3, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * mask
    cfg = SimpleNamespace(gamma=1.0, lambd=1.0)
    got = ppo.gae(rewards, values, mask, torch.zeros(3), cfg)
    for i, length in enumerate(lengths):
        v = [*values[i, :length].tolist(), 0.0]
        delta = [(rewards[i].item() if t == length - 1 else 0.0) + v[t + 1] - v[t] for t in range(length)]
        lambd = max(0.0, 1 - 1 / (0.05 * length))
        expected = [sum(lambd ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        assert torch.allclose(got[i, :length], torch.tensor(expected, dtype=torch.float64)), f"length {length}"
    assert not got[~mask].any(), "past the end of a response there is nothing"
