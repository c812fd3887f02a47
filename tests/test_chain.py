"""The task chain, its base model's texts, and the variants for it."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config

import ppo
from nanoorz.ranks import UserError
from rollout import Sample
from tasks import chain
from tools import base_model

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
    path = tmp_path / "chains.json"
    path.write_text(json.dumps([{"table": TABLE, "start": "d", "steps": 3}]))
    (problem,) = chain.load_problems(str(path), "mini")
    assert (problem.question, problem.prompt) == (f"{TABLE}:D", f"{TABLE}:D")
    assert problem.label["letters"] == "dcfh"


@pytest.mark.parametrize(
    "record",
    [
        {"table": "Ab,Ba", "start": "c", "steps": 3},
        {"table": "Ab,Ba", "start": "A", "steps": 3},
        {"table": "Ab,Ba", "start": "ab", "steps": 3},
        {"table": "Ab,Ba", "start": "", "steps": 3},
        {"table": "Ab,Bac", "start": "a", "steps": 3},
        {"table": "Ab, Ba", "start": "a", "steps": 3},
        {"table": "Ab,Aa,Ba", "start": "a", "steps": 3},
        {"table": "Xy,Yx", "start": "x", "steps": 3},
        {"table": 5, "start": "a", "steps": 3},
        {"table": "Ab,Ba", "start": "a", "steps": 0},
        {"table": "Ab,Ba", "start": "a", "steps": "three"},
        {"question": "1+1", "answer": "2"},
        [],
    ],
)
def test_a_record_of_another_form_is_refused_in_one_line(record, tmp_path):
    path = tmp_path / "others.json"
    path.write_text(json.dumps([record]))
    told = "not of the form .*; make the file with tools/base_model.py chain"
    with pytest.raises(UserError, match=told):
        chain.load_problems(str(path), "mini")


def test_a_table_of_chains_may_be_a_sheet(tmp_path):
    path = tmp_path / "chains.csv"
    path.write_text(f'table,start,steps\n"{TABLE}",d,3\n')
    (problem,) = chain.load_problems(str(path), "mini")
    assert problem.label == make_label(3)


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


def test_a_response_that_was_cut_gets_no_reply():
    assert chain.reply("c", "length", make_label()) is None
    assert chain.reply("c", "stop", make_label()) == "+C"


def test_text_metrics_count_wrong_and_repeated_letters():
    found = chain.text_metrics("c+Ca-Aa-Ah")
    assert found == {"letters": 4, "wrong": 0.5, "stutter": 0.25}
    assert chain.text_metrics("") == {"letters": 0, "wrong": 0.0, "stutter": 0.0}


def test_the_base_model_is_shown_what_the_task_says():
    """A right letter has a +, another one a -, and half of the texts have no verdict."""
    recipe = base_model.Chain(1, updates=4)
    texts = recipe.draw_texts([], random.Random(3))
    silent = wrong = letters = 0
    for prompt, *pieces in texts:
        assert prompt.weight == 0
        table, _, start = prompt.text.partition(":")
        record = {"table": table, "start": start.lower(), "steps": recipe.steps}
        label = chain.parse_record(record)["label"]
        text = "".join(piece.text for piece in pieces)
        said = ""
        for turn, answer in zip(pieces[::2], pieces[1::2]):
            assert (turn.weight, answer.weight) == (1, 0)
            told = chain.reply(said + turn.text, "stop", label | {"letters": start.lower() * 99})
            assert answer.text in (told, "?" + told[1:])
            said += turn.text + told
            wrong += told[0] == "-"
        letters += recipe.steps
        is_silent = "?" in text
        assert not (is_silent and set(text) & {"+", "-"})
        silent += is_silent
    assert 0.35 < silent / len(texts) < 0.65
    # 0.16 of the letters are random, and one in ten of these is right.
    assert 0.11 < wrong / letters < 0.18


def test_the_problems_are_different_and_no_chain_is_short(tmp_path):
    recipe = base_model.Chain(1, problems=50, held_out=20)
    train, held_out = recipe.split_problems(random.Random(1))
    assert (len(train), len(held_out)) == (50, 20)
    assert len({str(problem) for problem in train + held_out}) == 70
    for problem in train:
        label = chain.parse_record(problem)["label"]
        assert len(set(label["letters"])) == recipe.steps + 1, "no letter comes twice"


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


def test_a_frozen_embedding_is_the_tied_head_and_all_else_learns():
    tokenizer = base_model.make_tokenizer("ab", [])
    model = config(variant="frozen_embedding").policy_model(base_model.make_model(tokenizer, 1))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


def test_without_a_verdict_the_reply_is_a_question_mark():
    cfg = config(variant=ROOT / "docs/exercises/no_verdict.py", task="chain")
    text, _ = play(["c", "a", "h"], make_label(), cfg.reply_function(chain))
    assert text == "c?Ca?Ah"
