"""The examples of CONTRIBUTING.md, taken from the page and run."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config

import ppo
import train

BLOCKS = r"^```python\n# (\w+)\n(.*?)^```"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(BLOCKS, PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_s_estimator_has_its_advantages(monkeypatch):
    """The example is run as if it were pasted into ppo.py."""
    # ppo.Recipe has the same dict.
    monkeypatch.delitem(ppo.ESTIMATORS, "w_reinforce", raising=False)
    exec(EXAMPLES["estimator"], dict(vars(ppo)))
    responses = [[2], [2, 2], [2]]
    rewards = torch.tensor([1, 0, 1], dtype=torch.float64)
    batch = ppo.Batch([[1]] * 3, responses, torch.arange(3), rewards, torch.device("cpu"), {}, [])
    ppo.compute_advantages(batch, config(estimator="w_reinforce"))
    assert batch.per_token["advantages"].tolist() == pytest.approx([0.1, -1, -1, 0.1])


def test_the_page_s_variant_pays_long_responses_less(tmp_path):
    path = tmp_path / "my_idea.py"
    path.write_text(EXAMPLES["variant"])
    cfg = config(variant=path, generate_max_len=8, length_cost=0.5)
    right = {"reward": 1.0, "rewards": None}
    samples = [SimpleNamespace(response_ids=[2] * n, **right) for n in (8, 4)]
    assert cfg.paid(samples) == [0.5, 0.75]


def test_the_page_s_task_grades_by_length(tmp_path):
    """The example has all that a run asks of a task."""
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["task"])
    task = train.load_task(config(task=path))
    assert {"load_problems", "text_metrics"} <= vars(task).keys()
    with task.Grader(2, "orz") as grader:
        assert grader.submit("right", "one two three", "stop", "3") == "one two three"
        assert grader.submit("cut", "one two", "length", "4") is None
        grader.submit("far", "one " * 9, "stop", "3")
        assert grader.pending(0) == 0
        assert grader.results() == {"right": 1.0, "cut": 0.5, "far": 0.0}
        assert grader.results() == {}
        assert grader.lost == 0
