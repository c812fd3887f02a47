"""The levers that save tokens: --first_stage and --adaptive_len; with --tis_cap and --lr_end."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, jsonl, launch, same_metrics

from lib.levers import LengthBudget, Levers
from reward import Problem
from rollout import Request, Sample

# ---- Levers --------------------------------------------------------------------------------------


class FakeRollout:
    """Answers requests with given rewards, {group: reward of each sample}, and notes them."""

    def __init__(self, rewards: dict, length: int = 4):
        self.rewards = rewards
        self.length = length
        self.asked = []

    def draw(self, requests: list, clock) -> list:
        self.asked.append([(request.group, request.index) for request in requests])
        samples = []
        for request in requests:
            ids = [1] * min(self.length, request.max_tokens)
            reward = self.rewards[request.group][request.index]
            samples.append(Sample(request, ids, None, "", "stop", float(reward)))
        return samples


def requests_of(problems: int, samples: int) -> list[Request]:
    requests = []
    for group in range(problems):
        problem = Problem(10 + group, "", "", "", [1])
        requests += [Request(problem, group, index, 0, 99, 1.0, 1.0) for index in range(samples)]
    return requests


def settings(**flags) -> SimpleNamespace:
    usual = {
        "first_stage": 0,
        "adaptive_len": False,
        "n_samples_per_prompt": 5,
        "task": "math",
        "generate_max_len": 99,
    }
    return SimpleNamespace(**usual | flags)


@pytest.mark.parametrize(
    "task, solved, expanded",
    [
        # Group 0 is all right, 1 is mixed, 2 is all wrong.
        pytest.param("math", {}, [1, 2], id="all wrong, and never seen before"),
        pytest.param("math", {"12": False}, [1], id="all wrong, and none right at the last visit"),
        pytest.param("math", {"12": True}, [1, 2], id="all wrong, and some right at the last one"),
        pytest.param("code", {}, [1], id="code that passes no test is not worth more"),
    ],
)
def test_two_stages_expand_where_something_can_be_learnt(task, solved, expanded):
    rollout = FakeRollout({0: [1, 1, 0, 0, 0], 1: [0, 1, 0, 0, 0], 2: [0, 0, 0, 0, 0]})
    memory = {"solved": solved}
    levers = Levers(rollout, settings(first_stage=2, task=task), memory)
    clock = SimpleNamespace(numbers={})
    samples = levers.draw(requests_of(3, 5), clock)
    few = [(group, index) for group in range(3) for index in (0, 1)]
    rest = [(group, index) for group in expanded for index in (2, 3, 4)]
    assert rollout.asked == [few, rest], "the second call goes on where the first one ended"
    places = [(sample.request.group, sample.request.index) for sample in samples]
    assert places == sorted(few + rest)
    assert memory["solved"] == {"10": True, "11": True, "12": False}
    assert clock.numbers["prompts_expanded"] == pytest.approx(len(expanded) / 3)
    assert clock.numbers["tokens_saved"] == (3 - len(expanded)) * 3 * 4


def test_two_stages_expand_what_is_partly_right():
    """Shares of the tests that pass are neither all right nor all wrong."""
    rollout = FakeRollout({0: [0.2, 0.9, 0, 0, 0]})
    levers = Levers(rollout, settings(first_stage=2, task="code"), {})
    assert len(levers.draw(requests_of(1, 5), SimpleNamespace(numbers={}))) == 5


def test_adaptive_caps_are_those_of_the_steps_before():
    rollout = FakeRollout({0: [0, 0], 1: [0, 0]}, length=4)
    memory = {}
    levers = Levers(rollout, settings(adaptive_len=True), memory)
    caps = []
    for _ in range(3):
        samples = levers.draw(requests_of(2, 2), SimpleNamespace(numbers={}))
        caps.append({sample.request.max_tokens for sample in samples})
    assert caps == [{99}, {6}, {6}], "half as much again as what was needed"
    assert memory["limits"] == {"": 6, "10": 6, "11": 6}


# ---- LengthBudget --------------------------------------------------------------------------------


def responses(problem: int, lengths: list[int], reason: str = "stop") -> list[Sample]:
    samples = []
    for length in lengths:
        # A step has a problem once, so the problem can be the group too.
        request = Request(Problem(problem, "", "", "", [1]), problem, 0, 0, 1000, 1.0, 1.0)
        samples.append(Sample(request, [0] * length, None, "", reason))
    return samples


def test_length_budget_follows_what_responses_needed():
    budget = LengthBudget(1000, {})
    assert budget.limit_of("7") == 1000, "nothing is known: no limit but the run's"
    budget.update(responses(7, [10, 20, 40]) + responses(8, [100]))
    caps = [budget.limit_of(key) for key in ("7", "8", "9")]
    assert caps == [60, 150, 150], "half as much again; a new one has the batch's"
    budget.update(responses(7, [60] * 9) + responses(7, [60], "length"))
    assert budget.limit_of("7") == 90, "one in ten cut short is within the target"
    budget.update(responses(7, [60] * 8) + responses(7, [90, 90], "length"))
    assert budget.limit_of("7") == 180, "two in ten are not: it grows"
    budget.update(responses(7, [12] * 19) + responses(7, [180], "length"))
    assert budget.limit_of("7") == 18, "what was cut short says nothing of what is needed"
    budget.update(responses(7, [18], "length"))
    assert budget.limit_of("7") == 36, "and none finished"
    for _ in range(9):
        budget.update(responses(7, [180], "length"))
    assert budget.limit_of("7") == 1000, "never above generate_max_len"
    kept = json.loads(json.dumps(budget.limits))
    again = LengthBudget(1000, kept)
    for key in map(str, range(10)):
        assert again.limit_of(key) == budget.limit_of(key), "its state survives a checkpoint"


def test_a_request_gets_its_problem_s_cap():
    budget = LengthBudget(1000, {"": 50, "10": 20})
    limited = [budget.apply(request).max_tokens for request in requests_of(2, 1)]
    assert limited == [20, 50]


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run on four problems that a random model never solves, and the same one interrupted."""
    folder = tmp_path_factory.mktemp("levers")
    few = json.loads(Path(tiny["data"]).read_text())[:4]
    (folder / "few.json").write_text(json.dumps(few))
    flags = tiny | {"data": folder / "few.json", "save_interval": 1, "keep_last": 0}
    flags |= {"first_stage": 2, "adaptive_len": "true", "tis_cap": 2.0, "lr_end": 2e-4}
    # Most responses end early, so that caps are below generate_max_len and can be seen.
    flags |= {"critic_updates": 12, "stop": list("0123456789abcdef")}
    launch(folder / "whole", script=ROOT / "tests" / "traced_train.py", **flags)
    # As a power cut in step 3 leaves it.
    shutil.copytree(folder / "whole", folder / "parts")
    shutil.rmtree(folder / "parts" / "step_000003")
    (folder / "parts" / "result.json").unlink()
    launch(folder / "parts", **flags)
    return folder


