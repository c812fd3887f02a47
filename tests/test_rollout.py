"""Requests, the rollout, and the real vLLM sampler, which rollout_worker.py runs."""

import contextlib
import dataclasses
import itertools
import json
import linecache
import os
import re
import sys
from types import SimpleNamespace

import pytest
import tiny as maker
import torch
from conftest import ROOT, SMALL, arguments, config, started_ranks
from rollout_worker import merging_tokenizer
from transformers import AutoModelForCausalLM

import rollout
from nanoorz.log import Clock
from nanoorz.ranks import UserError
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


def run_worker(folder, ranks=1) -> dict:
    """What rollout_worker.py found in fp32. The temperature is that of the check alone."""
    model = maker.make_model(folder / "model", max_position_embeddings=512)
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


def test_the_trainer_keeps_its_threads_beside_vllm(monkeypatch, tiny):
    """On a GPU vLLM leaves one thread (`set_torch_threads_for_runtime`), and numbers that the
    trainer computes on the CPU took as many times longer as there are cores."""

    class LLM:
        def __init__(self, **settings):
            torch.set_num_threads(1)

        def get_tokenizer(self):
            tokenizer = maker.char_tokenizer()
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
            return tokenizer

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    torch.set_num_threads(3)
    sampler = rollout.Sampler(
        config(model=tiny["model"], stop=["User:", "<|im_end|>", "</answer>"])
    )
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    end = sampler.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sampler.stop_ids == [end], "stops that are special tokens are known"


def test_the_kv_cache_has_the_size_of_its_flag():
    settings = rollout.make_settings(config(kv_cache_gb=0.25), is_gpu=True)
    assert settings["kv_cache_memory_bytes"] == 2**28


def test_vllm_sends_no_report_of_its_use(found):
    assert found["reports usage"] is False


def test_a_cache_that_cannot_hold_one_sequence_is_refused_in_one_line(found):
    """vLLM's own advice names another flag."""
    told = "has no room for a sample of --max_len 512 tokens; raise it, or lower --max_len"
    assert found["small cache"] == f"--kv_cache_gb 1e-05: {told}"


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
    assert {sample["logprobs"] for sample in found["apart"].values()} == {None}


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


@pytest.mark.parametrize("kind", ["stop strings", "stop ids"])
def test_what_ends_a_response_stays_in_it(found, kind):
    """A stop string, or a special token, which vLLM finds by its id alone. The end token is in the
    ids and in no text."""
    ended = 0
    for sample in found[kind].values():
        *before, last = sample["response_ids"]
        assert set(found["digits"]).isdisjoint(before)
        if last in found["digits"]:
            ended += 1
            assert sample["finish_reason"] == "stop"
            assert sample["decoded"] == sample["text"]
            assert sample["text"][-1].isdigit()
    assert ended > 3
    stopped = [sample for sample in found["together"].values() if sample["finish_reason"] == "stop"]
    assert stopped
    for sample in stopped:
        assert sample["response_ids"][-1] == 0
        assert sample["text"] + maker.EOS == sample["decoded"]


def test_tags_that_are_special_tokens_are_in_the_text(found):
    """A grader would find no answer without them. vLLM's own text has no special tokens."""
    for sample in found["tags"].values():
        assert sample["text"] == sample["decoded"]
        assert sample["finish_reason"] == "stop" and sample["text"].endswith("</answer>")
    assert any("<answer>" in sample["text"] for sample in found["tags"].values())


def test_only_tags_are_kept_of_the_special_tokens():
    tokenizer = maker.char_tokenizer()
    more = ["<answer>", "</answer>", "<end_of_turn>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": more})
    ids = tokenizer.convert_tokens_to_ids(more[:2])
    assert rollout.special_tags(tokenizer) == set(ids)
    text = "<answer>1</answer><end_of_turn><|im_end|><eos>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "1"


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
    with pytest.raises(UserError, match="1 weights of the sampler got no value, such as bias"):
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


