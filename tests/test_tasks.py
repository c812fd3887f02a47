"""The tasks countdown, countdown_short, calculator and chain, and bad records of code."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config, write
from test_turns import reward_of

import ppo
from nanoorz.ranks import UserError
from rollout import Sample
from tasks import calculator, chain, code, countdown, countdown_short

# ---- countdown -----------------------------------------------------------------------------------

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
        ("<answer>3+3+5+5</answer>", REAL | {"numbers": [1, 3, 5, 7], "target": 16}, "16", False),
        ("I use <answer> tags: <answer>\n55+36-7-19\n</answer>", REAL, "65", True),
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


def test_both_kinds_of_records_are_read(tmp_path):
    mini = {"nums": [5, 9, 8, 4], "target": 17, "pick": 2}
    path = write(tmp_path, "a.json", [mini, {"nums": [19, 36, 55, 7], "target": 65}])
    small, real = countdown.load_problems(path, "mini", columns=("nums", "target"))
    assert (small.prompt, small.label) == ("5,9,8,4=17:", MINI)
    assert real.label == REAL and "[19, 36, 55, 7]" in real.prompt and "equals 65" in real.prompt
    wide, _ = countdown.load_problems(path, "orz", bos="<s>")
    assert wide.prompt.startswith("<s>A conversation") and wide.prompt.endswith("<think>")
    table = 'nums,target,pick\n"[5, 9, 8, 4]",17,2\n19 36 55 7,65,\n'
    found = countdown.load_problems(write(tmp_path, "a.csv", table), "chat")
    assert [problem.label for problem in found] == [MINI, REAL]


# (task, a good record, bad records with their reasons)
BAD = [({"nums": [1, 2]}, "'target'"), ({"nums": [5], "target": 5}, "fewer than two numbers")]
BAD += [({"nums": [5, -1], "target": 4}, "a number below 0"), (7, "TypeError")]
BAD += [({"nums": [5, 1], "target": 4, "pick": 3}, "pick 3 of 2")]
BAD += [({"nums": "[2.5, 3]", "target": 4}, "2.5 is no whole number")]
BAD = [(countdown, {"nums": [1, 2], "target": 3}, *case) for case in BAD]
CHAIN = {"table": "Ab,Ba", "start": "a", "steps": 3}
CHANGES = [{"start": "c"}, {"start": "A"}, {"start": "ab"}, {"steps": 0}, {"steps": "three"}]
CHANGES += [{"table": table} for table in ("Ab,Bac", "Ab, Ba", "Ab,Aa,Ba", 5)]
BAD += [(chain, CHAIN, CHAIN | change, "not of the form") for change in CHANGES]
CODE = {"question": "Add.", "tests": [["1 2\n", "3\n"]]}
CHANGES = [{"question": None}, {"question": "\ud800"}, {"tests": {"inputs": [], "outputs": []}}]
FORMS = ([], [[1, 2]], [["1"]], ["f("], ["assert " + "(" * 999], [["x" * (8 << 20), "1"]])
CHANGES += [{"tests": tests} for tests in FORMS]
FORMS = ('{"inputs": ', {"inputs": [1], "outputs": ["1"]})
CHANGES += [{"tests": "", "input_output": form} for form in FORMS]
BAD += [(code, CODE, CODE | change, "") for change in CHANGES]


@pytest.mark.parametrize("task, good, bad, reason", BAD)
def test_a_bad_record_is_left_out_with_its_reason(task, good, bad, reason, tmp_path, capsys):
    assert len(task.load_problems(write(tmp_path, "a.json", [good, bad]), "plain {question}")) == 1
    told = capsys.readouterr().err
    assert "1 of 2 records are left out: 1 with " in told and reason in told
    with pytest.raises(UserError, match="2 of 3 records are left out: 2 with "):
        task.load_problems(write(tmp_path, "a.json", [good, bad, bad]), "plain {question}")


def test_a_short_response_has_a_second_reward_right_or_wrong():
    with countdown_short.Grader() as grader:
        for text, reason in (("9+8=17!", "stop"), ("9" * 21, "stop"), ("9" * 63, "length")):
            grader.submit(len(text), text, reason, MINI)
        found = grader.results()
    assert found[7] == {"right": 1.0, "short": pytest.approx(8 / 9)}
    assert found[21] == {"right": 0.0, "short": pytest.approx(2 / 3)}
    assert found[63] == {"right": 0.0, "short": 0.0}
    assert tuple(found[7]) == countdown_short.REWARDS


# ---- calculator ----------------------------------------------------------------------------------


REPLIES = {"8+5=": "13<", "8+5=13<\n9*4=": "36>", "8+5=13<\n9+8=": "17!", "4-9=": "0<"}
REPLIES |= {"9/4=": "0<", "99*99=": "0<", "__import__('os')=": "0<", "=": "0<"}
REPLIES |= {"8+5": None, "8+5=13<": None, "": None}


@pytest.mark.parametrize("text, value", REPLIES.items())
def test_the_calculator_replies_behind_an_equals_sign(text, value):
    assert calculator.reply(text, "stop", MINI) == value
    assert calculator.reply(text, "length", MINI) is None


def test_the_calculator_s_value_is_no_claim_of_the_policy():
    """The grader sees `9+8=`, and the calculator's value is for the policy to read."""
    assert reward_of(calculator, MINI, ["9+8=", "17!", ""]) == 1
    assert reward_of(calculator, MINI, ["9+8=", "0<", ""]) == 1
    assert reward_of(calculator, MINI, ["17", "!", ""]) == 0


