"""tools/doctor.py: it names what ten runs of the demo are ill with, and nothing of healthy ones.

The runs are those of tests/sick_runs.py; tests/doctor_runs/ holds what they wrote.
"""

import json
import sys

import pytest
import sick_runs
from conftest import jsonl

from tools import doctor


def recorded(name: str) -> list[dict]:
    return jsonl(sick_runs.RECORDED / name / "metrics.jsonl")


def expected(name: str) -> list[str]:
    """The causes that the doctor has to name: the one that the run was made with."""
    if name in sick_runs.HEALTHY:
        return []
    return [name.replace("_", " ")]


def well(steps: int = 20, **changes) -> list[dict]:
    """The lines of a run that learns. A change is a number, or one for each step."""
    lines = []
    for k in range(steps):
        line = {
            "step": k + 1,
            "reward": 0.2 + 0.6 * k / steps,
            "pass_at_n": 0.9,
            "truncated": 0.1,
            "response_length": 100.0,
            "total_length": 150.0,
            "entropy": 0.5,
            "explained_variance": 0.2,
            "approx_kl": 0.001,
            "policy_grad_norm": 1.0,
            "policy_tokens": 9000,
            "reward_lost": 0,
            "seconds": 10.0,
            "tokens_per_second": 960.0,
        }
        for name, value in changes.items():
            line[name] = value[k] if isinstance(value, list) else value
        lines.append(line)
    return lines


def without(lines: list[dict], *names: str) -> list[dict]:
    return [{name: x for name, x in line.items() if name not in names} for line in lines]


@pytest.mark.parametrize("name", sick_runs.RUNS)
def test_a_recorded_run_is_named_by_its_illness_and_a_healthy_one_has_none(name):
    assert list(doctor.examine(recorded(name))) == expected(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sick_runs.RUNS)
