"""tools/doctor.py names what recorded runs are ill with, and nothing of healthy ones."""

import json
import shutil

import pandas as pd
import pytest
from conftest import ROOT, run_tool, unpack

from tools import doctor

RECORDED = ROOT / "tests" / "doctor_runs"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder of all recorded runs. Two of them have samples."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(RECORDED, folder, dirs_exist_ok=True)
    unpack(RECORDED / "samples.tar.xz", folder)
    return folder


@pytest.mark.parametrize(
    "name, heading, cause",
    [
        ("grpo", "14 steps; the reward rises: ", None),
        # Its responses became longer, so the limit truncates many. They are not unlearned.
        (
            "laboratory",
            "40 steps; the reward rises: 0.18 to 0.57; nothing looks wrong",
            "the limit ends 37% of the responses in the last steps",
        ),
        # The tag that opens the answer stood in the prompt, so no response had it.
        ("format_never_met", "14 steps; the reward does not rise: ", "format never met: "),
        # The learning rate was ten times the demo's.
        ("steps_too_large", "14 steps; the reward ", "steps too large: "),
        # Each problem had the label of the problem before it.
        ("moved_labels", "14 steps; the reward ", "moved labels: "),
        # A variant turned the sign of all advantages.
        ("wrong_sign", "14 steps; the reward ", "wrong sign: "),
    ],
)
def test_the_doctor_names_the_fault_of_a_sick_run_and_none_of_a_healthy_one(
    name, heading, cause, recorded
):
    code, output, _ = run_tool("doctor", recorded / name)
    first, *found = output.splitlines()
    assert code == 0 and first.startswith(heading)
    assert len(found) == (cause is not None) and "".join(found).startswith(cause or "")
    assert first.endswith("; nothing looks wrong") == (name in ("grpo", "laboratory"))


def well(steps: int = 20, without=(), **changes) -> list[dict]:
    """The lines of a run that learns. A change is a number, or one for each step."""
    lines = []
    for k in range(steps):
        line = {"step": k + 1, "reward": 0.2 + 0.6 * k / steps, "pass_at_n": 0.9}
        line |= {"truncated": 0.1, "response_length": 100.0, "total_length": 150.0}
        line |= {"entropy": 0.5, "explained_variance": 0.2, "approx_kl": 0.001}
        line |= {"advantage_abs": 0.8, "reward_lost": 0}
        line |= {"seconds": 10.0, "tokens_per_second": 960.0}
        for name, value in changes.items():
            line[name] = value[k] if isinstance(value, list) else value
        lines.append({name: x for name, x in line.items() if name not in without})
    return lines


GRPO = ("explained_variance", "approx_kl")
NEVER = {"reward": 0.0, "pass_at_n": 0.0}
BROKEN = {"reward": [0.05] + [0.0] * 19, "truncated": [0.0] + [0.99] * 19}
FALLING = {"pass_at_n": [0.9] * 10 + [0.7] * 10, "reward": 0.3}
SURE = {"entropy": [0.5] * 10 + [0.01] * 10}
PEAK = [0.1] * 5 + [0.9] * 10 + [0.5] * 5
SHORTER = {"truncated": [0.25 - k / 80 for k in range(20)]}
SHORTER |= {"response_length": [16 - k / 4 for k in range(20)]}


