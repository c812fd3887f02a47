"""The examples of CONTRIBUTING.md, taken from the page and run."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config
from test_exercises import solve

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
    samples = [SimpleNamespace(reward=1.0, response_ids=[2] * n) for n in (8, 4)]
    assert cfg.paid(samples) == [0.5, 0.75]


def test_the_page_s_task_grades_by_length(tmp_path):
    """The example has all that a run asks of a task."""
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["task"])
    task = train.find_task(config(task=path))
    assert {"load_problems", "text_metrics"} <= vars(task).keys()
    with task.Grader(2, "orz") as grader:
        assert grader.submit("right", "one two three", "stop", "3") == "one two three"
        assert grader.submit("cut", "one two", "length", "4") is None
        grader.submit("far", "one " * 9, "stop", "3")
        assert grader.pending(0) == 0
        assert grader.results() == {"right": 1.0, "cut": 0.5, "far": 0.0}
        assert grader.results() == {}
        assert grader.lost == 0


@pytest.mark.slow
def test_the_page_s_estimator_and_exercise_1_pass_make_check_together(tmp_path):
    """The first change of a newcomer who follows the page passes every check."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            # With the time of change: make would install a requirements.txt that is newer.
            shutil.copy2(ROOT / name, tmp_path / name)
    for environment in (".venv", ".venv-cpu"):
        (tmp_path / environment).symlink_to(sys.prefix)
    solve(tmp_path, [1])
    with (tmp_path / "ppo.py").open("a") as file:
        file.write(f"\n\n{EXAMPLES['estimator']}")
    done = subprocess.run(["make", "check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
