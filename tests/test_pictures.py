"""The picture of a run and the page of its samples. Broken files and hostile text do no harm."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from conftest import run_tool

from tools import runs, samples


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


# ---- the page ------------------------------------------------------------------------------------


def sample(step, problem, index, **changes) -> dict:
    """A line as log.py writes it."""
    row = {"step": step, "set": "train", "problem": problem, "question": "1+1", "label": "2"}
    row |= {"index": index, "response": "it is", "reward": 0.0, "length": 2}
    return row | {"finish_reason": "stop", "tokens": ["it", " is"], "values": [0.5, None]} | changes


def make_page(run, *words) -> tuple[dict, str]:
    """What the page of a run holds, and all of the page but that."""
    assert run_tool("samples", run, *words)[0] == 0
    before, _, rest = (run / "samples.html").read_text("utf-8").partition('id="data">')
    data, _, after = rest.partition("</script>")
    # Hostile text could end the script where it has a "<", and browsers refuse NaN.
    assert "<" not in data and "NaN" not in data
    return json.loads(data), before + after


def test_a_page_has_whole_problems_of_each_step_and_evaluations_before_and_after(tmp_path):
    rows = []
    for step in range(1, 9):
        rows += [sample(step, problem, k) for problem in range(4) for k in range(4)]
    junk = '{}\n[]\nnull\n{"step": 1e999, "set": 1, "problem": []}\n{"step": 9, "set": "tr'
    write_lines(tmp_path / "samples.jsonl", rows, end=junk)
    tests = [sample(step, problem, 0, set="eval") for step in (0, 4, 8) for problem in range(5)]
    write_lines(tmp_path / "eval_samples.jsonl", tests)
    data, _ = make_page(tmp_path, "--max_per_step", 6)
    assert data["title"].endswith(": 58 samples, 85 left out")
    kept = [row for row in rows if row["problem"] * 4 + row["index"] < 6]
    assert data["samples"] == kept + [row for row in tests if row["step"] != 4]


def test_a_page_holds_at_most_5000_samples_and_20_mb_of_a_file():
    """Steps are spread evenly. If two steps are too many, each has fewer samples."""
    for size, kept, count in ((10, 300, 4_800), (20_000, 38, 608), (2_000_000, 2, 8)):
        found = {"train": {step: [f"{step:{size}}"] * 16 for step in range(1, 601)}}
        texts = samples.choose(found, 64)
        assert len(texts) == count and len(set(texts)) == kept and int(texts[-1]) == 600


def test_a_page_has_the_advantages_of_all_estimators(tmp_path):
    """The numbers are worked by hand. PPO gets the samples with values, and whitens over these.
    With lambda 1 the reward minus the value is 1, 0.5, -0.5 and -1 before whitening. A number that
    all tokens share stands once. Numbers have three digits."""
    rows = [sample(3, 7, k, paid=float(k == 0), values=[k / 2, 0.5 + k / 2]) for k in range(2)]
    rows.append(sample(3, 8, 2, paid=1.0))
    rows[0]["logprobs"] = [-0.5, -1.0]
    rows[0]["ref_logprobs"] = [-0.5, -2.0]
    write_lines(tmp_path / "samples.jsonl", rows)
    first, second, third = make_page(tmp_path)[0]["samples"]
    std = ((1 + 0.25) / 2) ** 0.5
    found = first["estimates"]
    # A user's own estimator is on the page too.
    assert found.keys() >= {"PPO, lambda 1", "PPO, lambda 0.95", "GRPO", "RLOO", "REINFORCE"}
    assert found["PPO, lambda 1"] == pytest.approx([1 / std, 0.5 / std], abs=1e-2)
    # delta is 0.5 and 0.5, and 0.5 and -1. So A is 0.975 and 0.5, and -0.45 and -1.
    lambda_95 = np.array([0.5 + 0.95 * 0.5, 0.5, 0.5 - 0.95, -1.0])
    lambda_95 = (lambda_95 - lambda_95.mean()) / lambda_95.std()
    both = found["PPO, lambda 0.95"] + second["estimates"]["PPO, lambda 0.95"]
    assert both == pytest.approx([*lambda_95], abs=1e-2)
    assert (found["GRPO"], found["RLOO"], found["REINFORCE"]) == (1.0, 1.0, 0.707)
    assert third["estimates"].items() >= {"GRPO": 0.0, "RLOO": 0.0, "REINFORCE": 0.707}.items()
    assert not any(name.startswith("PPO") for name in third["estimates"])
    assert first["kl"] == [0.0, 0.368] and "ref_logprobs" not in first


def conversation(reward, **changes) -> dict:
    """A sample with a reply of two tokens."""
    row = sample(1, 3, int(reward), reward=reward, paid=reward, values=[0.5, 0.25, 0.0])
    row |= {"tokens": ["9+3", "=", "12", "<", "."], "length": 3, "parts": ["9+3=", "12<", "."]}
    return row | {"drawn": [True, True, False, False, True], "response": "9+3=12<."} | changes


def test_a_page_gives_no_advantage_to_a_reply(tmp_path):
    rows = [conversation(1.0), conversation(0.0, values=[0.25, 0.5, 1.0])]
    write_lines(tmp_path / "samples.jsonl", rows)
    first, second = make_page(tmp_path)[0]["samples"]
    # Before whitening these are the reward minus the value: 0.5, 0.75, 1; -0.25, -0.5, -1.
    raw = np.array([0.5, 0.75, 1.0, -0.25, -0.5, -1.0])
    both = first["estimates"]["PPO, lambda 1"] + second["estimates"]["PPO, lambda 1"]
    assert both == pytest.approx([*((raw - raw.mean()) / raw.std())], abs=1e-2)


def test_hostile_text_stays_text(tmp_path):
    """Text that would close the script or open a tag with a handler is data and never runs."""
    names = ("set", "question", "label", "response", "finish_reason")
    rows = [sample(1, 0, 0, reward=float("nan"))]
    for text in (
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "<img src=x onerror='alert(1)'>",
        "]]>&lt;b&gt;\u2028\x00 \ud800 HASH SCRIPT DATA ${alert(1)} __proto__",
    ):
        rows.append(sample(1, text, 0, tokens=[text], **dict.fromkeys(names, text)))
    write_lines(tmp_path / "run" / "samples.jsonl", rows)
    data, page = make_page(tmp_path / "run")
    assert data["samples"] == [rows[0] | {"reward": None}, *rows[1:]]
    write_lines(tmp_path / "plain" / "samples.jsonl", rows[:1])
    _, same_page = make_page(tmp_path / "plain")
    assert same_page == page
    (tmp_path / "empty").mkdir()
    run = tmp_path / "run"
    for words in ([tmp_path / "empty"], [run, "--max_per_step", 0], [run, "--out", tmp_path]):
        code, _, errors = run_tool("samples", *words)
        assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
    # No script but the page's own runs, and that one makes no HTML of text.
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-"
    assert f'content="{policy}{digest}' in page
    assert not re.search("(inner|outer)HTML|insertAdjacent|document.write|eval", script)
