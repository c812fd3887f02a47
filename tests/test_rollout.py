"""Requests, the real vLLM sampler, and what is shared between ranks.

The sampler is run by rollout_worker.py, in a process of its own.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny as maker
import torch
from conftest import ROOT, SMALL, arguments, clean_environment

import rollout
from lib.common import UserError
from reward import Problem
from rollout import Rollout, Sample


def make_problems(count: int) -> list[Problem]:
    return [Problem(k, "", str(k), "", [1, 2, k]) for k in range(count)]


# ---- requests ------------------------------------------------------------------------------------

CFG = SimpleNamespace(
    seed=3,
    rollout_batch_size=4,
    n_samples_per_prompt=3,
    generate_max_len=50,
    temperature=0.7,
    top_p=0.9,
    tensor_parallel=1,
    log_ratio=False,
    task="mine.py",
)


def test_requests_are_a_function_of_seed_and_step():
    problems = make_problems(10)
    requests = rollout.requests_of_step(problems, CFG, 5)
    assert requests == rollout.requests_of_step(problems, CFG, 5)
    places = [(request.group, request.index) for request in requests]
    assert places == [(group, index) for group in range(4) for index in range(3)]
    assert [request.problem for request in requests[::3]] == rollout.problem_order(problems, CFG, 5)
    distributions = {(r.max_tokens, r.temperature, r.top_p) for r in requests}
    assert distributions == {(50, 0.7, 0.9)}


def test_steps_share_neither_a_problem_nor_a_seed_until_the_pass_ends():
    """Also at the place of its step where another step had the same problem."""
    asked = [rollout.requests_of_step(make_problems(12), CFG, step) for step in range(9)]
    for first in (0, 3, 6):
        of_a_pass = sum(asked[first : first + 3], [])
        assert {request.problem.index for request in of_a_pass} == set(range(12))
    everyone = sum(asked, [])
    assert len({request.seed for request in everyone}) == len(everyone) == 9 * 4 * 3


def test_samples_of_a_problem_have_seeds_of_their_own():
    """One seed for all of them would make them the same response, and its group flat."""
    requests = rollout.make_requests(
        make_problems(1), rollout.problem_seeds(1, 0, "train", 1), 64, 9, 1.0, 1.0
    )
    assert len({request.seed for request in requests}) == 64


def test_no_two_samples_share_a_seed():
    """Of one problem, of two problems, of two steps, of training and evaluation, of two runs."""
    problems = make_problems(4)
    seeds = []
    for run, step, name in [(1, 0, "train"), (1, 1, "train"), (1, 0, "eval x"), (2, 0, "train")]:
        requests = rollout.make_requests(
            problems, rollout.problem_seeds(run, step, name, len(problems)), 3, 9, 1.0, 1.0
        )
        seeds += [request.seed for request in requests]
    assert len(set(seeds)) == len(seeds) == 4 * 12


def test_every_pass_has_each_problem_once_in_another_order():
    problems = make_problems(7)
    passes = [rollout.pass_order(problems, CFG, number) for number in range(3)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    other = SimpleNamespace(**vars(CFG) | {"seed": 4})
    assert rollout.pass_order(problems, other, 0) != passes[0]


def test_the_order_does_not_depend_on_where_a_run_begins():
    """A batch may cross the border of a pass, and be larger than one."""
    problems = make_problems(7)
    passes = [rollout.pass_order(problems, CFG, number) for number in range(9)]
    order = [problems[index] for one in passes for index in one]
    for size in (1, 4, 7, 20):
        cfg = SimpleNamespace(**vars(CFG) | {"rollout_batch_size": size})
        for step in (2, 0, 1):
            start = step * size
            assert rollout.problem_order(problems, cfg, step) == order[start : start + size]


# ---- Sampler -------------------------------------------------------------------------------------


def run_worker(out, env=None, **flags) -> dict:
    words = arguments(SMALL | {"data": "-"} | flags)
    command = [sys.executable, str(ROOT / "tests" / "rollout_worker.py"), str(out), *words]
    env = clean_environment() | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the worker found in fp32, as one of two ranks of a machine.

    The temperature is that of the check alone: log-probs must be taken at it.
    """
    folder = tmp_path_factory.mktemp("rollout")
    model = maker.make_model(folder / "model", max_position_embeddings=512)
    flags = {"model": model, "max_len": 512, "packing_max_len": 512, "temperature": 0.7}
    flags["answer_form"] = "last_number"
    return run_worker(folder / "found.json", env={"LOCAL_WORLD_SIZE": "2"}, **flags)


