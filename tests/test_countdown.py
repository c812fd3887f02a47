"""Countdown: its verifier, its records, and the laboratory's base model made from nothing."""

import collections
import itertools
import json
import random
import shlex
import subprocess
import sys
from fractions import Fraction

import pytest
from conftest import ROOT, jsonl

sys.path.insert(0, str(ROOT / "tools"))
import countdown as maker

from lib.common import UserError
from tasks import countdown

MINI = {"numbers": [5, 9, 8, 4], "target": 17, "pick": 2}
REAL = {"numbers": [19, 36, 55, 7], "target": 65, "pick": None}

# ---- the verifier --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, label, is_right",
    [
        ("8+5=13<\n9+8=17!", MINI, True),
        ("9+8=17", MINI, True),
        ("9+8", MINI, True),
        ("9+8=17!\n", MINI, True),
        ("9+8=17!\n8+5=13<", MINI, False),  # it did not stop there
        ("9+8=16!", MINI, False),  # the claim is wrong
        ("8+8=16<", MINI, False),
        ("8+9+0=17!", MINI, False),  # 0 is not given, and it picks three
        ("4+4+9=17!", MINI, False),  # a number taken twice
        ("17=17!", MINI, False),
        ("", MINI, False),
        ("<think>hm</think><answer>55 + 36 - 7 - 19</answer>", REAL, True),
        ("<answer> (55+36) - (7+19) = 65 </answer>", REAL, True),
        ("<answer>55+36-7-19=64</answer>", REAL, False),
        ("<answer>55+36-7</answer>", REAL, False),  # 19 is left out
        ("<answer>65</answer>", REAL, False),
        ("<answer>1</answer> no: <answer>55+36-7-19</answer>", REAL, True),  # the last one counts
        ("55+36-7-19", REAL, False),  # without its tags
        ("<answer>55/0+36-7-19</answer>", REAL, False),
        ("<answer>55+36-7-+19</answer>", REAL, False),
        ("<answer>55+36-7-19**1</answer>", REAL, False),
        ("<answer>__import__('os').system('true')</answer>", REAL, False),
        ("<answer>" + "(" * 150 + "65" + ")" * 150 + "</answer>", REAL, False),
        ("<answer>" + "9" * 200 + "</answer>", REAL, False),
    ],
)
def test_an_answer_is_right_only_if_it_reaches_the_target(text, label, is_right):
    assert countdown.solves(text, label) is is_right