@pytest.mark.parametrize(
    "causes, number, lines",
    [
        # Too few steps to be slow, and too few to compare.
        ("", "", well(3, reward=0.2)),
        ("", "", well(3, policy_lr=None)),
        ("", "", well(9, pass_at_n=[0.9] * 3 + [0.7] * 6, explained_variance=-0.1, entropy=0.01)),
        # Groups are flat, or responses alike, because all that can be solved is.
        ("", "", well(reward=0.95, pass_at_n=1.0, advantage_abs=0.03, without=GRPO)),
        ("", "", well(**SURE, reward=[0.3] * 10 + [0.95] * 10)),
        ("", "", well(**SURE, reward=[0.2] * 10 + [0.6] * 10, pass_at_n=0.62)),
        # Little is left to explain.
        ("", "", well(explained_variance=-1.0, reward=0.97, pass_at_n=1.0)),
        # It has learnt to end. It was said that its long answers are unlearned.
        ("", "", well(**SHORTER)),
        # Long responses pay in spite of the limit, or the model has learnt to end.
        ("", "", well(truncated=[0.1] * 10 + [0.5] * 10)),
        ("", "", well(truncated=[0.5] * 10 + [0.1] * 10)),
        ("truncated answers", "25%", well(**SHORTER | {"truncated": 0.25}, reward=0.1)),
        ("truncated answers", "45%", well(truncated=0.45)),
        ("stale sampler", "0.050 nats", well(approx_kl=0.05)),
        ("lost verdicts", "5%", well(reward_lost=3)),
        ("entropy collapse", "0.010", well(**SURE, pass_at_n=[0.9] * 10 + [0.7] * 10)),
        # It becomes sure of what it solves. A real model did so (SmolLM2-135M).
        ("", "", well(**SURE)),
        ("critic explains nothing", "-0.10", well(explained_variance=-0.1)),
        ("steps too large", "0.90 to 0.70", well(pass_at_n=[0.9] * 10 + [0.7] * 10)),
        ("steps too large", "0.60 up to step", well(reward=[0.6] * 15 + [0.2] * 5)),
        # The pay is the reward. It was said that something else is paid.
        (
            "steps too large",
            "0.90 up to step",
            well(reward=PEAK, paid=PEAK),
        ),
        # While the critic learns alone, steps do not count.
        ("too slow", "90%", well(reward=0.95) + well(reward=0.2, policy_lr=1e-6)),
        # The first update breaks the policy. All else follows from it.
        ("steps too large", "0.05 up to step 1", well(**BROKEN, entropy=0.01, answered=0.0)),
        ("steps too large", "0% to 66%", well(3, **{k: x[:3] for k, x in BROKEN.items()})),
        ("steps too large", "by 10", well(200, reward=[0.3, 0.1] + [0.01] * 198)),
        ("steps too large", "by 3", well(reward=[0.6] * 15 + [0.2] * 5, entropy=0.01)),
        # The limit was too small from the first step on, or the responses became endless.
        ("truncated answers", "45%", well(**FALLING, truncated=0.45)),
        ("steps too large", "10% to 50%", well(**FALLING, truncated=[0.1] * 10 + [0.5] * 10)),
        ("format never met", "20 steps", well(**NEVER)),
        ("format never met", "; 1% of the", well(**NEVER, answered=0.01, truncated=0.2)),
        ("format never met, truncated answers", "; 0%", well(**NEVER, answered=0, truncated=0.6)),
        ("form often missed", "50%", well(answered=0.4, truncated=0.2)),
        ("problems too hard", "; 90%", well(**NEVER, answered=0.72, truncated=0.2)),
        # Nothing shows the form if no response ends.
        ("truncated answers", "99%", well(**NEVER, answered=0, truncated=0.99)),
        ("truncated answers", "60%", well(**NEVER, answered=0.3, truncated=0.6)),
        # The model has learnt the form.
        ("", "", well(answered=[0.1 + k / 25 for k in range(20)])),
        ("flat groups", "0.09", well(pass_at_n=0.3, reward=0.25, advantage_abs=0.09, without=GRPO)),
    ],
)
def test_the_doctor_gives_each_cause_with_its_number_and_none_if_all_is_well(causes, number, lines):
    found = doctor.examine(doctor.Run(pd.DataFrame(lines).set_index("step")))
    assert ", ".join(found) == causes
    assert number in "".join(found.values())


@pytest.mark.parametrize("text", [None, "", "{", "[1]\n", '{"step": 1}\n'])
def test_a_folder_that_is_no_run_is_refused_in_one_line(text, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    code, _, errors = run_tool("doctor", tmp_path)
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1


def test_of_several_rewards_the_first_is_graded_again_and_another_pay_is_no_fault(tmp_path):
    config = {"task": "countdown_short", "answer_form": "orz", "reward_weights": ["short=1"]}
    config["task_file"] = ROOT / "tasks" / "countdown_short.py"
    label = {"numbers": [8, 9, 1, 2], "target": 17, "pick": 2}
    rows = [{"response": x, "finish_reason": "stop", "label": label} for x in ("8+9=17!", "8-1=7")]
    assert doctor.grade_again(pd.DataFrame(rows), config).tolist() == [1, 0]
    falls, rises = (
        [start + sign * k / 30 for k in range(20)] for start, sign in ((0.8, -1), (0.1, 1))
    )
    lines = pd.DataFrame(well(reward=falls, paid=rises)).set_index("step")
    assert "steps too large" in doctor.examine(doctor.Run(lines))
    assert doctor.examine(doctor.Run(lines, config=config | {"task": "x"})) == {}


def test_a_policy_that_is_like_its_teacher_is_not_too_slow():
    lines = pd.DataFrame(well(reward=0.3)).set_index("step")
    assert list(doctor.examine(doctor.Run(lines))) == ["too slow"]
    assert doctor.examine(doctor.Run(lines, config={"teacher_weight": 1.0})) == {}


def test_a_response_with_replies_is_graded_again_as_its_grader_saw_it(tmp_path):
    """A tool that prints the answer earns nothing, and this is no fault of the run."""
    row = {"step": 1, "problem": 0, "label": "18", "response": "18?18.", "finish_reason": "stop"}
    row |= {"reward": 0.0, "paid": 0.0, "advantages": None, "parts": ["18?", "18", "."]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row))
    (sample,) = doctor.read_some_samples(tmp_path, [1])
    assert sample["response"] == "18?\n."