# ---- chain ---------------------------------------------------------------------------------------

BLAME = ROOT / "docs/exercises/blame.py"
TABLE = "Fh,Ji,Ea,Hd,Dc,Ag,Cf,Gj,Be,Ib"


def make_label(steps=3):
    record = {"table": TABLE, "start": "d", "steps": steps}
    return chain.parse_record(record)["label"]


def play(turns, label, reply=chain.reply):
    """The whole text, and the text that the grader sees."""
    text = ""
    drawn = []
    for turn in turns:
        text += turn
        drawn.append(turn)
        answer = reply(text, "stop", label)
        if answer is None:
            break
        text += answer
    return text, "\n".join(drawn)


def test_a_label_has_the_right_chain(tmp_path):
    record = {"table": TABLE, "start": "d", "steps": 3}
    sheet = f'table,start,steps\n"{TABLE}",d,3\n'
    for name, content in (("a.json", [record]), ("a.csv", sheet)):
        [problem] = chain.load_problems(write(tmp_path, name, content), "mini")
        assert (problem.question, problem.prompt) == (f"{TABLE}:D", f"{TABLE}:D")
        assert problem.label["letters"] == "dcfh"


@pytest.mark.parametrize(
    "turns, text, reward",
    [
        (["c", "f", "h"], "c+Cf+Fh", 1),
        (["c", "a", "g"], "c+Ca-Ag", 0),  # the last letter follows from a wrong one
        (["c", "a", "h"], "c+Ca-Ah", 1),  # two errors that end at the right letter
        (["c", "f"], "c+Cf+F", 0),
        (["c", "f", "h", "d"], "c+Cf+Fh", 1),  # the response has ended before the last turn
        (["c", "+Ff", "h"], "c+C+Ff", 0),  # a reply of its own
        (["c", "Xh", "h"], "c+CXh", 0),
        (["c", "c", "h"], "c+Cc-Ch", 1),
        (["\n\nh"], "\n\nh", 0),  # the grader sees a newline between two turns
        (["c\nf\nh"], "c\nf\nh", 1),  # the stop text c ends a turn, so no turn has this text
        (["cf", "f", "h"], "cf", 0),
        (["", "c"], "", 0),
        (["C", "f", "h"], "C", 0),
    ],
)
def test_a_chain_is_right_only_if_its_last_letter_is_and_no_turn_has_other_text(
    turns, text, reward
):
    label = make_label()
    played, drawn = play(turns, label)
    with chain.Grader() as grader:
        grader.submit("a", drawn, "stop", label)
        grader.submit("b", drawn, "length", label)
        assert grader.results() == {"a": reward, "b": 0}
    assert played == text
    assert chain.reply("c", "length", label) is None, "it was cut"


