"""Exercise 2: an entropy bonus. Red until ppo.policy_loss has it."""
import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))  # where the ppo.py under test lies
import ppo  # noqa: E402


def test_each_token_is_pushed_to_more_entropy():
    logprobs, entropy = (torch.tensor(x, requires_grad=True) for x in ([-1.0, -2.0, -0.5], [0.7, 1.1, 0.4]))
    batch = SimpleNamespace(tokens={"advantages": torch.tensor([0.5, -1.0, 2.0])})
    rows = SimpleNamespace(weight=torch.tensor([1.0, 1.0, 0.0]), index=torch.arange(3))  # the third is filler
    cfg = SimpleNamespace(temperature=1.0, tis_cap=None, log_kl=False)
    loss, _ = ppo.policy_loss(lambda rows, temperature: (logprobs, entropy), batch, rows, cfg)
    loss.backward()
    assert torch.allclose(logprobs.grad, torch.tensor([-0.5, 1.0, 0.0])), "the policy gradient stays what it was"
    assert entropy.grad is not None, "the entropy is only logged"
    assert torch.allclose(entropy.grad, torch.tensor([-0.01, -0.01, 0.0]))
