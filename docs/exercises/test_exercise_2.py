"""Exercise 2: an entropy bonus. Red until ppo.policy_loss has it."""

import os
import sys
from types import SimpleNamespace

import torch

# Here lies the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def test_each_token_is_pushed_to_more_entropy():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    entropy = torch.tensor([0.7, 1.1, 0.4], requires_grad=True)

    def policy(micro, temperature):
        return logprobs, entropy

    batch = SimpleNamespace(tokens={"advantages": torch.tensor([0.5, -1.0, 2.0])})
    mask = torch.tensor([1.0, 1.0, 0.0])  # the third is a filler
    micro = SimpleNamespace(mask=mask, index=torch.arange(3))
    loss, _ = ppo.policy_loss(policy, batch, micro, SimpleNamespace(temperature=1.0, tis_cap=None))
    loss.backward()
    unchanged = torch.tensor([-0.5, 1.0, 0.0])
    assert torch.allclose(logprobs.grad, unchanged), "the policy gradient stays what it was"
    assert entropy.grad is not None, "the entropy is only logged"
    assert torch.allclose(entropy.grad, torch.tensor([-0.01, -0.01, 0.0]))
