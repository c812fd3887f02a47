"""Exercise 3: a denominator without flat groups. It fails until Recipe.train_policy has it."""

import os
import sys

import torch
import torch.distributed as dist

# This folder has the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


class Policy:
    """A learner whose only parameter is one log-prob for each response token."""

    name = "policy"
    device = torch.device("cpu")
    logprobs = torch.full((9,), -1.0, requires_grad=True)

    def __call__(self, micro, temperature):
        numbers = self.logprobs[micro.flat_index]
        return numbers, torch.zeros_like(numbers)

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        return 1.0


def test_a_loss_is_divided_by_the_tokens_that_have_a_gradient():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = torch.tensor([0, 0, 1, 1])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    responses = [[1, 2], [3], [4, 5], [6, 7, 8, 9]]
    # Both samples of the second problem are wrong, so they have no advantage.
    advantages = torch.tensor([1.0, 1.0, -1.0] + [0.0] * 6)
    batch = ppo.Batch([[7]] * 4, responses, groups, rewards, Policy.device, {}, [])
    batch.per_token["advantages"] = advantages
    cfg = ppo.Recipe(actor_learning_rate=0.1, warmup_updates=1, skip_flat=True)
    cfg.packing_max_len = 64
    policy = Policy()
    stats = cfg.train_policy(policy, batch, 0, 9)
    dist.destroy_process_group()
    expected = -advantages / 3
    assert torch.allclose(policy.logprobs.grad, expected), "3 tokens have a gradient, 9 are there"
    assert abs(stats["policy_loss"] - 1 / 3) < 1e-6
