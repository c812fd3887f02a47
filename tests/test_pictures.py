"""The picture of a run, and how tools read the files of a run."""

import json

import pytest
from conftest import run_tool

from tools import runs


def write_lines(path, rows: list, end: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "reward": 0, "policy_grad_norm": 0, "seconds": 0}] * 3,
        [{"step": 1, "reward": -1e12, "kl": -1e9, "reward_a": 0.5, "note": "x", "checked": None}],
    ],
)
def test_a_run_of_any_length_has_a_picture(rows, tmp_path):
    """The last line of a run that was killed is not whole."""
    write_lines(tmp_path / "metrics.jsonl", rows, end='{"step": 2, "rew')
    write_lines(tmp_path / "eval.jsonl", [{"step": 0, "set": "$long_{", "accuracy": 0.25}])
    assert run_tool("plot", tmp_path)[0] == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_writes_into_the_run_or_for_several_beside_the_first_or_to_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gae", "$grpo_{"):
        row = {"reward": 0.5, "seconds": 3.0, "drawn_tokens": 99, "kl": 0.1, "truncated": 0.1}
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": k} | row for k in range(1, 60)])
    assert run_tool("plot", "gae")[0] == 0 and (tmp_path / "gae" / "curves.png").exists()
    assert run_tool("plot", "gae", "$grpo_{")[1] == f"wrote {tmp_path}/curves.png\n"
    assert (tmp_path / "curves.png").exists()
    assert run_tool("plot", "gae", "--out", "a.pdf")[0] == 0
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    code, _, errors = run_tool("plot", tmp_path / "absent")
    assert code == 2 and "absent has no metrics.jsonl; give the folder of a run" in errors


def test_a_table_has_the_numbers_by_step_and_skips_lines_that_are_not_whole(tmp_path):
    rows = [{"step": 2, "reward": 1, "kl": None, "histogram": [1]}, {"step": 1, "reward": 0.5}]
    rows += [{"step": 3, "reward": float("inf"), "note": "x"}]
    write_lines(tmp_path / "metrics.jsonl", rows, end='{"step": 3, "rew')
    with (tmp_path / "eval.jsonl").open("wb") as file:
        file.write(b'\xff\xfe\x00\n{"step": 2, "set": "aime", "accuracy": 0.25}\n')
    metrics = runs.read_metrics(tmp_path)
    assert list(metrics) == ["reward"] and metrics.reward.dropna().to_dict() == {1: 0.5, 2: 1}
    assert runs.read_evaluations(tmp_path)["aime"].to_dict() == {"accuracy": {2: 0.25}}
