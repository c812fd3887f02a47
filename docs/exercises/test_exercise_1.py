"""Exercise 1: Dr. GRPO. Red until ppo.py has it."""
import os
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))  # where the ppo.py under test lies
import ppo  # noqa: E402


def test_dr_grpo_is_the_reward_minus_its_groups_mean():
    assert "dr_grpo" in ppo.ESTIMATORS, "there is no estimator of that name yet"
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]  # the second group is flat
    batch = ppo.Batch([[1]] * 6, [[2] * n for n in (1, 2, 3, 4, 2, 1)], torch.tensor([0, 0, 0, 0, 1, 1]),
                      torch.tensor(rewards, dtype=torch.float64), {})
    ppo.compute_advantages(batch, SimpleNamespace(estimator="dr_grpo", advantage_normalization=True), "cpu")
    expected = [[0.75], [-0.25] * 2, [-0.25] * 3, [-0.25] * 4, [0.0] * 2, [0.0]]
    assert batch.tokens["advantages"].tolist() == [a for sample in expected for a in sample]
