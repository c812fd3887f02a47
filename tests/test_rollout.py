"""Requests, the rollout, and the real vLLM sampler, which rollout_worker.py runs."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import tiny as maker
import torch
from conftest import ROOT, SMALL, arguments, config, started_ranks
from rollout_worker import merging_tokenizer
from transformers import AutoModelForCausalLM

import rollout
from nanoorz.environment import Signals
from nanoorz.log import Clock
from reward import Problem
from rollout import Rollout, Sample

SAMPLING = {"generate_max_len": 50, "temperature": 0.7, "top_p": 0.9}
CFG = config(seed=3, rollout_batch_size=4, n_samples_per_prompt=3, task="mine.py", **SAMPLING)


def make_problems(count: int) -> list[Problem]:
    return [Problem(k, "", str(k), "", [1, 2, k]) for k in range(count)]


# ---- requests ------------------------------------------------------------------------------------


def test_a_step_asks_for_samples_of_the_next_problems():
    """Equal calls give equal requests. No seed comes twice, also when a problem comes again."""
    problems = make_problems(10)
    seeds = []
    for seed, step in itertools.product((3, 4), range(9)):
        cfg = dataclasses.replace(CFG, seed=seed)
        requests = rollout.requests_of_step(problems, cfg, step)
        assert requests == rollout.requests_of_step(problems, cfg, step)
        places = [(request.group, request.sample_number) for request in requests]
        assert places == [(group, index) for group in range(4) for index in range(3)]
        chosen = [request.problem for request in requests[::3]]
        assert chosen == rollout.problems_of_step(problems, cfg, step)
        assert {(r.max_tokens, r.temperature, r.top_p) for r in requests} == {(50, 0.7, 0.9)}
        seeds += [request.seed for request in requests]
    assert len(set(seeds)) == len(seeds) == 2 * 9 * 4 * 3


def test_every_pass_has_each_problem_once_in_another_order():
    problems = make_problems(7)
    passes = [CFG.episode_order(problems, number) for number in range(9)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len(set(map(tuple, passes))) == 9
    assert dataclasses.replace(CFG, seed=4).episode_order(problems, 0) != passes[0]
    # Wherever a run begins. A batch may cross the border of a pass, and be larger than one.
    order = [problems[index] for one in passes for index in one]
    for size in (1, 4, 7, 20):
        cfg = dataclasses.replace(CFG, rollout_batch_size=size)
        for step in (2, 0, 1):
            start = step * size
            assert rollout.problems_of_step(problems, cfg, step) == order[start : start + size]


# ---- Sampler -------------------------------------------------------------------------------------


CHAT_END = maker.char_tokenizer().convert_tokens_to_ids("z")


def run_worker(folder, ranks=1) -> dict:
    """What rollout_worker.py found in fp32. The temperature is that of the check alone."""
    model = maker.make_model(folder / "model", max_position_embeddings=512)
    # The end token, and a token that the base model of a chat may end its turns with.
    eos_ids = {"eos_token_id": [0, CHAT_END]}
    (model / "generation_config.json").write_text(json.dumps(eos_ids))
    flags = {"model": model, "data": "-", "temperature": 0.7, "answer_form": "last_number"}
    flags |= {"max_len": 512, "packing_max_len": 512, "tensor_parallel": ranks}
    out = folder / "found.json"
    worker = [ROOT / "tests" / "rollout_worker.py", out, *arguments(SMALL | flags)]
    with started_ranks(worker, ranks, {"LOCAL_WORLD_SIZE": "2"}) as processes:
        said = [process.communicate(timeout=300) for process in processes]
        assert {process.returncode for process in processes} == {0}, said
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_worker(tmp_path_factory.mktemp("rollout"))


def test_every_call_of_the_sampler_starts_with_an_empty_cache(found):
    """Blocks of an earlier call would change the schedule, so the bits of a run that is resumed or
    evaluated could change."""
    assert found["cached"] == [[0, 384]] * 2, "the second prompt has the first one's blocks"


def test_a_sample_does_not_depend_on_what_else_is_sampled(found):
    """Log-probs come with each id if they are wanted."""
    for k, position in enumerate(found["positions"]):
        ids = found["apart"][str(k)]["response_ids"]
        assert ids == found["together"][str(position)]["response_ids"]
    texts = {sample["text"] for k, sample in found["together"].items() if int(k) % 5 < 2}
    assert len(texts) == len(found["together"]) * 2 // 5 > 3, "the seeds alone make these differ"
    for sample in found["together"].values():
        assert len(sample["logprobs"]) == len(sample["response_ids"])
        assert all(logprob <= 0 for logprob in sample["logprobs"])
    assert all(sample["logprobs"] == [] for sample in found["apart"].values())


def test_a_response_ends_at_its_own_limit_or_fills_max_len_to_the_last_token(found):
    """max_len is 20 here, below vLLM's own, which would hide one token too many."""
    room = 20 - 6  # tokens of "10+20<think>"
    ends = set()
    for k in range(0, len(found["limits"]), 2):
        short, whole = (found["limits"][str(position)] for position in (k, k + 1))
        ids = whole["response_ids"]
        assert short["response_ids"] == ids[:3]
        if len(ids) > 3:
            assert short["finish_reason"] == "length"
        ends.add((whole["finish_reason"], len(ids) - room))
    assert ("length", 0) in ends
    assert all(reason == "stop" and more <= 0 for reason, more in ends - {("length", 0)})