def test_the_trainer_keeps_its_threads_beside_vllm(monkeypatch):
    """On a GPU vLLM leaves one thread (`set_torch_threads_for_runtime`), and numbers that the
    trainer computes on the CPU took as many times longer as there are cores."""

    class LLM:
        def __init__(self, **settings):
            torch.set_num_threads(1)

        def get_tokenizer(self):
            return maker.char_tokenizer()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    monkeypatch.setattr(rollout, "sampler_settings", lambda cfg, is_gpu: {})
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rollout.Sampler(SimpleNamespace(**vars(CFG), stop=["User:"]))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_vllm_tells_nobody_that_it_runs(found):
    assert found["reports usage"] is False


def test_a_cache_that_cannot_hold_one_sequence_is_one_line(found):
    line = found["small cache"]
    assert line.startswith("vLLM cannot start with --model ")
    assert "--kv_cache_gb 1e-05" in line and "\n" not in line


def test_every_call_of_the_sampler_starts_cold(found):
    """A resumed run checks its sampler, and an evaluation comes before some steps.

    Blocks that were left warm by them would change the schedule of what follows, so the bits could
    depend on what ran before.
    """
    assert found["cached"] == [[0, 384]] * 2, "the second prompt has the first one's blocks"


def test_a_sample_does_not_depend_on_what_else_is_sampled(found):
    for k, position in enumerate(found["positions"]):
        ids = found["apart"][str(k)]["response_ids"]
        assert ids == found["together"][str(position)]["response_ids"]
    texts = {sample["text"] for sample in found["together"].values()}
    assert len(texts) == 16, "and all are different"


def test_logprobs_come_with_each_id_if_they_are_wanted(found):
    for sample in found["together"].values():
        assert len(sample["logprobs"]) == len(sample["response_ids"])
        assert all(logprob <= 0 for logprob in sample["logprobs"])
    assert {sample["logprobs"] for sample in found["apart"].values()} == {None}


def test_a_response_ends_at_its_own_limit_and_at_max_len(found):
    """A random model may end its response by itself before."""
    whole = found["own limits"]["3"]["response_ids"]
    prompt = 6  # tokens of "10+20<think>"
    assert len(whole) <= 512 - prompt
    for position, limit in (("0", 1), ("1", 3), ("2", 5)):
        sample = found["own limits"][position]
        assert sample["response_ids"] == whole[:limit]
        if len(whole) > limit:
            assert sample["finish_reason"] == "length"


def test_prompt_and_response_fill_max_len_to_the_last_token(found):
    """Of a max_len of 20, below the engine's own, which would hide one token too many."""
    ends = set()
    for sample in found["little room"].values():
        length = len(sample["response_ids"])
        ends.add(sample["finish_reason"])
        if sample["finish_reason"] == "length":
            assert length == 20 - 6, "tokens of the prompt 10+20<think>"
        else:
            assert length <= 20 - 6
    assert "length" in ends


def test_temperature_0_is_greedy(found):
    one, two = (found["greedy"][position]["response_ids"] for position in "01")
    assert one == two, "two samples of a problem"


def test_a_stopped_call_drops_what_has_not_ended(found):
    assert len(found["stopped"]) < len(found["together"])
    for position, sample in found["stopped"].items():
        assert sample == {**found["together"][position], "logprobs": None}


def test_a_stop_string_ends_a_response_and_stays_in_it(found):
    """Its tokens are trained on; the end token is in no text, and in the ids."""
    ended = 0
    for sample in found["stop strings"].values():
        assert not re.search("[12]", sample["text"][:-1])
        if sample["text"][-1:] in ("1", "2"):
            ended += 1
            assert sample["finish_reason"] == "stop"
            assert sample["decoded"] == sample["text"]
    assert ended > 3
    for sample in found["together"].values():
        if sample["finish_reason"] == "stop":
            assert sample["response_ids"][-1] == 0


