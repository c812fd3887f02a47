"""The examples of CONTRIBUTING.md, taken from the page and run: they work, and each stays under ten
lines. Names that pages mention exist."""

import re
from pathlib import Path
from types import SimpleNamespace

import naive
import pytest
import torch

import ppo
import reward
from lib import check, common

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = {}
for block in re.findall(r"^```python\n# (.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
    title, code = block.split("\n", 1)
    EXAMPLES[title] = code


@pytest.mark.parametrize("name", ["estimator", "reward", "dataset"])
def test_under_ten_lines(name):
    assert len([line for line in EXAMPLES[name].splitlines() if line.strip()]) < 10


def test_estimator(monkeypatch):
    """As if pasted into ppo.py."""
    monkeypatch.setattr(ppo, "ESTIMATORS", dict(ppo.ESTIMATORS))
    exec(EXAMPLES["estimator"], dict(vars(ppo)))
    responses = [[2], [2, 2], [2]]
    rewards = torch.tensor([1, 0, 1], dtype=torch.float64)
    batch = ppo.Batch([[1]] * 3, responses, torch.arange(3), rewards, torch.device("cpu"), {})
    cfg = SimpleNamespace(
        estimator="w_reinforce", advantage_normalization=True, loss_mean="token", critic_lambd=None
    )
    ppo.compute_advantages(batch, cfg)
    assert batch.tokens["advantages"].tolist() == pytest.approx([0.1, -1, -1, 0.1])


def test_reward():
    """As if pasted into reward.py."""
    names = dict(vars(reward))
    exec(EXAMPLES["reward"], names)
    with names["Grader"]() as grader:
        grader.submit("right", "First 7, so 12.50", "stop", "12.5")
        grader.submit("wrong", "12.5, no: 13", "stop", "12.5")
        grader.submit("truncated", "12.5", "length", "12.5")
        grader.submit("nothing", "twelve", "stop", "12.5")
        assert grader.results() == {"right": 1.0, "wrong": 0.0, "truncated": 0.0, "nothing": 0.0}


def test_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLES["dataset"], {})
    problems = reward.load_problems("squares.jsonl", "Q: {question} A:")
    assert len(problems) == 98
    assert (problems[0].prompt, problems[0].label) == ("Q: What is 2 * 2? A:", "4")


def test_names_on_the_page_exist():
    """The lists that name estimators, and what a run uses of a task."""
    owners = {
        "WHITENED": ppo,
        "GROUPED": check,
        "scores": naive,
        "load_problems": reward,
        "text_metrics": reward,
        "Grader": reward,
        "submit": reward.Grader,
        "pending": reward.Grader,
        "results": reward.Grader,
        "close": reward.Grader,
        "UserError": common,
    }
    for name, owner in owners.items():
        assert f"`{name}`" in PAGE
        assert hasattr(owner, name)


def test_stripped_names_tests_that_exist():
    """docs/stripped.md: the proofs are tests, which may be renamed."""
    named = set(re.findall(r"\btest_\w+", (ROOT / "docs" / "stripped.md").read_text()))
    defined = {path.stem for path in ROOT.glob("tests/*.py")}
    for path in ROOT.glob("tests/*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(named) > 20
    assert not named - defined
