"""docs/exercises: each test is red on the shipped code and green on a solved copy of it."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "docs" / "exercises").glob("test_exercise_*.py"))


@dataclass
class Change:
    exercise: int
    file: str
    old: str | None  # None: the file is new
    new: str


# One solution of each exercise. A text that is replaced is in its file exactly once.
SOLUTIONS = [
    Change(
        1,
        "ppo.py",
        old="@dataclass(frozen=True)\nclass Estimator:\n",
        new='''def opo(rewards: Tensor, values, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - the group's mean, weighted by length (arXiv 2505.23585)."""
    length = mask.sum(1).double()  # (N,)
    weighted = group_stats(rewards * length, groups)[0]  # (N,)
    return rewards - weighted / group_stats(length, groups)[0]


@dataclass(frozen=True)
class Estimator:
''',
    ),
    Change(
        1,
        "ppo.py",
        old="ESTIMATORS = {\n",
        new='ESTIMATORS = {\n    "opo": Estimator(opo, least_samples=2),\n',
    ),
    Change(
        2,
        "ppo.py",
        old="    return -(advantages * logprobs)\n",
        new="""    border = entropy.detach().quantile(0.8)
    return -(advantages * logprobs).where(entropy >= border, 0.0)
""",
    ),
    Change(
        3,
        "ppo.py",
        old="batch, samples, lr, cfg, denominator)",
        new="batch, samples, lr, cfg)",
    ),
    Change(
        4,
        "ppo.py",
        old="    sums = -values  # (N, S)\n",
        new="    sums = -values  # (N, S)\n"
        "    lambd = (1 - 1 / (0.05 * mask.sum(1))).clamp(min=0)  # (N,)\n",
    ),
    Change(
        4,
        "ppo.py",
        old="cfg.gamma * cfg.lambd * sums",
        new="cfg.gamma * lambd * sums",
    ),
    Change(
        5,
        "reward.py",
        old="""for key, pair in self.pairs.items()}
""",
        new="""for key, pair in self.pairs.items()}
        for key, (predicted, _) in self.pairs.items():
            if predicted and not rewards[key]:
                rewards[key] = 0.1
""",
    ),
    Change(
        5,
        "reward.py",
        old='bool(grader.results()["is_equiv"])',
        new='grader.results()["is_equiv"] == 1',
    ),
    Change(
        6,
        "reward.py",
        old="""    return last_box(block)
""",
        new="""    answer = last_box(block)
    if answer is None:
        answer = block.removeprefix("<answer>").strip() or None
    return answer
""",
    ),
    Change(
        7,
        "brevity.py",
        old=None,
        new='''"""A right response is paid less than a shorter right one (arXiv 2502.04463)."""

import math
import statistics
from dataclasses import dataclass


@dataclass
class Flags:
    brevity_cost: float = 0.2  # The most that a right response can lose by its length.


def paid(original, samples, cfg):
    lengths = {}  # of right responses, by group
    for sample in samples:
        if sample.reward > 0:
            lengths.setdefault(sample.request.group, []).append(len(sample.response_ids))
    rewards = []
    for sample, reward in zip(samples, original(samples, cfg)):
        if sample.reward > 0:
            right = lengths[sample.request.group]
            excess = len(sample.response_ids) - statistics.mean(right)
            z = excess / (statistics.pstdev(right) or 1)
            reward *= 1 - cfg.brevity_cost / (1 + math.exp(-z))
        rewards.append(reward)
    return rewards
''',
    ),
]


def run(folder: Path) -> dict[int, str]:
    """{exercise: "passed", "failed" or "error"} with the files of that folder."""
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-rA"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, TESTS)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        env=os.environ | {"EXERCISE_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    found = re.findall(
        r"^(PASSED|FAILED|ERROR) \S*test_exercise_(\d)\.py", done.stdout, re.MULTILINE
    )
    assert len(found) == len(TESTS), f"one test each:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return {int(number): verdict.lower() for verdict, number in found}


@pytest.mark.slow
def test_shipped_code_is_red():
    """A test that is green before the work teaches nothing, and one that cannot run says the wrong
    thing."""
    assert len(TESTS) == 7
    assert run(ROOT) == dict.fromkeys(range(1, 8), "failed")


@pytest.mark.slow
def test_solved_copy_is_green(tmp_path):
    """All solutions at once: they also must not get in each other's way."""
    for name in ("ppo.py", "reward.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "lib", tmp_path / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    for change in SOLUTIONS:
        path = tmp_path / change.file
        if change.old is None:
            path.write_text(change.new)
            continue
        text = path.read_text()
        assert text.count(change.old) == 1, f"{change} is not in the file exactly once"
        path.write_text(text.replace(change.old, change.new))
    assert run(tmp_path) == dict.fromkeys(range(1, 8), "passed")
