"""tools/doctor.py names what runs of the demo are ill with, and nothing of healthy ones."""

import pandas as pd
import pytest
from conftest import run_tool
from sick_runs import RECORDED, RUNS

from tools import doctor


@pytest.mark.parametrize("name", RUNS)
def test_the_doctor_names_the_fault_of_each_recorded_run_and_none_of_a_healthy_one(name):
    cause = name.replace("_", " ")
    expected = "nothing looks wrong\n" if name in ("ppo", "grpo") else f"{cause}: "
    code, output, _ = run_tool("doctor", RECORDED / name)
    heading, _, found = output.partition("\n")
    assert code == 0 and heading.startswith("14 steps, reward 0.")
    assert found.startswith(expected) and found.count("\n") == 1


def well(steps: int = 20, without=(), **changes) -> list[dict]:
    """The lines of a run that learns. A change is a number, or one for each step."""
    lines = []
    for k in range(steps):
        line = {"step": k + 1, "reward": 0.2 + 0.6 * k / steps, "pass_at_n": 0.9}
        line |= {"truncated": 0.1, "response_length": 100.0, "total_length": 150.0}
        line |= {"entropy": 0.5, "explained_variance": 0.2, "approx_kl": 0.001}
        line |= {"policy_tokens": 9000, "reward_lost": 0}
        line |= {"seconds": 10.0, "tokens_per_second": 960.0}
        for name, value in changes.items():
            line[name] = value[k] if isinstance(value, list) else value
        lines.append({name: x for name, x in line.items() if name not in without})
    return lines


GRPO = ("explained_variance", "approx_kl")
SURE = {"entropy": [0.5] * 10 + [0.01] * 10}
SHORTER = {"truncated": [0.25 - k / 80 for k in range(20)]}
SHORTER |= {"response_length": [16 - k / 4 for k in range(20)]}


@pytest.mark.parametrize(
    "cause, number, lines",
    [
        # Too few steps to be slow, and too few to compare.
        (None, "", well(3, reward=0.2)),
        (None, "", well(9, pass_at_n=[0.9] * 3 + [0.7] * 6, explained_variance=-0.1, entropy=0.01)),
        # Groups are flat, or responses alike, because all that can be solved is.
        (None, "", well(reward=0.95, pass_at_n=1.0, policy_tokens=300, without=GRPO)),
        (None, "", well(**SURE, reward=[0.3] * 10 + [0.95] * 10)),
        (None, "", well(**SURE, reward=[0.2] * 10 + [0.6] * 10, pass_at_n=0.62)),
        # Little is left to explain.
        (None, "", well(explained_variance=-1.0, reward=0.97, pass_at_n=1.0)),
        # It has learnt to end. It was said that its long answers are unlearned.
        (None, "", well(**SHORTER)),
        ("truncated answers", "25%", well(**SHORTER | {"truncated": 0.25}, reward=0.1)),
        ("truncated answers", "45%", well(truncated=0.45)),
        ("stale sampler", "0.050 nats", well(approx_kl=0.05)),
        ("lost checks", "5%", well(reward_lost=3)),
        ("entropy collapse", "0.010", well(**SURE)),
        ("critic explains nothing", "-0.10", well(explained_variance=-0.1)),
        ("steps too large", "0.90 to 0.70", well(pass_at_n=[0.9] * 10 + [0.7] * 10)),
        ("steps too large", "0.60 up to step", well(reward=[0.6] * 15 + [0.2] * 5)),
        # While the critic learns alone, steps do not count.
        ("too slow", "90%", well(reward=0.95) + well(reward=0.2, policy_lr=1e-6)),
        ("format never met", "20 steps", well(reward=0.0, pass_at_n=0.0)),
        ("flat groups", "9%", well(pass_at_n=0.3, reward=0.25, policy_tokens=900, without=GRPO)),
    ],
)
def test_the_doctor_gives_each_cause_with_its_number_and_none_if_all_is_well(cause, number, lines):
    found = doctor.examine(pd.DataFrame(lines).set_index("step"))
    assert list(found) == [cause] * bool(cause)
    assert number in found.get(cause, "")


@pytest.mark.parametrize("text", [None, "", "{", "[1]\n", '{"step": 1}\n'])
def test_a_folder_that_is_no_run_is_refused_in_one_line(text, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    code, _, errors = run_tool("doctor", tmp_path)
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
