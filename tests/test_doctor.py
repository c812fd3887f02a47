"""tools/doctor.py names what a sick run is ill with, and nothing of a healthy one."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, run_python, run_tool

from tools import doctor


def well(steps: int = 20, **changes) -> pd.DataFrame:
    """The metrics of a run that learns. A change is a number, or one for each step."""
    rewards = changes.pop("reward", [0.2 + 0.6 * k / steps for k in range(steps)])
    columns = {"step": range(1, steps + 1), "reward": rewards, "paid": rewards, "answered": 0.8}
    columns |= {"truncated": 0.1, "entropy": 0.5, "advantage_abs": 0.8, "approx_kl": 0.001}
    columns |= {"explained_variance": 0.2, "reward_lost": 0, "policy_lr": 1e-6}
    columns |= {"drawn_tokens": 6400, "response_length": 100.0}
    return pd.DataFrame(columns | changes).set_index("step")


FALL = [0.6] * 15 + [0.2] * 5
RISE = [0.1 + 0.04 * k for k in range(20)]
FALL_AT_ONCE = [0.3, 0.1] + [0.01] * 18


@pytest.mark.parametrize(
    "causes, changes",
    [
        ("", {}),
        # Too few steps to compare.
        ("", {"steps": 6, "reward": 0.2}),
        ("", {"steps": 1, "reward": 0.2}),
        # It is sure of what it solves, and longer responses pay in spite of the limit.
        ("", {"entropy": 0.001}),
        ("", {"truncated": 0.4}),
        ("", {"reward": 0.95, "advantage_abs": 0.01, "explained_variance": -1.0}),
        ("steps too large", {"reward": FALL}),
        ("steps too large", {"reward": FALL_AT_ONCE, "entropy": 0.001}),
        ("stale sampler", {"approx_kl": 0.05}),
        ("lost verdicts", {"reward_lost": 3}),
        # A variant pays for something else, and the policy learns it.
        ("another pay", {"reward": 0.2, "paid": RISE}),
        ("truncated answers", {"reward": 0.2, "truncated": 0.5, "answered": 0.5}),
        ("format never met", {"reward": 0.0, "answered": 0.0}),
        ("problems too hard", {"reward": 0.0}),
        ("too slow", {"reward": 0.3}),
        ("entropy collapse", {"reward": 0.3, "entropy": [0.5] * 10 + [0.01] * 10}),
        ("flat groups", {"reward": 0.25, "advantage_abs": 0.05}),
        ("critic explains nothing", {"reward": 0.3, "explained_variance": -0.1}),
    ],
)
def test_the_doctor_names_each_cause_and_none_if_all_is_well(causes, changes):
    run = doctor.Run(well(**changes), pd.DataFrame(), {})
    found = list(doctor.faults(run, 1.0)) or doctor.causes(run)
    assert ", ".join(text.partition(":")[0] for text in found) == causes


def test_a_flat_reward_of_few_samples_does_not_fall():
    """The best of many means of three steps lies far above the mean."""
    rewards = np.random.default_rng(1).binomial(64, 0.2, (20, 300)) / 64
    for row in rewards:
        assert not doctor.Run(well(300, reward=row.tolist()), pd.DataFrame(), {}).falls


def write_run(folder, metrics: pd.DataFrame, samples: list[dict]) -> None:
    folder.mkdir()
    metrics.reset_index().to_json(folder / "metrics.jsonl", orient="records", lines=True)
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    config = {"variants": [], "task": "math", "answer_form": "last_number"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code").mkdir()
    shutil.copy(ROOT / "ppo.py", folder / "code")


def make_samples(change: int, sign: int) -> list[dict]:
    """40 problems with a right and a wrong sample. Labels are moved by `change` problems."""
    samples = []
    for k in range(80):
        problem, is_right = divmod(k, 2)
        sample = {"step": 1, "problem": problem, "label": str(problem + change)}
        sample |= {"response": f"it is {problem + 900 * (1 - is_right)}", "finish_reason": "stop"}
        samples.append(sample | {"paid": float(is_right), "advantages": [sign * (is_right - 0.5)]})
    return samples


@pytest.mark.parametrize("change, sign, told", [(0, 1, ""), (1, 1, "moved"), (0, -1, "wrong sign")])
def test_the_samples_show_moved_labels_and_advantages_of_the_wrong_sign(
    change, sign, told, tmp_path
):
    write_run(tmp_path / "run", well(reward=0.2), make_samples(change, sign))
    code, output, _ = run_tool("doctor", tmp_path / "run")
    assert code == 0 and (f"\n{told}" in output if told else "\ntoo slow" in output)


def test_a_loss_of_the_wrong_sign_is_told_from_steps_that_are_too_large(tmp_path):
    """The reward falls from the first steps on in both. The code that the run has kept differs."""
    run = tmp_path / "run"
    write_run(run, well(reward=FALL_AT_ONCE), [])
    words = [ROOT / "tools" / "doctor.py", run]
    assert "\nsteps too large: " in run_python(*words).stdout
    text = (ROOT / "ppo.py").read_text()
    assert text.count("return -(advantages * logprobs)") == 1
    text = text.replace("return -(advantages * logprobs)", "return advantages * logprobs")
    (run / "code" / "ppo.py").write_text(text)
    told = run_python(*words).stdout
    assert "\nwrong sign: token_loss" in told and "too large" not in told


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    code, _, errors = run_tool("doctor", tmp_path)
    assert code == 2 and "has no metrics.jsonl" in errors
