"""docs/exercises: every exercise's test is red on the shipped code and green on a solved copy of it."""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "docs" / "exercises").glob("test_exercise_*.py"))
SOLUTIONS = {  # exercise: file, then (old, new) pairs
    1: ("ppo.py", ('ESTIMATORS = {"gae": gae,', '''
def dr_grpo(rewards: Tensor, values: Tensor, mask: Tensor, groups: Tensor, cfg) -> Tensor:
    """r - group mean for all tokens alike (arXiv 2503.20783)."""
    mean, std, _ = group_stats(rewards, groups)  # (N,), (N,)
    return torch.where(std > 0, rewards - mean, 0.0)[:, None] * mask


ESTIMATORS = {"dr_grpo": dr_grpo, "gae": gae,''')),
    2: ("ppo.py", ("loss = -(weight * logprobs).sum()",
                   "loss = -(weight * logprobs).sum() - 0.01 * (entropy * rows.weight).sum()")),
    3: ("ppo.py", ('["ref_logprobs"][rows.index] - logprobs.detach()', '["ref_logprobs"][rows.index] - logprobs'),
        ('stats["kl"] = (delta.exp() - 1 - delta).sum()',
         'kl = (delta.exp() - 1 - delta).sum()\n        loss, stats["kl"] = loss + 0.1 * kl, kl.detach()')),
    4: ("ppo.py", ("    advantages, carry, next_value =", """\
    lambd = (1 - 1 / (0.05 * mask.sum(1))).clamp(min=0)  # (N,)
    advantages, carry, next_value ="""),
        ("cfg.gamma * cfg.lambd * carry", "cfg.gamma * lambd * carry")),
    5: (
        "reward.py",
        (
            "for key, pair in self.pairs.items()}\n",
            """for key, pair in self.pairs.items()}
        for key, (predicted, _) in self.pairs.items():
            if predicted and not rewards[key]:
                rewards[key] = 0.1
""",
        ),
        ('bool(grader.results()["is_equiv"])', 'grader.results()["is_equiv"] == 1'),
    ),
    6: (
        "reward.py",
        (
            "    answer = None\n    answer_start",
            '    answer = block.removeprefix("<answer>").strip() or None\n    answer_start',
        ),
    ),
}


def run(folder: Path) -> dict[int, str]:
    """{exercise: "passed", "failed" or "error"} with the files of that folder."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-rA",
               *map(str, TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder,
                          env=os.environ | {"EXERCISE_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"})
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*test_exercise_(\d)\.py", done.stdout, re.MULTILINE)
    assert len(found) == len(TESTS), f"one test each:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return {int(number): verdict.lower() for verdict, number in found}


def test_shipped_code_is_red():
    """A test that is green before the work teaches nothing; one that cannot run says the wrong thing."""
    assert len(TESTS) == len(SOLUTIONS) == 6
    assert run(ROOT) == dict.fromkeys(SOLUTIONS, "failed")


def test_solved_copy_is_green(tmp_path):
    """All solutions at once: they also must not get in each other's way."""
    for name in ("ppo.py", "reward.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for number, (name, *changes) in SOLUTIONS.items():
        for old, new in changes:
            text = (tmp_path / name).read_text()
            assert text.count(old) == 1, f"exercise {number}: {old!r} is not in {name} exactly once"
            (tmp_path / name).write_text(text.replace(old, new))
    assert run(tmp_path) == dict.fromkeys(SOLUTIONS, "passed")
