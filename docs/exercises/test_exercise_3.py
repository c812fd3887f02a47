"""Exercise 3: a KL penalty in the loss. Red until ppo.policy_loss has it."""

import os
import sys
from types import SimpleNamespace

import torch

# Here lies the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def test_the_k3_penalty_pulls_towards_the_base_model():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5])
    advantages = torch.tensor([0.5, -1.0, 2.0])

    def policy(micro, temperature):
        return logprobs, torch.zeros(3)

    batch = SimpleNamespace(tokens={"advantages": advantages, "ref_logprobs": reference})
    micro = SimpleNamespace(mask=torch.ones(3), index=torch.arange(3))
    cfg = SimpleNamespace(temperature=1.0, tis_cap=None)
    loss, stats = ppo.policy_loss(policy, batch, micro, cfg)
    loss.backward()
    delta = reference - logprobs.detach()
    expected = -advantages + 0.1 * (1 - delta.exp())
    assert torch.allclose(logprobs.grad, expected), "0.1 times the gradient of k3"
    k3 = (delta.exp() - 1 - delta).sum()
    assert torch.allclose(stats["kl"], k3), "the logged number has no coefficient"
    assert not stats["kl"].requires_grad, "what is logged must not keep the graph alive: detach it"
    del batch.tokens["ref_logprobs"]
    ppo.policy_loss(policy, batch, micro, cfg)  # without --log_kl there is no penalty
