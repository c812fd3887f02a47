"""The examples of CONTRIBUTING.md, taken from the page and run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import jsonl, launch
from test_exercises import SOLUTIONS

import ppo
import reward
import train

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = {}
for block in re.findall(r"^```python\n# (.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
    title, code = block.split("\n", 1)
    EXAMPLES[title] = code


def test_estimator(monkeypatch):
    """As if pasted into ppo.py."""
    monkeypatch.setattr(ppo, "ESTIMATORS", dict(ppo.ESTIMATORS))
    exec(EXAMPLES["estimator"], dict(vars(ppo)))
    responses = [[2], [2, 2], [2]]
    rewards = torch.tensor([1, 0, 1], dtype=torch.float64)
    batch = ppo.Batch([[1]] * 3, responses, torch.arange(3), rewards, torch.device("cpu"), {}, [])
    cfg = SimpleNamespace(
        estimator="w_reinforce", advantage_normalization=True, loss_mean="token", critic_lambd=None
    )
    ppo.compute_advantages(batch, cfg)
    assert batch.per_token["advantages"].tolist() == pytest.approx([0.1, -1, -1, 0.1])


@pytest.fixture
def my_task(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["task"])
    return str(path)


def test_task(my_task):
    task = train.find_task(train.Config(task=my_task))
    with task.Grader(2, "orz") as grader:
        assert grader.submit("right", "one two three", "stop", "3") == "one two three"
        assert grader.submit("cut", "one two", "length", "4") is None
        grader.submit("far", "one " * 9, "stop", "3")
        assert grader.pending(0) == 0
        assert grader.results() == {"right": 1.0, "cut": 0.5, "far": 0.0}
        assert grader.results() == {}


@pytest.mark.slow
def test_a_run_trains_with_the_task_as_it_stands_on_the_page(my_task, tiny, tmp_path):
    """Its rewards lie between 0 and 1, so all samples of a step teach something."""
    run = tmp_path / "run"
    launch(run, **tiny | {"task": my_task, "estimator": "grpo"})
    lines = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert 0 < line["reward"] < 1
        assert line["policy_grad_norm"] > 0
        assert "answered" in line
    for sample in jsonl(run / "samples.jsonl"):
        asked = int(sample["label"])
        words = len(sample["response"].split())
        assert sample["reward"] == pytest.approx(max(0.0, 1 - abs(words - asked) / asked))
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == my_task


def test_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLES["dataset"], {})
    problems = reward.load_problems("squares.jsonl", "Q: {question} A:")
    assert len(problems) == 98
    assert (problems[0].prompt, problems[0].label) == ("Q: What is 2 * 2? A:", "4")


@pytest.mark.slow
def test_the_page_s_estimator_and_exercise_1_pass_make_check_together(tmp_path):
    """Somebody's first change must break nothing. Once ppo.py had no room for either of them."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            # With the time of change: make would install a requirements.txt that is newer.
            shutil.copy2(ROOT / name, tmp_path / name)
    for environment in (".venv", ".venv-cpu"):
        (tmp_path / environment).symlink_to(sys.prefix)
    path = tmp_path / "ppo.py"
    text = path.read_text()
    for change in SOLUTIONS:
        if change.exercise == 1:
            assert text.count(change.old) == 1
            text = text.replace(change.old, change.new)
    path.write_text(f"{text}\n\n{EXAMPLES['estimator']}")
    done = subprocess.run(["make", "check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
