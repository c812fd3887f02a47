"""The picture of a run. Broken files do no harm."""

import json

import pytest
from conftest import run_tool

from tools import runs


def write_lines(path, rows: list, end: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


WRONG_TYPES = '{"step": "1", "reward": 1}\n{"step": NaN, "reward": 1}\n{"step": null}\n'
WRONG_TYPES += '{"step": 2, "reward": "x", "entropy": [1], "seconds": null, "set": null}\n'
WRONG_TYPES += '{"step": 3, "reward": NaN, "kl": Infinity, "entropy": 1e999}\n'


@pytest.mark.parametrize(
    "text, is_drawn",
    [
        (None, False),
        ('{"step": 1, "rew', False),
        ('[1]\n3\nnull\n"step"\n{}\n' + "[" * 100_000 + "\n", False),
        (WRONG_TYPES, False),
        ('{"step": 1, "reward": 0.5}\n{"step": 2, "rew', True),
        ('{"step": 0, "reward": 0, "policy_grad_norm": 0, "seconds": 0}\n' * 3, True),
        ('{"step": 1, "reward": -1e12, "kl": -1e9, "set": "$long_{", "accuracy": 0.25}\n', True),
    ],
)
def test_any_file_gives_a_picture_or_is_refused_in_one_line(text, is_drawn, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
        (tmp_path / "eval.jsonl").write_text(text)
    assert run_tool("plot", tmp_path / "absent")[2].startswith(f"error: {tmp_path}/absent: no such")
    code, _, errors = run_tool("plot", tmp_path)
    if is_drawn:
        assert code == 0 and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert code == 2 and not (tmp_path / "curves.png").exists()
        assert errors.startswith(f"error: {tmp_path} has no number") and errors.count("\n") == 1


@pytest.mark.engine
def test_plot_writes_into_the_run_or_for_several_beside_the_first_or_to_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gae", "$grpo_{"):
        row = {"reward": 0.5, "seconds": 3.0, "seconds_rollout": 1.5, "kl": 0.1, "truncated": 0.1}
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": k} | row for k in range(1, 60)])
    assert run_tool("plot", "gae")[0] == 0 and (tmp_path / "gae" / "curves.png").exists()
    assert run_tool("plot", "gae", "$grpo_{")[1] == f"wrote {tmp_path}/curves.png\n"
    assert (tmp_path / "curves.png").exists()
    code, _, errors = run_tool("plot", "gae", "$grpo_{", "--out", tmp_path / "none" / "x.png")
    assert code == 2 and errors.startswith("error: ") and "none/x.png: No such file" in errors
    for name, start in {"a.pdf": b"%PDF", "a.svg": b"<?xml", "a.jpg": b"\xff\xd8"}.items():
        assert run_tool("plot", "gae", "--out", name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    code, _, errors = run_tool("plot", "gae", "--out", "picture.txt")
    assert code == 2 and errors.count("\n") == 1 and "png" in errors
    monkeypatch.chdir(tmp_path / "gae")
    assert run_tool("plot", ".", "../$grpo_{")[1] == f"wrote {tmp_path}/curves.png\n"


def test_a_table_has_the_numbers_by_step_and_skips_lines_that_are_not_whole(tmp_path):
    rows = [{"step": 2, "reward": 1, "kl": None, "histogram": [1]}, {"step": 1, "reward": 0.5}]
    rows += [{"reward": 2}, [3], {"step": 3, "reward": float("inf"), "note": "x"}]
    write_lines(tmp_path / "metrics.jsonl", rows, end='{"step": 3, "rew')
    with (tmp_path / "eval.jsonl").open("wb") as file:
        file.write(b'\xff\xfe\x00\n{"step": 2, "set": "aime", "accuracy": 0.25}\n')
    metrics = runs.read_metrics(tmp_path)
    assert list(metrics) == ["reward"] and metrics.reward.dropna().to_dict() == {1: 0.5, 2: 1}
    assert runs.read_evaluations(tmp_path)["aime"].to_dict() == {"accuracy": {2: 0.25}}