def test_expressions_are_exact():
    """Thirds are no floats, and what has an operation of another kind has no value."""
    assert countdown.read_expression("1/3+1/3+1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert countdown.read_expression("7/2*3") == (Fraction(21, 2), [7, 2, 3])
    for text in ("2**9**9**9", "2//1", "-5", "1.5", "0x10", "", "9" * 201, "(" * 99, "007"):
        assert countdown.read_expression(text) == (None, []), text


def test_every_solvable_problem_is_solved_by_search_alone():
    """Of all tries of some problems exactly those that make the target are right."""
    for numbers in itertools.islice(itertools.combinations(range(1, 10), 4), 0, None, 25):
        tries = maker.all_tries(numbers)
        label = {"numbers": list(numbers), "target": tries[0][-1], "pick": 2}
        for a, sign, b, value in tries:
            assert countdown.solves(f"{a}{sign}{b}={value}!", label) == (value == label["target"])


def test_the_grader_pays_only_what_stopped_by_itself():
    with countdown.Grader() as grader:
        grader.submit("right", "9+8=17!", "stop", MINI)
        grader.submit("cut", "9+8=17!", "length", MINI)
        assert grader.pending(0) == 0
        assert grader.results() == {"right": 1.0, "cut": 0.0}
        assert grader.results() == {}


def test_text_metrics_tell_a_search():
    metrics = countdown.text_metrics("8+5=13<\n8+5=12<\n9+8=17!")
    assert metrics == {
        "tries": 3.0,
        "backtracking": 1.0,
        "checked": 1.0,
        "slips": pytest.approx(1 / 3),
        "repetition": pytest.approx(1 / 3),
    }
    assert countdown.text_metrics("9+8=17!\n8+5=13<")["checked"] == 0.0
    assert countdown.text_metrics("words alone")["tries"] == 0.0
    assert countdown.text_metrics("1+1=" + "1" * 5000)["tries"] == 0.0, "it ended the rank"


# ---- records -------------------------------------------------------------------------------------


def test_both_kinds_of_records_are_read(tmp_path):
    path = tmp_path / "problems.json"
    mini = {"nums": [5, 9, 8, 4], "target": 17, "pick": 2}
    path.write_text(json.dumps([mini, {"nums": [19, 36, 55, 7], "target": 65}]))
    small, real = countdown.load_problems(str(path), "mini", columns=("question", "answer"))
    assert (small.prompt, small.label) == ("5,9,8,4=17:", MINI)
    assert "[19, 36, 55, 7]" in real.prompt and "equals 65" in real.prompt
    assert real.label == REAL
    (wide, _) = countdown.load_problems(str(path), "orz", bos="<s>")
    assert wide.prompt.startswith("<s>A conversation") and wide.prompt.endswith("<think>")


def test_a_data_set_in_the_hub_s_form_is_read(tmp_path):
    """A folder of parquet files was taken for one that the datasets library had saved."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"target": 65, "nums": [19, 36, 55, 7]}])
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    rows.to_parquet(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))
    for folder in ("saved", "hub"):
        (problem,) = countdown.load_problems(str(tmp_path / folder), "chat")
        assert problem.label == REAL
        assert problem.prompt.endswith("tags, for example <answer> (1 + 2) / 3 </answer>.")


def test_submit_says_the_value_of_the_answer():
    """8+9 and 9+8 are one answer. What cannot be read is none."""
    with countdown.Grader() as grader:
        assert grader.submit(0, "<answer> 1 + 1 </answer>", "stop", REAL) == "2"
        assert grader.submit(1, "55 + 36 - 7 - 19", "stop", REAL) is None
        assert grader.submit(2, "<answer> 1 </answer>", "length", REAL) is None
        assert grader.submit(3, "8+9=17", "stop", MINI) == "17"
        assert grader.submit(4, "9+8=17!", "stop", MINI) == "17"
        assert grader.submit(5, "<answer> 1 / 3 </answer>", "stop", REAL) == "1/3"
        assert grader.submit(6, "<answer> none </answer>", "stop", REAL) is None


@pytest.mark.parametrize(
    "record, found",
    [
        ({"nums": [1, 2]}, "'target'"),
        ({"nums": [5], "target": 5}, "at least two numbers"),
        ({"nums": [5, -1], "target": 4}, "none below 0"),
        ({"nums": [5, 1], "target": 4, "pick": 3}, "cannot pick 3 of 2"),
        ({"nums": "ab", "target": 4}, "invalid literal"),
        (7, "TypeError"),
    ],
)
def test_a_bad_record_is_named(tmp_path, record, found):
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([{"nums": [1, 2], "target": 3}, record]))
    with pytest.raises(UserError, match="item 2") as error:
        countdown.load_problems(str(path), "plain")
    assert found in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_needs_its_place(tmp_path):
    with pytest.raises(UserError, match="mini, orz, plain"):
        countdown.load_problems(str(tmp_path), "nothing")


# ---- the base model ------------------------------------------------------------------------------


def test_an_example_is_what_the_recipe_says():
    """The shares of stops, slips and shown hits, over many lines."""
    recipe = maker.Recipe(seed=1)
    rng = random.Random(0)
    tries = maker.all_tries((4, 5, 8, 9))
    counts = collections.Counter()
    for _ in range(2000):
        for line in maker.random_search(tries, 17, recipe, rng):
            expression, _, claim = line.text.rstrip("\n<>!").partition("=")
            value, _ = countdown.read_expression(expression)
            counts["lines"] += 1
            counts["slips"] += value != int(claim)
            counts["shown"] += line.choice_weight == 0
            is_hit = int(claim) == 17
            assert line.stop == (recipe.stop_at_hit if is_hit else recipe.stop_at_miss)
            assert line.text.endswith("!\n") == is_hit
    assert counts["lines"] == 2000 * recipe.tries
    assert counts["slips"] / counts["lines"] == pytest.approx(recipe.slip, abs=0.005)
    assert counts["shown"] / counts["lines"] == pytest.approx(recipe.shown, abs=0.02)


def test_weights_and_stops_lie_on_their_tokens():
    recipe = maker.Recipe(seed=1, updates=1, batch=4)
    tokenizer = maker.make_tokenizer()
    problems = maker.all_problems(recipe)
    corpus = maker.make_corpus(tokenizer, problems, recipe, random.Random(0))
    assert corpus.ids.shape == corpus.weights.shape == corpus.stops.shape
    newline = tokenizer.encode("\n")[0]
    assert bool((corpus.ids[corpus.stops > 0] == newline).all())
    assert int((corpus.stops > 0).sum()) == 4 * recipe.tries
    # The question has no weight; the values of each try have the weight of what can be known.
    assert corpus.weights[:, : 2 * recipe.given + 2].sum() == 0
    equals = tokenizer.encode("=")[0]
    response = corpus.ids[:, 2 * recipe.given + 2 :]
    weights = corpus.weights[:, 2 * recipe.given + 2 :]
    after = weights[:, 1:][response[:, :-1] == equals]
    assert set(after.tolist()) == {recipe.known_weight}


def test_held_out_problems_are_never_trained_on(tmp_path):
    folder = tmp_path / "base"
    recipe = maker.Recipe(seed=3, updates=2, batch=2)
    assert maker.build(folder, recipe) > 0
    assert maker.build(folder, recipe) == 0

    def keys(name):
        records = json.loads((folder / name).read_text())
        return {(tuple(sorted(record["nums"])), record["target"]) for record in records}

    train = keys("train.json")
    held_out = keys("eval.json")
    assert len(held_out) == recipe.held_out
    assert not train & held_out
    assert len(train | held_out) == len(maker.all_problems(recipe)) == 914
    with pytest.raises(UserError, match="something else"):
        maker.build(folder, maker.Recipe(seed=4))
    (folder / "recipe.json").write_text("{")
    with pytest.raises(UserError, match="something else"):
        maker.build(folder, recipe)


@pytest.mark.slow
def test_the_baseline_trains(tmp_path):
    """The base from the command line, with few updates, and two steps with its own flags."""
    folder = tmp_path / "base"
    maker.build(folder, maker.Recipe(seed=1, updates=20))
    maker.write_flags(folder)
    flags = shlex.split((folder / "flags.txt").read_text())
    command = [sys.executable, "train.py", *flags, "--run_dir", str(tmp_path / "run")]
    command += ["--max_steps", "2", "--eval_interval", "0", "--eval_n", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert {"tries", "checked", "backtracking", "slips"} <= set(lines[0])
    assert len(jsonl(tmp_path / "run" / "eval.jsonl")) == 2


@pytest.mark.engine
def test_a_folder_of_something_else_is_refused_in_one_line(tmp_path):
    (tmp_path / "mine.txt").write_text("")
    command = [sys.executable, "tools/countdown.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
