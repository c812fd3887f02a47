"""tools/doctor.py: what looks wrong with a run is said, and nothing else."""

import json

from tools import doctor

WELL = {
    "truncated": 0.1,
    "entropy": 0.5,
    "reward": 0.4,
    "explained_variance": 0.2,
    "approx_kl": 0.001,
    "policy_grad_norm": 1.0,
}
USUAL = [1.0] * 10


def test_a_healthy_step_has_no_sign():
    assert doctor.health(WELL, USUAL) == []
    without_critic = {"truncated": 0.0, "reward": 0.5, "policy_grad_norm": 1.0}
    assert doctor.health(without_critic, []) == []
    assert doctor.health(WELL | {"policy_grad_norm": 50.0}, [1.0]) == [], "a spike against what?"
    sure = WELL | {"entropy": 0.01, "reward": 0.95}
    assert doctor.health(sure, USUAL) == [], "sure because it is right"
    little = WELL | {"explained_variance": -1.0, "reward": 0.97}
    assert doctor.health(little, USUAL) == [], "little to explain"


def test_each_sign_is_said_in_its_words():
    changes = [
        ({"truncated": 0.31}, "31%"),
        ({"entropy": 0.01}, "collapsed"),
        ({"explained_variance": -0.1}, "critic"),
        ({"policy_grad_norm": 11.0}, "11"),
        ({"approx_kl": 0.05}, "differ: KL 0.050"),
    ]
    for change, word in changes:
        (sign,) = doctor.health(WELL | change, USUAL)
        assert word in sign


def test_a_run_folder_is_read_and_a_wrong_one_is_refused_in_one_line(tmp_path, capsys):
    lines = [WELL | {"step": k} for k in range(1, 9)]
    lines.append(WELL | {"step": 9, "policy_grad_norm": 90.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert doctor.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 9: gradient norm 90, usually 1\n"
    assert doctor.main([str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