def test_a_stopped_call_drops_what_has_not_ended(found):
    assert 0 < len(found["stopped"]) < len(found["limits"])
    for position, sample in found["stopped"].items():
        assert sample == found["limits"][position]


@pytest.mark.parametrize("kind", ["stop strings", "eos ids"])
def test_what_ends_a_response_stays_in_its_ids(found, kind):
    """A stop string is also in the text. An eos token is not: a grader would read `#### 18z` as
    another number. A model may have several eos tokens, and they may be no special tokens."""
    ended = 0
    for sample in found[kind].values():
        *before, last = sample["response_ids"]
        assert set(found["digits"]).isdisjoint(before)
        if last in found["digits"]:
            ended += 1
            assert sample["finish_reason"] == "stop"
            shown = sample["decoded"] if kind == "stop strings" else sample["decoded"][:-1]
            assert sample["text"] == shown
    assert ended > 3
    stopped = [sample for sample in found["together"].values() if sample["finish_reason"] == "stop"]
    assert stopped
    assert found["known eos ids"] == [0, CHAT_END]
    assert {sample["response_ids"][-1] for sample in stopped} == {0, CHAT_END}
    for sample in stopped:
        end = maker.EOS if sample["response_ids"][-1] == 0 else "z"
        assert sample["text"] + end == sample["decoded"]


@pytest.mark.parametrize("stops", ["0", "1"])
def test_tags_that_are_special_tokens_are_in_the_text(found, stops):
    """A grader would find no answer without them. With `--stop </answer>` they end a response."""
    samples = list(found["tags"][stops].values())
    assert any("<answer>" in sample["text"] for sample in samples)
    for sample in samples:
        assert sample["text"] == sample["decoded"]
        ends = sample["text"].count("</answer>")
        if stops == "1":
            assert (ends, sample["finish_reason"]) == (1, "stop")
            assert sample["text"].endswith("</answer>")
    assert stops == "1" or any(sample["text"].count("</answer>") > 1 for sample in samples)


def test_temperature_0_takes_the_most_probable_token_and_top_p_stays_in_the_nucleus(found):
    """A token is in the nucleus if the tokens above it have less than top_p of the probability."""
    plain, _, _, greedy, nucleus = (found["mass above"][kind::5] for kind in range(5))
    assert set(greedy) == {0}
    assert 0 < max(nucleus) < 0.5 < max(plain)


def test_a_weight_that_a_sync_leaves_out_is_named():
    """On a GPU vLLM only warns of it."""
    model = torch.nn.Linear(2, 2)
    model.load_weights = lambda weights: {name for name, _ in weights}
    rollout.load_all(model, model.named_parameters())
    with pytest.raises(AssertionError, match="1 weights of the sampler got no value, such as bias"):
        rollout.load_all(model, [("weight", model.weight)])


@pytest.mark.slow
def test_two_ranks_that_share_a_sampler_draw_the_turns_of_one_rank(found, shared_memory, tmp_path):
    turns = run_worker(tmp_path, ranks=2)["turns"]
    assert turns.keys() == found["turns"].keys()
    for position, sample in found["turns"].items():
        assert turns[position]["response_ids"] == sample["response_ids"]
        assert turns[position]["logprobs"] == pytest.approx(sample["logprobs"], abs=1e-5)


