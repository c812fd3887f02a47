"""tasks/countdown.py: the verifier, the records and the metrics."""

import json
import re
from fractions import Fraction

import pytest

from nanoorz.ranks import UserError
from tasks import countdown, countdown_short

MINI = {"numbers": [5, 9, 8, 4], "target": 17, "pick": 2}
REAL = {"numbers": [19, 36, 55, 7], "target": 65, "pick": None}


@pytest.mark.parametrize(
    "text, label, value, is_right",
    [
        ("8+5=13<\n9+8=17!", MINI, "17", True),
        ("9+8", MINI, "17", True),
        ("9+8=17!\n", MINI, "17", True),
        ("9+8=17!\n8+5=13<", MINI, "13", False),  # it did not stop there
        ("9+8=16!", MINI, "17", False),  # the claim is wrong
        ("8+8=16<", MINI, "16", False),
        ("8+9+0=17!", MINI, "17", False),  # 0 is not given, and it picks three
        ("4+4+9=17!", MINI, "17", False),  # a number taken twice
        ("", MINI, None, False),
        ("<think>hm</think><answer>55 + 36 - 7 - 19</answer>", REAL, "65", True),
        ("<answer> (55+36) - (7+19) = 65 </answer>", REAL, "65", True),
        ("<answer>55+36-7-19=64</answer>", REAL, "65", False),
        ("<answer>55+36-7</answer>", REAL, "84", False),  # 19 is left out
        ("<answer>1/3</answer> no: <answer>55+36-7-19</answer>", REAL, "65", True),  # the last one
        ("55+36-7-19", REAL, None, False),  # without its tags
        ("<answer>55/0+36-7-19</answer>", REAL, None, False),
        ("<answer>__import__('os').system('true')</answer>", REAL, None, False),
    ],
)
def test_an_answer_is_right_only_if_it_reaches_the_target(text, label, value, is_right):
    with countdown.Grader() as grader:
        assert grader.submit("stopped", text, "stop", label) == value
        assert grader.submit("cut", text, "length", label) is None
        assert grader.pending(0) == 0
        assert grader.results() == {"stopped": float(is_right), "cut": 0.0}
        assert grader.results() == {}


def test_expressions_are_exact_and_have_no_other_operation():
    assert countdown.read_expression("1/3+1/3+1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert countdown.read_expression("7/3*2") == (Fraction(14, 3), [7, 3, 2])
    for text in ("2**9**9**9", "2//1", "-5", "1.5", "0x10", "", "9" * 201, "(" * 99, "007"):
        assert countdown.read_expression(text) == (None, []), text


def test_text_metrics_tell_a_search():
    third = pytest.approx(1 / 3)
    metrics = {"tries": 3, "backtracking": 1, "checked": 1, "slips": third, "repetition": third}
    assert countdown.text_metrics("8+5=13<\n8+5=12<\n9+8=17!") == metrics
    assert countdown.text_metrics("9+8=17!\n8+5=13<")["checked"] == 0.0
    assert countdown.text_metrics("words alone")["tries"] == 0.0
    assert countdown.text_metrics("1+1=" + "1" * 5000)["tries"] == 0.0, "it ended the rank"


def test_both_kinds_of_records_are_read_from_files_and_from_folders(tmp_path, monkeypatch):
    """A folder of parquet files is not taken for one that the datasets library saved."""
    path = tmp_path / "problems.json"
    mini = {"nums": [5, 9, 8, 4], "target": 17, "pick": 2}
    path.write_text(json.dumps([mini, {"nums": [19, 36, 55, 7], "target": 65}]))
    small, real = countdown.load_problems(str(path), "mini", columns=("nums", "target"))
    assert (small.prompt, small.label) == ("5,9,8,4=17:", MINI)
    assert real.label == REAL and "[19, 36, 55, 7]" in real.prompt and "equals 65" in real.prompt
    (wide, _) = countdown.load_problems(str(path), "orz", bos="<s>")
    assert wide.prompt.startswith("<s>A conversation") and wide.prompt.endswith("<think>")
    table = tmp_path / "table.csv"
    table.write_text('nums,target,pick\n"[5, 9, 8, 4]",17,2\n19 36 55 7,65,\n')
    found = countdown.load_problems(str(table), "mini")
    assert [problem.label for problem in found] == [MINI, REAL]
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([{"target": 65, "nums": [19, 36, 55, 7]}])
    rows.to_parquet(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))
    (problem,) = countdown.load_problems(str(tmp_path / "hub"), "chat")
    assert problem.label == REAL
    assert problem.prompt.endswith("tags, for example <answer> (1 + 2) / 3 </answer>.")


def test_a_short_response_has_a_second_reward_right_or_wrong():
    with countdown_short.Grader() as grader:
        for text, reason in (("9+8=17!", "stop"), ("9" * 21, "stop"), ("9" * 63, "length")):
            grader.submit(len(text), text, reason, MINI)
        found = grader.results()
    assert found[7] == {"right": 1.0, "short": pytest.approx(8 / 9)}
    assert found[21] == {"right": 0.0, "short": pytest.approx(2 / 3)}
    assert found[63] == {"right": 0.0, "short": 0.0}
    assert tuple(found[7]) == countdown_short.REWARDS


BAD = [({"nums": [1, 2]}, "'target'"), ({"nums": [5], "target": 5}, "fewer than two numbers")]
BAD += [({"nums": [5, -1], "target": 4}, "a number below 0"), (7, "TypeError")]
BAD += [({"nums": [5, 1], "target": 4, "pick": 3}, "pick 3 of 2")]


@pytest.mark.parametrize("record, reason", BAD)
def test_a_bad_record_is_named_in_one_line(tmp_path, record, reason, capsys):
    path = tmp_path / "problems.json"
    good = {"nums": [1, 2], "target": 3}
    path.write_text(json.dumps([good, record]))
    assert len(countdown.load_problems(str(path), "plain")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"1 with .*{reason}.*first: item 2", line)
    path.write_text(json.dumps([good, record, record]))
    with pytest.raises(UserError, match=f"2 of 3 items.*{reason}.*give records with nums") as error:
        countdown.load_problems(str(path), "plain")
    assert "\n" not in str(error.value)
    path.write_text(json.dumps([good]))
    with pytest.raises(UserError, match="^absent.jsonl: no such file$"):
        countdown.load_problems("absent.jsonl", "plain")
    with pytest.raises(UserError, match="mini, orz, plain"):
        countdown.load_problems(str(path), "no place for the question")
