"""The page of samples: which samples it shows, and what shades them. Hostile text does no harm."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from conftest import run_tool

from tools import samples


def sample(step, problem, index, **changes) -> dict:
    """A training sample as nanoorz/log.py writes it, with two tokens."""
    row = {"step": step, "set": "train", "problem": problem, "question": "1+1", "label": "2"}
    row |= {"index": index, "response": "it is", "reward": 0.0, "length": 2, "paid": 0.0}
    return row | {"finish_reason": "stop", "tokens": ["it", " is"]} | changes


def write_run(run, rows, tests=(), end="") -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").touch()
    for name, lines in (("samples.jsonl", rows), ("eval_samples.jsonl", tests)):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in lines) + end)


def make_page(run, *words) -> tuple[dict, str]:
    """What the page of a run holds, and all of the page but that."""
    assert run_tool("samples", run, *words)[0] == 0
    before, _, rest = (run / "samples.html").read_text("utf-8").partition('id="data">')
    data, _, after = rest.partition("</script>")
    # With a "<" hostile text could end the script.
    assert "<" not in data
    return json.loads(data), before + after


def test_a_page_has_some_samples_of_each_step_and_evaluations_before_and_after(tmp_path):
    rows = [sample(step, k // 4, k % 4) for step in range(1, 9) for k in range(16)]
    tests = [{"set": "eval", "step": step, "problem": k} for step in (0, 4, 8) for k in range(5)]
    write_run(tmp_path, rows, tests, end='{"step": 9, "set": "tr')
    data, _ = make_page(tmp_path, "--max_per_step", 6)
    assert data["title"].endswith(": 58 samples, 85 left out")
    shown = [(row["set"], row["step"], row["problem"]) for row in data["samples"]]
    kept = [("train", step, k // 4) for step in range(1, 9) for k in range(6)]
    assert shown == kept + [("eval", step, k) for step in (0, 8) for k in range(5)]


@pytest.mark.parametrize("size, kept", [(10, 600), (20_000, 38)])
def test_a_page_has_at_most_20_mb_of_training_samples(size, kept):
    """Steps are left out evenly. The last step stays."""
    texts = samples.thin_out([[f"{step:{size}}"] * 16 for step in range(1, 601)])
    assert len(texts) == 16 * kept and len(set(texts)) == kept and int(texts[-1]) == 600


def test_a_page_has_the_advantages_of_all_estimators_and_none_of_a_reply(tmp_path):
    """The numbers are worked by hand. PPO gets the samples with values, and whitens over these.
    With lambda 1 the reward minus the value is 1, 0.5, -0.5 and -1 before whitening. Numbers have
    three digits."""
    rows = [sample(3, 7, k, paid=float(k == 0), values=[k / 2, 0.5 + k / 2]) for k in range(2)]
    rows.append(sample(3, 8, 2, paid=1.0))
    # The first sample has a reply. The lists have a number for each of the two drawn tokens.
    rows[0] |= {"tokens": ["9+3=", "12", "<", "."], "drawn": [True, False, False, True]}
    rows[0] |= {"logprobs": [-0.5, -1.0], "ref_logprobs": [-0.5, -2.0]}
    write_run(tmp_path, rows)
    first, second, third = make_page(tmp_path)[0]["samples"]
    found = first["estimates"]
    raw = np.array([1.0, 0.5, -0.5, -1.0])
    assert found["PPO, lambda 1"] == pytest.approx([*raw[:2] / raw.std()], abs=1e-2)
    # delta is 0.5 and 0.5, and 0.5 and -1. So A is 0.975 and 0.5, and -0.45 and -1.
    raw = np.array([0.5 + 0.95 * 0.5, 0.5, 0.5 - 0.95, -1.0])
    both = found["PPO, lambda 0.95"] + second["estimates"]["PPO, lambda 0.95"]
    assert both == pytest.approx([*(raw - raw.mean()) / raw.std()], abs=1e-2)
    assert (found["GRPO"], found["RLOO"], found["REINFORCE"]) == ([1, 1], [1, 1], [0.707, 0.707])
    # A user's own estimator is on the page, too.
    without_critic = {"GRPO": [0, 0], "RLOO": [0, 0], "REINFORCE": [0.707, 0.707]}
    assert third["estimates"].items() >= without_critic.items()
    assert not any(name.startswith("PPO") for name in third["estimates"])
    assert first["kl"] == [0.0, 0.368]


def test_hostile_text_stays_text(tmp_path):
    """Text that would close the script or open a tag with a handler is data and never runs."""
    rows = [sample(1, 0, 0)]
    for text in (
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "<img src=x onerror='alert(1)'>",
        "]]>&lt;b&gt;\u2028\x00 \ud800 HASH SCRIPT DATA ${alert(1)} __proto__",
    ):
        names = ("set", "question", "label", "response", "finish_reason")
        rows.append(sample(1, 0, 0, tokens=[text, text], **dict.fromkeys(names, text)))
    write_run(tmp_path / "hostile", rows)
    data, page = make_page(tmp_path / "hostile")
    for row, found in zip(rows, data["samples"], strict=True):
        assert found.items() >= row.items()
    write_run(tmp_path / "plain", rows[:1])
    assert make_page(tmp_path / "plain")[1] == page
    # No script but the page's own runs, and that one makes no HTML of text.
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-"
    assert f'content="{policy}{digest}' in page
    assert not re.search("(inner|outer)HTML|insertAdjacent|document.write|eval", script)