def test_the_run_made_again_is_named_alike(name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "sick_runs"
    if not folder.exists():
        folder.mkdir()
        sick_runs.make_base(folder)
    run = sick_runs.make_run(folder, name)
    assert list(doctor.examine(doctor.read_lines(run / "metrics.jsonl"))) == expected(name)
    # What is recorded is such a run, step by step.
    again = sick_runs.read_cut(run)
    assert len(again) == len(recorded(name))
    assert again[0].keys() == recorded(name)[0].keys()


def test_a_run_that_learns_has_no_sign():
    assert doctor.examine(well()) == {}
    assert doctor.examine(without(well(), "explained_variance", "approx_kl")) == {}, "GRPO"
    assert doctor.examine(well(3, reward=0.2)) == {}, "too few steps to be slow"
    first = well(9, pass_at_n=[0.9] * 3 + [0.7] * 6, explained_variance=-0.1, entropy=0.01)
    assert doctor.examine(first) == {}, "too few steps to compare"


def test_what_is_no_illness_is_not_named():
    grpo = without(well(reward=0.95, pass_at_n=1.0, policy_tokens=300), "explained_variance")
    assert doctor.examine(grpo) == {}, "groups are flat because it is solved"
    sure = well(entropy=[0.5] * 10 + [0.01] * 10, reward=[0.3] * 10 + [0.95] * 10)
    assert doctor.examine(sure) == {}, "sure because it is right"
    limited = well(entropy=[0.5] * 10 + [0.01] * 10, reward=[0.2] * 10 + [0.6] * 10, pass_at_n=0.62)
    assert doctor.examine(limited) == {}, "sure because all that could be solved is"
    spike = well(policy_grad_norm=[1.0] * 3 + [50.0] + [1.0] * 16)
    assert doctor.examine(spike) == {}, "a spike against what?"
    little = well(explained_variance=-1.0, reward=0.97, pass_at_n=1.0)
    assert doctor.examine(little) == {}, "little to explain"
    noisy = well(reward=[0.3, 0.5] * 10, pass_at_n=[0.8, 1.0] * 10)
    assert "steps too large" not in doctor.examine(noisy)


def test_steps_in_which_the_critic_learnt_alone_do_not_count():
    lines = [line | {"policy_lr": 1e-6} for line in recorded("too_slow")]
    alone = [line | {"reward": 0.95} for line in well()]
    assert list(doctor.examine(alone + lines)) == ["too slow"]


def test_a_run_that_has_learnt_to_end_is_not_ill():
    """It was said that its long answers are unlearned."""
    lines = well()
    for k, line in enumerate(lines):
        line["truncated"] = max(0.0, 0.25 - k / 20)
        line["response_length"] = 16 - k / 4
    assert "truncated answers" not in doctor.examine(lines)
    for line in lines:
        line["reward"] = 0.1
    assert "truncated answers" in doctor.examine(lines)


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    lines = "".join(json.dumps(line) + "\n" for line in well())
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 21, "rew')
    assert len(doctor.read_lines(tmp_path / "metrics.jsonl")) == 20


def test_each_sign_is_said_with_its_number():
    changes = {
        "stale sampler": ({"approx_kl": 0.05}, "0.050 nats"),
        "lost checks": ({"reward_lost": 3}, "5%"),
        "truncated answers": ({"truncated": 0.45}, "45%"),
        "entropy collapse": ({"entropy": [0.5] * 10 + [0.01] * 10}, "0.010"),
        "critic explains nothing": ({"explained_variance": -0.1}, "-0.10"),
        "gradient spikes": ({"policy_grad_norm": [1.0] * 12 + [11.0] + [1.0] * 7}, "step 13"),
        "steps too large": ({"pass_at_n": [0.9] * 10 + [0.7] * 10}, "0.90 to 0.70"),
        "too slow": ({"reward": 0.2}, "90%"),
        "format never met": ({"reward": 0.0, "pass_at_n": 0.0}, "20 steps"),
    }
    for cause, (change, number) in changes.items():
        found = doctor.examine(well(**change))
        assert list(found) == [cause]
        assert number in found[cause], found
    flat = without(well(pass_at_n=0.3, reward=0.25, policy_tokens=900), "explained_variance")
    assert "only 9%" in doctor.examine(flat)["flat groups"]
    fallen = well(reward=[0.6] * 15 + [0.2] * 5)
    assert "0.60 up to step" in doctor.examine(fallen)["steps too large"]


def test_lost_checks_are_counted_in_the_folders_of_older_runs_too(tmp_path):
    """There reward_lost is a sum, which starts anew in a resumed process."""
    sums = [100] * 10 + [0] * 5 + [7] * 5
    for config, expected in (({"reward": "math"}, [100, *[0] * 14, 7, *[0] * 4]), ({}, sums)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines = well(reward_lost=sums)
        doctor.count_lost_per_step(tmp_path, lines)
        assert [line["reward_lost"] for line in lines] == expected


def run_doctor(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words])
    doctor.main()


def test_a_run_folder_is_read(monkeypatch, capsys):
    run_doctor(monkeypatch, str(sick_runs.RECORDED / "ppo"))
    assert capsys.readouterr().out == "14 steps, reward 0.279 to 0.953\nnothing looks wrong\n"
    run_doctor(monkeypatch, str(sick_runs.RECORDED / "too_slow"))
    assert "\ntoo slow: the reward went from" in capsys.readouterr().out


def test_where_nothing_was_right_three_responses_are_shown(monkeypatch, capsys, tmp_path):
    metrics = (sick_runs.RECORDED / "format_never_met" / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics)
    samples = []
    for step in (1, 2):
        for question in ("1+1", "1+1", "1+2", "1+3", "1+4"):
            sample = {"step": step, "question": question, "label": "9"}
            samples.append(sample | {"response": f"{question} in step {step}"})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in samples))
    run_doctor(monkeypatch, str(tmp_path))
    shown = capsys.readouterr().out.splitlines()[-3:]
    for question, line in zip(("1+1", "1+2", "1+3"), shown):
        assert line == f"  '{question}' -> '{question} in step 2'; label '9'"


def test_a_folder_that_is_no_run_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    bad = {"empty": "", "broken": "{", "other": "[1]\n", "lacking": '{"step": 1}\n'}
    for name, text in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    for name in ("nowhere", *bad):
        with pytest.raises(SystemExit) as left:
            run_doctor(monkeypatch, str(tmp_path / name))
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, name