def test_a_special_token_ends_a_response_and_stays_in_it(found):
    """As a stop string it was never found, so every response went on to the limit."""
    ends = set(found["ids to stop at"])
    ended = 0
    for sample in found["stop ids"].values():
        assert ends.isdisjoint(sample["response_ids"][:-1])
        if sample["response_ids"][-1] in ends:
            ended += 1
            assert sample["finish_reason"] == "stop"
    assert ended > 3


def test_stops_that_are_special_tokens_are_known():
    tokenizer = maker.char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert rollout.special_ids(tokenizer, ["User:", "<|im_end|>", "</answer>"]) == [end]


# ---- Rollout -------------------------------------------------------------------------------------


def test_two_ranks_of_a_machine_grade_on_half_of_its_cores_each(found):
    """Although vLLM says LOCAL_WORLD_SIZE=1 afterwards."""
    assert found["workers"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert found["form"] == "last_number", "--answer_form"


def test_a_rollout_answers_in_the_order_of_its_requests(found):
    assert found["answered"] == found["asked"]
    together = [found["together"][str(k)]["response_ids"] for k in range(16)]
    assert found["sampled"] == together, "what the sampler alone gives"
    assert found["phases"] == ["rollout", "reward", "gather"]
    assert found["numbers"] == {"reward_lost": 0, "seconds_waited": 0.0}
    assert "repetition" in found["text metrics"]


def test_a_signal_ends_a_rollout(found):
    """Where it came before, nothing is sampled: ranks that share an engine would sample it all."""
    assert found["stops"]["before"] == [None, 0]
    assert found["stops"]["amid"] == [None, 2]


def test_a_grader_that_is_broken_on_one_rank_stops_all(found):
    """Its error ended that rank alone, and nothing was saved."""
    assert found["stops"]["broken"] == ["the grader is broken", 2]


def share_of(monkeypatch, rank: int, world: int, requests, tensor_parallel=1) -> tuple:
    """(what that rank's engine is asked, positions that the rank hands on), with a fake engine."""
    asked = []
    handed_on = []

    def submit(position, text, reason, label):
        assert label == requests[position].problem.label, "else it is graded by another's"
        handed_on.append(position)
        return f"{position}" if position % 2 == 0 else None

    def generate(share, stopped, logprobs):
        asked.extend(share)
        for k, request in enumerate(share):
            yield k, Sample(request, [1], None, "", "stop")

    monkeypatch.setattr(rollout.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(rollout.dist, "get_world_size", lambda: world)
    one = SimpleNamespace(
        cfg=SimpleNamespace(**vars(CFG) | {"tensor_parallel": tensor_parallel}),
        sampler=SimpleNamespace(generate=generate),
        stopped=bool,
        task=SimpleNamespace(text_metrics=lambda text: {"words": 1}),
        grader=SimpleNamespace(submit=submit),
    )
    mine = rollout.draw_my_share(one, requests)
    assert sorted(mine) == sorted(handed_on)
    for position, sample in mine.items():
        assert sample.request is requests[position]
        assert sample.text_metrics == {"words": 1}
        assert sample.answer == (f"{position}" if position % 2 == 0 else None)
    return asked, handed_on


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_samples_are_dealt_singly(monkeypatch, world):
    """An engine with all samples of one hard problem would hold up the others."""
    requests = rollout.make_requests(make_problems(4), [0, 1, 2, 3], 6, 9, 1.0, 1.0)
    everyone = []
    for rank in range(world):
        asked, handed_on = share_of(monkeypatch, rank, world, requests)
        everyone += handed_on
        assert len(asked) == len(handed_on) == len(requests) // world
        for group in range(4):
            own = [request for request in asked if request.group == group]
            assert len(own) * world in range(6 - world + 1, 6 + world), "a fair part of each"
    assert sorted(everyone) == list(range(len(requests)))


def test_ranks_that_share_an_engine_ask_alike_and_one_of_them_hands_on(monkeypatch):
    requests = rollout.make_requests(make_problems(4), [0, 1, 2, 3], 6, 9, 1.0, 1.0)
    shares = [share_of(monkeypatch, rank, 4, requests, tensor_parallel=2) for rank in range(4)]
    asked = [share[0] for share in shares]
    assert asked[0] == asked[1] and asked[2] == asked[3]
    assert [len(share[1]) for share in shares] == [12, 0, 12, 0], "not twice"


@pytest.mark.parametrize("said", [True, False])
def test_a_task_that_does_not_tell_its_answers_is_refused_in_one_line(said):
    """Tasks once told only whether there is an answer, and True is no text."""
    one = SimpleNamespace(
        cfg=CFG,
        task=SimpleNamespace(text_metrics=lambda text: {}),
        grader=SimpleNamespace(submit=lambda *_: said),
    )
    (request,) = rollout.make_requests(make_problems(1), [0], 1, 9, 1.0, 1.0)
    with pytest.raises(UserError, match=f"^--task mine.py: .* returned {said}; .*`return answer`"):
        rollout.grade(one, 0, Sample(request, [1], None, "", "stop"))


@pytest.mark.parametrize("tensor_parallel, stops", [(1, True), (2, False)])
def test_ranks_that_share_an_engine_finish_their_rollout(tensor_parallel, stops):
    """They must leave it at the same step. A rank alone stops at once."""
    one = SimpleNamespace(
        cfg=SimpleNamespace(tensor_parallel=tensor_parallel),
        signals=SimpleNamespace(poll=lambda: True),
    )
    assert Rollout.stopped(one) == stops


# ---- exchange ------------------------------------------------------------------------------------


def test_exchange_gives_all_ranks_all_samples_and_leaves_problems_at_home(monkeypatch):
    problems = make_problems(2)
    requests = rollout.make_requests(problems, range(len(problems)), 2, 9, 1.0, 1.0)
    samples = [Sample(request, [k], None, str(k), "stop") for k, request in enumerate(requests)]
    other = {3: Sample(None, [3], None, "3", "stop"), 1: Sample(None, [1], None, "1", "stop")}

    def gathered(mine):
        assert b"Problem" not in pickle.dumps(mine)
        return [mine, other]

    monkeypatch.setattr(rollout, "gather", gathered)
    everyone = rollout.exchange(requests, {2: samples[2], 0: samples[0]})
    assert [sample.text for sample in everyone] == list("0123")
    assert all(sample.request is request for sample, request in zip(everyone, requests))


# ---- check_sampler of train.py, which needs both in one process ----------------------------------

NUMBERS = r"differ by (\S+) a token, (\S+) in the worst response"


@pytest.fixture(scope="module")
def found_in_bf16(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollout_bf16")
    flags = {"model": tiny["model"], "bf16": "true", "zero_stage": 2}
    return run_worker(folder / "found.json", **flags)


def test_the_right_weights_are_accepted_with_both_numbers(found):
    for said in found["right"]:
        mean, worst = map(float, re.search(NUMBERS, said["found"]).groups())
        assert 0 < mean < worst < 1e-5


@pytest.mark.parametrize("wrong", ["of another seed", "one step behind"])
def test_wrong_weights_are_refused_with_both_numbers(found, wrong):
    line = found[wrong]["refused"]
    mean, worst = map(float, re.search(NUMBERS, line).groups())
    assert worst >= mean > 1e-4
    assert "allowed are 0.0001 and 0.001" in line
    assert line.startswith("--model ") and "\n" not in line


def test_bf16_is_accepted_each_time(found_in_bf16):
    """It was a coin toss: the largest difference of few samples was allowed 0.05."""
    for said in found_in_bf16["right"]:
        mean, worst = map(float, re.search(NUMBERS, said["found"]).groups())
        assert 1e-4 < mean < worst < 0.15


def test_wrong_weights_are_refused_in_bf16_too(found_in_bf16):
    assert "allowed are 0.1 and 0.5" in found_in_bf16["of another seed"]["refused"]