@pytest.mark.parametrize("name", ["forks", "sets_alarms"])
def test_a_tool_may_fork_and_set_an_alarm(found, name):
    """A forked child that raises SystemExit would go on as a second sampler."""
    plain = found["of turns"]["plain"]
    for position, sample in found["of turns"][name].items():
        assert sample["response_ids"] == plain[position]["response_ids"]


FAULTS = {
    "raises": ("ZeroDivisionError: division by zero", "return 1 / 0"),
    "hangs": ("it takes longer than --reply_seconds 0.2", "pass"),
    "exits": ("SystemExit: the tool is gone", 'sys.exit("the tool is gone")'),
    "fails_elsewhere": ("OSError: no such tool", "def fails_elsewhere"),
    "returns_a_number": ("returned 3 (int), and no text, None or Future", "def returns_a_number"),
    "future_raises": ("ZeroDivisionError: division by zero", "return 1 / 0"),
    "future_hangs": ("it takes longer than --reply_seconds 0.2", "def future_hangs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_reply_that_cannot_be_used_is_one_line_with_its_place(found, name):
    told, code = FAULTS[name]
    line = found["of turns"][name]
    place = re.fullmatch(re.escape(f"reply: {told}") + r" \((\S+), line (\d+)\)", line)
    assert place, line
    assert place[1].endswith("tests/rollout_worker.py")
    found = linecache.getline(place[1], int(place[2])).strip()
    assert found.startswith(code) or (name == "hangs" and found == "while True:")


def test_a_text_with_tags_ends_with_its_stop_string():
    """vLLM's text has no special tokens, so it is decoded again. Its last token may hold more."""
    tokenizer = maker.char_tokenizer()
    sampler = SimpleNamespace(cfg=config(stop=["ab"]), tokenizer=tokenizer, hidden=set())
    sampler.tags = set(tokenizer.convert_tokens_to_ids(["<answer>"]))
    completion = SimpleNamespace(token_ids=tokenizer.encode("<answer>1abc"), text="1ab")
    completion.stop_reason, completion.finish_reason, completion.logprobs = "ab", "stop", None
    sample = Sample(None, [], None, "", "", parts=[])
    rollout.Sampler.end_turn(sampler, sample, completion)
    assert (sample.text, sample.parts) == ("<answer>1ab", ["<answer>1ab"])
    assert sample.response_ids == completion.token_ids


def test_a_reply_may_hold_the_markers_of_a_chat():
    """A marker is one token. If the model lacks the token, if the text is very long, or if the
    tokenizer has no token for the text, then the response is truncated."""
    tokenizer = maker.char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    sampler = SimpleNamespace(cfg=config(), tokenizer=tokenizer, vocabulary=start + 1)
    (request,) = rollout.make_requests(make_problems(1), [0], 1, 50, 1.0, 1.0)
    sample = Sample(request, [5], None, "4", "stop")
    assert rollout.Sampler.add_reply(sampler, sample, "\n<|im_start|>user\n")
    newline, *user = tokenizer.encode("\nuser")
    assert sample.response_ids == [5, newline, start, *user, newline]
    assert sample.drawn == [True] + [False] * 7
    assert sample.parts == ["4", "\n<|im_start|>user\n"]
    assert tokenizer.encode("é") == []
    texts = (("<|im_start|>", start), ("1" * 10**7, start + 1), ("é", start + 1))
    for text, vocabulary in texts:
        sampler.vocabulary = vocabulary
        sample = Sample(request, [5], None, "4", "stop")
        assert not rollout.Sampler.add_reply(sampler, sample, text)
        assert (sample.response_ids, sample.finish_reason) == ([5], "length")


def test_after_an_error_no_tool_is_asked(found):
    """Many turns may end in one decode, and each question may take --reply_seconds."""
    assert found["of turns"]["asked of hangs"] == 1


# ---- Rollout -------------------------------------------------------------------------------------


def test_two_ranks_of_a_machine_grade_on_half_of_its_cores_each(found):
    """vLLM sets LOCAL_WORLD_SIZE=1 later. The sampler's process keeps one core of its half."""
    assert found["workers"] == max(1, len(os.sched_getaffinity(0)) // 2 - 1)
    assert found["form"] == "last_number", "--answer_form"


def test_a_rollout_answers_in_the_order_of_its_requests(found):
    assert found["in order"]
    together = [found["together"][str(k)]["response_ids"] for k in range(20)]
    assert found["sampled"] == together, "what the sampler alone gives"
    assert found["phases"] == ["submit", "rollout", "reward", "gather", "results"]
    tokens = sum(map(len, found["sampled"]))
    assert found["numbers"] == {"reward_lost": 0, "drawn_tokens": tokens}
    assert "repetition" in found["text metrics"]


def test_comparisons_without_a_verdict_are_counted_by_call(process_group):
    """The grader counts them since its start. The log has those of one step."""
    requests = rollout.make_requests(make_problems(1), [0], 1, 9, 1.0, 1.0)
    grader = SimpleNamespace(lost=2, pending=lambda seconds: 0)
    grader.submit = lambda position, text, reason, label: None

    def results():
        grader.lost += 3
        return {0: 0.0}

    def generate(share, stopped, reply):
        yield 0, Sample(share[0], [1], None, "", "stop")

    grader.results = results
    one = SimpleNamespace(
        cfg=config(),
        sampler=SimpleNamespace(generate=generate),
        signals=SimpleNamespace(poll=lambda: False),
        must_stop=bool,
        reply=None,
        task=SimpleNamespace(text_metrics=lambda text: {}),
        grader=grader,
    )
    clock = Clock(1)
    rollout.Rollout.draw(one, requests, clock)
    assert clock.numbers["reward_lost"] == 3


def test_a_rollout_stops_for_a_signal_and_for_an_error_of_the_task(found):
    """Before the sampling nothing is drawn: ranks that share a sampler would draw it all."""
    drawn = ["submit", "rollout", "reward"]
    bug = r"ZeroDivisionError: division by zero \(.*rollout_worker.py, line \d+\)"
    expected = {
        "before": (None, []),
        "amid": (None, drawn),
        "submit": (bug, ["submit"]),
        "results": (bug, [*drawn, "gather"]),
    }
    assert list(found["stops"]) == list(expected)
    for reason, (fault, phases) in expected.items():
        told, finished = found["stops"][reason]
        assert told == fault or re.match(fault, told), told
        assert finished == phases, reason


@pytest.mark.parametrize("world, tensor_parallel", [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_samples_are_dealt_singly_and_each_is_handed_on_once(monkeypatch, world, tensor_parallel):
    """A sampler with all samples of one hard problem would hold up the others. Ranks that share a
    sampler ask alike, and one of them hands on."""
    requests = rollout.make_requests(make_problems(4), [0, 1, 2, 3], 6, 9, 1.0, 1.0)
    handed_on = []

    def submit(position, text, reason, label):
        assert label == requests[position].problem.label, "else it is graded by another's"
        handed_on.append(position)
        return str(position)

    def generate(share, stopped, reply):
        first = rollout.dist.get_rank() // tensor_parallel
        assert share == requests[first :: world // tensor_parallel]
        for k, request in enumerate(share):
            yield k, Sample(request, [1], None, "", "stop")

    monkeypatch.setattr(rollout.dist, "get_world_size", lambda: world)
    one = SimpleNamespace(
        cfg=config(tensor_parallel=tensor_parallel),
        sampler=SimpleNamespace(generate=generate),
        must_stop=bool,
        reply=None,
        task=SimpleNamespace(text_metrics=lambda text: {"words": 1}),
        grader=SimpleNamespace(submit=submit),
    )
    for rank in range(world):
        monkeypatch.setattr(rollout.dist, "get_rank", lambda rank=rank: rank)
        for position, sample in rollout.draw_my_share(one, requests, Clock(0)).items():
            assert sample.request is requests[position]
            assert (sample.answer, sample.text_metrics) == (str(position), {"words": 1})
    assert sorted(handed_on) == list(range(len(requests)))


ANSWER = "Grader.submit returned {}; its last line must be `return answer`: "
REWARD = "Grader.results has the reward {} for the answer '3'; return a number, or name"
NAMED = (
    "Grader.results has the reward {} for the answer '3'; return {{name: number}} with the names"
)


@pytest.mark.parametrize(
    "method, returned, told",
    [
        ("text_metrics", {"n": "7"}, "text_metrics returned {'n': '7'}, not {name: number}"),
        ("text_metrics", None, "text_metrics returned None, not {name: number}"),
        ("submit", True, ANSWER.format("True")),
        ("submit", False, ANSWER.format("False")),
        ("results", None, REWARD.format("None (NoneType)")),
        ("results", {"another": 1.0}, REWARD.format("None (NoneType)")),
        ("results", {0: None}, REWARD.format("None (NoneType)")),
        ("results", {0: "1"}, REWARD.format("'1' (str)")),
        ("results", {0: float("nan")}, REWARD.format("nan (float)")),
        ("results", {0: -1e30}, REWARD.format("-1e+30 (float)")),
        ("results", {0: 10**400}, REWARD.format(f"1{'0' * 98} (int)")),
    ],
)
def test_a_task_that_returns_what_it_must_not_is_refused_in_one_line(method, returned, told):
    take_from_task({"submit": "3", "results": {0: 1.0}} | {method: returned}, told)


@pytest.mark.parametrize(
    "reward, told",
    [
        (1.0, NAMED.format("1.0 (float)") + " right, short"),
        ({"right": 1.0}, NAMED.format("{'right': 1.0} (dict)")),
        ({"right": 1.0, "short": float("nan")}, "'short': nan"),
        ({"short": 0.25, "right": True}, ""),
    ],
)
def test_a_task_that_names_its_rewards_returns_a_number_for_each_name(reward, told):
    """The first name is that of the reward, whatever the order of the numbers."""
    sample = take_from_task({"submit": "3", "results": {0: reward}}, told, ("right", "short"))
    if not told:
        assert (sample.reward, list(sample.rewards.items())) == (1, [("right", 1), ("short", 0.25)])


def take_from_task(returned, told, names=()):
    """A sample with what a task returned about it. told: why it is refused, or ""."""
    found = {"text_metrics": {}} | returned
    one = SimpleNamespace(
        cfg=CFG,
        task=SimpleNamespace(text_metrics=lambda text: found["text_metrics"], REWARDS=names),
        grader=SimpleNamespace(submit=lambda *_: found["submit"], results=lambda: found["results"]),
    )
    (request,) = rollout.make_requests(make_problems(1), [0], 1, 9, 1.0, 1.0)
    sample = Sample(request, [1], None, "", "stop")
    refused = contextlib.nullcontext()
    if told:
        words = f"--task mine.py: .*{re.escape(told)}"
        refused = pytest.raises(UserError, match=words)
    with refused as error:
        rollout.submit(one, 0, sample)
        rollout.take_rewards(one, {0: sample})
    assert not told or "\n" not in str(error.value)
    return sample


@pytest.mark.parametrize("tensor_parallel, stops", [(1, True), (2, False)])
def test_ranks_that_share_a_sampler_finish_their_rollout(tensor_parallel, stops):
    """Ranks that share a sampler must leave it at the same decode. A rank alone stops at once."""
    signals = SimpleNamespace(poll=lambda: True)
    one = SimpleNamespace(cfg=config(tensor_parallel=tensor_parallel), signals=signals)
    assert Rollout.must_stop(one) == stops


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


def test_parameters_of_another_temperature_than_the_requests_are_refused_in_one_line(found):
    """The trainer's log-probs would be those at another temperature, and nothing would say so."""
    line = found["hotter"]["refused"]
    told = "Recipe: sampling_params must return SamplingParams with the request's temperature, 1.0"
    assert line.startswith(told) and "returned 1.5" in line and "\n" not in line


CAUSES = {
    "one step behind": "sampler: vLLM computes other logits than transformers",
    "another head": "head: nanoorz/head.py computes other logits than transformers",
    "a leak": "packing: the samples of a row see each other; add --packing alone",
}


def test_the_refusal_names_the_cause(found):
    for fault, cause in CAUSES.items():
        assert f"; the cause is the {cause}" in found[fault]["refused"]
