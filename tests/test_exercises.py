"""docs/exercises: each test fails on the shipped code and passes on a solved copy of the code."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, run_python

OPO = '''def opo(rewards: Tensor, values, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - the group's mean, weighted by length (arXiv 2505.23585)."""
    length = mask.sum(1).double()  # (N,)
    weighted = group_stats(rewards * length, groups)[0]  # (N,)
    return rewards - weighted / group_stats(length, groups)[0]


ESTIMATORS = {
    "opo": Estimator(opo, least_samples=2),
'''
TOP_FIFTH = """        border = entropy.detach().quantile(0.8)
        return -(advantages * logprobs).where(entropy >= border, 0.0)
"""
BY_LENGTH = """    deltas = -values  # (N, S)
    lambd = (1 - 1 / (0.05 * mask.sum(1))).clamp(min=0)  # (N,)
"""
A_TENTH = """for key, pair in self.pairs.items()}
        for key, (predicted, _) in self.pairs.items():
            if predicted and not rewards[key]:
                rewards[key] = 0.1
"""
ANY_ANSWER = """    answer = last_box(block)
    if answer is None:
        answer = block.removeprefix("<answer>").strip() or None
    return answer
"""
BREVITY = '''"""A right response is paid less than a shorter right one (arXiv 2502.04463)."""

import math
import statistics
from dataclasses import dataclass

import ppo
from nanoorz.flags import flag


@dataclass
class Brevity(ppo.Recipe):
    brevity_cost: float = flag(0.2, "The most that a right response can lose by its length.")

    def paid(self, samples):
        rewards = super().paid(samples)
        right = [sample for sample in samples if sample.reward > 0]
        for k, sample in enumerate(samples):
            if sample.reward > 0:
                group = [x for x in right if x.request.group == sample.request.group]
                lengths = [len(x.response_ids) for x in group]
                excess = len(sample.response_ids) - statistics.mean(lengths)
                z = excess / (statistics.pstdev(lengths) or 1)
                rewards[k] *= 1 - self.brevity_cost / (1 + math.exp(-z))
        return rewards
'''
# One solution of each exercise: its number, a file, a text that the file has once, and what comes
# in its place. A file that is new has no text yet.
SOLUTIONS = [
    (1, "ppo.py", "ESTIMATORS = {\n", OPO),
    (2, "ppo.py", "        return -(advantages * logprobs)\n", TOP_FIFTH),
    (3, "ppo.py", "batch, indices, lr, self, denominator)", "batch, indices, lr, self)"),
    (4, "ppo.py", "    deltas = -values  # (N, S)\n", BY_LENGTH),
    (4, "ppo.py", "(deltas, cfg.gamma * cfg.lambd)", "(deltas, cfg.gamma * lambd)"),
    (5, "reward.py", "for key, pair in self.pairs.items()}\n", A_TENTH),
    (6, "reward.py", "    return last_box(block)\n", ANY_ANSWER),
    (7, "brevity.py", "", BREVITY),
]


def solve(folder: Path) -> None:
    for number, file, old, new in SOLUTIONS:
        text = (folder / file).read_text() if old else ""
        assert not old or text.count(old) == 1, f"exercise {number}: {old}"
        (folder / file).write_text(text.replace(old, new))


def verdicts(folder: Path) -> dict[str, str]:
    """{exercise: "PASSED", "FAILED" or "ERROR"} with the files of that folder."""
    words = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-rA"]
    env = {"EXERCISE_DIR": str(folder)}
    done = run_python(*words, ROOT / "docs" / "exercises", code=None, cwd=folder, env=env)
    found = re.findall(r"^([A-Z]+) \S*test_exercise_(\d)\.py", done.stdout, re.MULTILINE)
    assert len(found) == 7, f"one test each: {done.stdout[-3000:]}{done.stderr[-2000:]}"
    return {number: verdict for verdict, number in found}


@pytest.mark.slow
def test_exercises_fail_as_shipped_and_pass_once_all_are_solved(tmp_path):
    assert verdicts(ROOT) == dict.fromkeys("1234567", "FAILED")
    for name in ("ppo.py", "reward.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "nanoorz", tmp_path / "nanoorz")
    solve(tmp_path)
    assert verdicts(tmp_path) == dict.fromkeys("1234567", "PASSED")
