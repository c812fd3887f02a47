"""Exercise 2: only the uncertain tokens are learnt from. It fails until token_loss does so."""

import os
import sys
from types import SimpleNamespace

import torch

# This folder has the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def gradient(entropy: list[float], advantages: list[float], real: list[float]) -> torch.Tensor:
    """Of the loss with respect to each log-prob."""
    logprobs = torch.full((len(real),), -1.0, requires_grad=True)
    uncertainty = torch.tensor(entropy, requires_grad=True)

    def policy(micro, temperature):
        return logprobs, uncertainty

    batch = SimpleNamespace(per_token={"advantages": torch.tensor(advantages)})
    micro = SimpleNamespace(real=torch.tensor(real), flat_index=torch.arange(len(real)))
    losses = ppo.policy_losses(policy, batch, micro, ppo.Recipe(), {})
    (losses * micro.real).sum().backward()
    assert uncertainty.grad is None, "which tokens are chosen has no gradient"
    return logprobs.grad


def test_the_fifth_of_the_tokens_with_most_entropy_is_learnt_from():
    found = gradient([0.1, 2.0, 0.3, 0.2, 0.5], [0.5, -1.0, 2.0, 1.0, 1.0], [1.0] * 5)
    assert torch.allclose(found, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))
    ten = [0.1, 0.9, 0.3, 0.8, 0.5, 0.2, 0.4, 0.6, 0.7, 0.0]
    found = gradient(ten, [1.0] * 10, [1.0] * 10)
    assert found.nonzero().flatten().tolist() == [1, 3], "two of ten"
    # A rank without samples passes one token that does not count through the model.
    assert gradient([0.4], [1.0], [0.0]).tolist() == [0.0]
