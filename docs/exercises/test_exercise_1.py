"""Exercise 1: OPO's baseline. It fails until ppo.py has it."""

import os
import sys

import pytest
import torch

# This folder has the ppo.py under test.
sys.path.insert(0, os.environ.get("EXERCISE_DIR", "."))
import ppo  # noqa: E402


def test_opo_is_the_reward_minus_its_groups_mean_weighted_by_length():
    assert "opo" in ppo.ESTIMATORS, "there is no estimator of that name yet"
    lengths = [1, 2, 3, 4, 2, 1]
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    rewards = torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.float64)  # the second group is flat
    responses = [[2] * length for length in lengths]
    batch = ppo.Batch([[1]] * 6, responses, groups, rewards, torch.device("cpu"), {}, [])
    ppo.compute_advantages(batch, ppo.Recipe(estimator="opo"))
    # Of the first group's ten tokens four are in right responses.
    expected = [0.6] + [-0.4] * 2 + [0.6] * 3 + [-0.4] * 4 + [0.0] * (2 + 1)
    advantages = batch.per_token["advantages"]
    assert advantages.tolist() == pytest.approx(expected)
    assert advantages[:10].sum() == pytest.approx(0, abs=1e-6), "over the tokens of a group"
