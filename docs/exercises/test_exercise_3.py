"""Exercise 3: a KL penalty in the loss. Red until ppo.policy_loss has it."""
import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))  # where the ppo.py under test lies
import ppo  # noqa: E402


def test_the_k3_penalty_pulls_towards_the_base_model():
    logprobs, reference = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([-1.5, -1.0, -0.5])
    advantages = torch.tensor([0.5, -1.0, 2.0])
    batch = SimpleNamespace(tokens={"advantages": advantages, "ref_logprobs": reference})
    rows = SimpleNamespace(weight=torch.ones(3), index=torch.arange(3))
    cfg = SimpleNamespace(temperature=1.0, tis_cap=None, log_kl=True)
    loss, stats = ppo.policy_loss(lambda rows, temperature: (logprobs, torch.zeros(3)), batch, rows, cfg)
    loss.backward()
    delta = reference - logprobs.detach()
    assert torch.allclose(logprobs.grad, -advantages + 0.1 * (1 - delta.exp())), "0.1 times the gradient of k3"
    assert torch.allclose(stats["kl"], (delta.exp() - 1 - delta).sum()), "the logged number has no coefficient"
    assert not stats["kl"].requires_grad, "what is logged must not keep the graph alive: detach it"