def test_text_metrics_count_wrong_and_repeated_letters():
    found = chain.text_metrics("c+Ca-Aa-Ah")
    assert found == {"letters": 4, "wrong": 0.5, "stutter": 0.25}
    assert chain.text_metrics("") == {"letters": 0, "wrong": 0.0, "stutter": 0.0}


def make_batch(parts: list[str], drawn: list[bool], label: dict, seed: int = 0) -> ppo.Batch:
    """One sample of one token for each entry of `drawn`."""
    ids = list(range(len(drawn)))
    request = SimpleNamespace(problem=SimpleNamespace(label=label), seed=seed)
    sample = Sample(request, ids, drawn, parts=parts, finish_reason="stop")
    zero = torch.zeros(1)
    return ppo.Batch([[1]], [ids], zero, zero, "cpu", {}, [sample], [drawn])


def test_as_many_random_letters_are_blamed_as_are_wrong():
    cfg = config(variant=BLAME, blame="random", task="chain", estimator="grpo")
    parts, drawn = ["c", "+C", "a", "-A", "g", "+G", "b"], [x == "1" for x in "1001001001"]
    found = set()
    for seed in range(60):
        batch = make_batch(parts, drawn, make_label(4), seed)
        advantages = cfg.whiten(torch.full((4,), -2.0), batch)
        assert advantages.tolist() == cfg.whiten(torch.full((4,), -2.0), batch).tolist()
        found.add(tuple(advantages.tolist()))
    # Two of four letters are wrong: six choices.
    assert len(found) == 6 and {sum(numbers) for numbers in found} == {-4.0}


def test_the_blamed_letters_are_the_wrong_ones_or_the_right_ones():
    """Also where a turn has two tokens, and where the last letter is wrong."""
    for parts, drawn, wrong in (
        (["c", "+C", "a", "-A", "g", "+G", "b"], "100100100" + "1", [0, 1, 0, 1]),
        (["c", "+C", "f", "+F", "h", "+H", "d"], "100100100" + "1", [0, 0, 0, 0]),
        (["f", "-F", "Xh"], "100" + "11", [1, 1, 1]),
        (["c", "+C", ""], "100" + "1", [0, 1]),  # the end token
    ):
        drawn = [digit == "1" for digit in drawn]
        batch = make_batch(parts, drawn, make_label(4))
        for blame in ("wrong", "right"):
            cfg = config(variant=BLAME, blame=blame, task="chain", estimator="grpo")
            is_blamed = torch.tensor(wrong) == (blame == "wrong")
            found = cfg.whiten(torch.full((len(wrong),), -2.0), batch)
            assert found.tolist() == (-2.0 * is_blamed).tolist()
            assert (cfg.whiten(torch.full((len(wrong),), 3.0), batch) == 3).all()


def test_no_token_is_blamed_or_those_that_were_unlikely():
    batch = make_batch(["ca"], [True, True], make_label())
    batch.per_token["logprobs"] = torch.tensor([0.31, 0.29]).log()
    for blame, found in (("none", [0.0, 0.0]), ("unsure", [0.0, -2.0])):
        cfg = config(variant=BLAME, blame=blame, estimator="grpo")
        assert cfg.whiten(torch.full((2,), -2.0), batch).tolist() == found
        params = SimpleNamespace(logprobs=None)
        assert cfg.sampling_params(params, None).logprobs == (0 if blame == "unsure" else None)
    with pytest.raises(UserError, match="--blame all: choose none, unsure, wrong, right, random"):
        config(variant=BLAME, blame="all").check(1)


def test_without_a_verdict_the_reply_is_a_question_mark():
    cfg = config(variant=ROOT / "docs/exercises/no_verdict.py", task="chain")
    text, _ = play(["c", "a", "h"], make_label(), cfg.reply_function(chain))
    assert text == "c?Ca?Ah"
