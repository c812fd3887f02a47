"""Exercise 7: a variant that pays short right responses more. It fails until brevity.py does so."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# This folder has the brevity.py under test.
HERE = Path(os.environ.get("EXERCISE_DIR", "."))
sys.path.insert(0, str(HERE))
import ppo  # noqa: E402
from nanoorz import variants  # noqa: E402

DOUBLE = """import ppo


class Double(ppo.Recipe):
    def paid(self, samples):
        return [2 * reward for reward in super().paid(samples)]
"""


class Config(ppo.Recipe):
    """Stands in for train.Config."""


def paid(samples, words, **flags) -> list[float]:
    """What is learnt from with these variants. samples: (group, length, the verifier's reward)."""
    cfg = variants.extend(Config, [str(word) for word in words])(**flags)
    drawn = []
    for group, length, reward in samples:
        request = SimpleNamespace(group=group)
        numbers = {"response_ids": [2] * length, "reward": reward, "rewards": None}
        drawn.append(SimpleNamespace(request=request, **numbers))
    return cfg.paid(drawn)


def test_a_right_response_is_paid_by_its_length_among_the_right_ones(tmp_path):
    brevity = HERE / "brevity.py"
    mixed = [(0, 2, 1.0), (0, 99, 0.0), (0, 4, 1.0)]
    # The two right responses are one standard deviation below and above their mean.
    assert paid(mixed, [brevity], brevity_cost=0.5) == pytest.approx([0.865529, 0, 0.634471])
    assert paid(mixed, [brevity]) == pytest.approx([0.946212, 0, 0.853788]), "the default is 0.2"
    assert paid(mixed, [brevity], brevity_cost=0.0) == [1, 0, 1]
    # A right response that is alone, and right responses of one length, have a deviation of 0.
    others = [(1, 7, 1.0), (1, 3, 0.0), (2, 5, 1.0), (2, 5, 1.0), (3, 9, 0.0)]
    expected = [0.865529, 0, 0.634471, 0.75, 0, 0.75, 0.75, 0]
    assert paid(mixed + others, [brevity], brevity_cost=0.5) == pytest.approx(expected)
    # It changes what another variant pays.
    double = tmp_path / "double.py"
    double.write_text(DOUBLE)
    twice = paid(mixed, [double, brevity], brevity_cost=0.5)
    assert twice == pytest.approx([1.731059, 0, 1.268941])