def test_levers_in_a_whole_run(runs):
    samples = jsonl(runs / "whole" / "samples.jsonl")
    lengths = {step: [s["length"] for s in samples if s["step"] == step] for step in (1, 2, 3)}
    assert [len(lengths[step]) for step in (1, 2, 3)] == [16, 8, 8], "hopeless once seen"
    lines = jsonl(runs / "whole" / "metrics.jsonl")
    assert all(line["ratio_max"] < 1.001 for line in lines)
    assert [line["prompts_expanded"] for line in lines] == [1, 0, 0]
    saved = [line["tokens_saved"] for line in lines]
    assert saved == [0, sum(lengths[2]), sum(lengths[3])], "two of four: as many again"
    rates = [line["policy_lr"] for line in lines]
    assert rates == [5e-4, 1e-3, pytest.approx(2e-4)], "two steps of warm-up, then to lr_end"
    state = json.loads((runs / "whole" / "step_000003" / "state.json").read_text())
    assert state["levers"]["solved"] == dict.fromkeys("0123", False)
    assert state["levers"]["limits"].keys() == {"", *"0123"}


def test_a_step_asks_for_no_more_than_the_caps_of_the_step_before(runs):
    """Both stages of it. The loop could learn caps and ask for generate_max_len all the same."""
    calls = json.loads((runs / "whole" / "calls.json").read_text())
    # The first call is the check at the start, the second the first evaluation, the last the other.
    asked = [what for name, what in calls if name == "generate"][2:-1]
    assert len(asked) == 2 * 3
    limits = []
    for requests in asked:
        limits.append({(str(problem), limit) for problem, *_, limit in requests})
    assert {limit for _, limit in limits[0] | limits[1]} == {32}, "nothing is known yet"
    for step in (1, 2):
        state = json.loads((runs / "whole" / f"step_{step:06d}" / "state.json").read_text())
        caps = state["levers"]["limits"]
        assert min(caps.values()) < 32, "else this test sees nothing"
        few, rest = limits[2 * step : 2 * step + 2]
        assert few == {(problem, caps[problem]) for problem in "0123"}
        assert rest <= few


def test_a_critic_takes_no_more_steps_than_there_are_samples(runs):
    """--first_stage leaves 8 samples of 16 for 12 steps."""
    for line in jsonl(runs / "whole" / "metrics.jsonl"):
        samples = 16 if line["step"] == 1 else 8
        tokens_of_a_step = line["total_length"] * samples / min(12, samples)
        assert line["critic_tokens"] == pytest.approx(tokens_of_a_step)


def test_levers_resume_exactly(runs):
    """Without their memory the resumed run would sample other numbers of other lengths."""
    whole, parts = ((runs / name / "samples.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts
    whole, parts = (jsonl(runs / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert list(map(same_metrics, whole)) == list(map(same_metrics, parts))


@pytest.mark.slow
def test_code_in_a_whole_run(tiny, tmp_path):
    """--task code: the same loop, graded in the sandbox."""
    item = {"text": "add", "test_list": ["assert f(1, 2) == 3"]}
    lines = [json.dumps(item), json.dumps(item | {"text": "sum"})]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    flags = tiny | {"data": tmp_path / "code.jsonl", "eval_data": tmp_path / "code.jsonl"}
    flags |= {"task": "code", "template": "plain", "rollout_batch_size": 2, "max_steps": 1}
    flags |= {"prompt_max_len": 120, "max_len": 200, "packing_max_len": 256}
    launch(tmp_path / "run", **flags)
    assert [s["reward"] for s in jsonl(tmp_path / "run" / "samples.jsonl")] == [0.0] * 8
    (line,) = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["reward_lost"] == 0, "0 by verdict, not by accident"