# ---- turns and replies ---------------------------------------------------------------------------


def borders(sample) -> list[int]:
    """Where the turns of a response begin, behind the first one."""
    drawn = sample["drawn"]
    return [k for k in range(1, len(drawn)) if drawn[k] and not drawn[k - 1]]


def test_a_turn_goes_on_from_the_exact_ids_so_far(found):
    """A text that is decoded and encoded again would have other ids: the tokenizer joins the digit
    at the end of a turn with the digit at the start of the reply."""
    joined = 0
    reply_ids = merging_tokenizer().encode("1+")
    for sample in found["turns"].values():
        ids = sample["response_ids"]
        assert sample["prompts"][0] == sample["prompt_ids"]
        later = [sample["prompt_ids"] + ids[:border] for border in borders(sample)]
        assert sample["prompts"][1:] == later
        inserted = [id for id, is_drawn in zip(ids, sample["drawn"]) if not is_drawn]
        assert inserted == reply_ids * len(later)
        assert len(sample["logprobs"]) == sum(sample["drawn"])
        assert sample["parts"][1::2] == ["1+"] * len(later)
        joined += sample["encoded"] != ids
    assert {len(borders(sample)) for sample in found["turns"].values()} >= {0, 2}
    assert joined > 2


def test_the_log_probs_of_all_turns_are_those_of_the_trainer(found, tmp_path):
    """Each drawn token was drawn behind exactly the tokens that stand before it."""
    model = AutoModelForCausalLM.from_pretrained(
        maker.make_model(tmp_path, max_position_embeddings=512), dtype=torch.float32
    )
    for position, sample in found["turns"].items():
        temperature = [1.0, 1.0, 0.7, 0.0, 1.0][int(position) % 5]
        if temperature == 0:
            continue
        ids = torch.tensor([sample["prompt_ids"] + sample["response_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        of_response = logprobs[len(sample["prompt_ids"]) - 1 :]
        expected = of_response[torch.tensor(sample["drawn"])]
        assert sample["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_conversation_does_not_depend_on_what_else_is_sampled(found):
    turns = [found["turns"][str(k)]["response_ids"] for k in range(20)]
    apart = found["of turns"]["apart"]
    assert [apart[str(k)]["response_ids"] for k in range(7)] == turns[::-3]
    after = found["of turns"]["after"]
    assert [after[str(k)]["response_ids"] for k in range(20)] == turns, "after a call that ended"


def test_a_reply_that_is_always_none_changes_nothing(found):
    assert found["of turns"]["never"] == found["of turns"]["plain"]


def test_a_response_without_room_for_its_reply_is_truncated(found):
    """Also one that would have more turns than --max_turns. The reply is dropped."""
    full = found["of turns"]
    for name, most in (("two turns", 2), ("no room", 1)):
        cut = 0
        for position, sample in full[name].items():
            turns = found["turns"][position]["parts"][::2]
            assert sample["parts"][::2] == turns[:most]
            would_go_on = len(turns) > most
            cut += would_go_on
            if would_go_on:
                assert sample["finish_reason"] == "length" and all(sample["drawn"][-1:])
            assert len(sample["response_ids"]) <= 40
        assert cut > 1


def test_a_slow_tool_does_not_hold_up_the_other_samples(found):
    """Its Future is done only when all others have ended. Then the sample is what it would be."""
    slow = found["of turns"]["slow"]
    (last,) = set(range(20)) - set(slow["order"][:-1])
    assert slow["order"][-1] == last and len(slow["order"]) == 20
    for position, sample in slow["samples"].items():
        assert sample["response_ids"] == found["turns"][position]["response_ids"]
    assert len(slow["samples"][str(last)]["parts"]) > 1, "the slow reply is a reply"


def test_a_call_that_waits_for_replies_ends_early(found):
    assert found["of turns"]["ended"] < 20


@pytest.mark.parametrize("name", ["raises", "future_raises"])
def test_an_error_of_a_reply_comes_out_of_the_sampler(found, name):
    told = {"raises": "division by zero", "future_raises": "in another process"}
    assert found["of turns"][name] == told[name]


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_marker_of_a_chat_is_one_token_unless_replies_are_plain(is_plain):
    """The output of a program must not end the turn of a chat and begin another one."""
    tokenizer = maker.char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["(end)"]})
    marker = tokenizer.convert_tokens_to_ids("(end)")
    sampler = SimpleNamespace(cfg=config(), tokenizer=tokenizer, room=lambda sample: 50)
    sampler.plain_replies = is_plain
    sample = Sample(None, [5], [True], parts=["4"])
    assert rollout.Sampler.add_reply(sampler, sample, "\n(end)")
    assert (marker in sample.response_ids) != is_plain
    assert sample.parts == ["4", "\n(end)"]
    assert sample.drawn == [True] + [False] * (len(sample.response_ids) - 1)


# ---- Rollout -------------------------------------------------------------------------------------


def test_a_rollout_answers_in_the_order_of_its_requests(found):
    assert found["in order"]
    assert found["form"] == "last_number", "--answer_form"
    together = [found["together"][str(k)]["response_ids"] for k in range(20)]
    assert found["sampled"] == together, "what the sampler alone gives"
    assert found["phases"] == ["submit", "rollout", "reward", "results", "gather"]
    tokens = sum(map(len, found["sampled"]))
    assert found["numbers"] == {"reward_lost": 0, "drawn_tokens": tokens}
    assert "repetition" in found["text metrics"]


def test_comparisons_without_a_verdict_are_counted_by_call(process_group):
    """The grader counts them since its start. The log has those of one step."""
    requests = rollout.make_requests(make_problems(1), [0], 1, 9, 1.0, 1.0)
    one = rollout_of([(0, Sample(requests[0], [1], [True]))])
    one.grader.lost = 2

    def results():
        one.grader.lost += 3
        return {0: 0.0}

    one.grader.results = results
    clock = Clock()
    one.draw(requests, clock)
    assert clock.numbers["reward_lost"] == 3


def rollout_of(stream, **task) -> Rollout:
    """A Rollout without a sampler. stream: what the sampler would yield."""
    grader = SimpleNamespace(lost=0, pending=lambda seconds: 0, submit=lambda *_: "3")
    one = object.__new__(Rollout)
    one.cfg = config()
    one.reply = None
    one.sampler = SimpleNamespace(generate=lambda *_, **options: (pair for pair in stream))
    one.signals = Signals(torch.distributed.HashStore())
    one.task = SimpleNamespace(**{"text_metrics": lambda text: {}} | task)
    one.grader = grader
    return one


def test_a_rollout_stops_for_a_signal_and_for_an_error_of_the_task(found):
    """Ranks that share a sampler look for no signal while they draw, so each rank looks before."""
    phases = ["submit", "rollout", "reward", "results"]
    assert found["stops"] == {
        "before": {"after an error": False, "phases": []},
        "amid": {"after an error": False, "phases": phases},
        "submit": {"after an error": True, "phases": phases},
        "results": {"after an error": True, "phases": phases[:-1]},
    }


def test_the_reward_of_several_is_that_of_the_first_name(process_group):
    """Whatever the order of the numbers."""
    one = rollout_of([], REWARDS=("right", "short"))
    one.grader.results = lambda: {0: {"short": 0.25, "right": True}}
    sample = Sample(None, [1], [True])
    one.take_rewards({0: sample})
    assert (sample.reward, list(sample.rewards.items())) == (1, [("right", 1), ("short", 0.25)])


# ---- check_sampler of train.py, which needs both in one process ----------------------------------

NUMBERS = r"differ by (\S+) a token, (\S+) in the worst response"


def test_the_right_weights_are_accepted_with_both_numbers(found):
    mean, worst = map(float, re.search(NUMBERS, found["right"]["found"]).groups())
    assert 0 < mean < worst < 1e-5


def test_wrong_weights_are_refused_with_both_numbers(found):
    """A sampler one update of Adam behind the trainer is too far from it."""
    line = found["one step behind"]["refused"]
    mean, worst = map(float, re.search(NUMBERS, line).groups())
    assert worst >= mean > 1e-4
    assert "allowed are 0.0001 and 0.001" in line
    assert line.startswith("--model ") and "\n" not in line


def test_parameters_of_another_temperature_than_the_requests_are_an_error(found):
    """The trainer's log-probs would be those at another temperature, and nothing would say so."""
    assert found["hotter"]["refused"] == "sampling_params changed the temperature"


def test_samples_of_a_row_that_see_each_other_are_found(found):
    assert "; try --packing alone" in found["a leak"]["refused"]
