"""Exercise 1: Dr. GRPO. Red until ppo.py has it."""

import os
import sys
from types import SimpleNamespace

import torch

# Here lies the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def test_dr_grpo_is_the_reward_minus_its_groups_mean():
    assert "dr_grpo" in ppo.ESTIMATORS, "there is no estimator of that name yet"
    lengths = [1, 2, 3, 4, 2, 1]
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    rewards = torch.tensor([1, 0, 0, 0, 1, 1], dtype=torch.float64)  # the second group is flat
    responses = [[2] * length for length in lengths]
    batch = ppo.Batch([[1]] * 6, responses, groups, rewards, torch.device("cpu"), {})
    cfg = SimpleNamespace(estimator="dr_grpo", advantage_normalization=True)
    ppo.compute_advantages(batch, cfg)
    expected = [0.75] + [-0.25] * (2 + 3 + 4) + [0.0] * (2 + 1)
    assert batch.tokens["advantages"].tolist() == expected
