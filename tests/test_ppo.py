"""ppo.py against the slow and obvious way (naive.py), in the order of its functions.

A test that needs engines reads a cell of ppo_worker.py, which runs on real DeepSpeed, with one rank
or two. Cells of head.py and models.py are here, too.
"""

import dataclasses
import functools
import itertools
import math
import random
from operator import itemgetter
from types import SimpleNamespace
from unittest import mock

import naive
import numpy as np
import pytest
import torch
from ppo_worker import (
    CPU,
    LR,
    batch_of_lists,
    cell,
    config,
    make_batch,
    make_models,
    make_taught_batch,
    reader,
    with_replies,
)
from transformers import AutoModel

import ppo
from nanoorz.ranks import hash64


def step(name: str, batch: str = "ragged", step=0, **settings) -> dict:
    return cell(name, "step", spec={"batch": batch, "step": step}, **settings)


def nonfinite(how: str, model: str, **settings) -> dict:
    name = f"{how} {model} {settings}"
    return cell(name, "nonfinite", spec={"how": how, "model": model}, **settings)


SHORT_ROWS = {"packing_max_len": 48, "micro_train_batch_size": 1}
LONG_ROWS = {"packing_max_len": 300, "micro_train_batch_size": 1}
OFFLOAD = {"offload": "optimizer"}
FLAT_GROUPS = {"batch": "half flat", "estimator": "grpo"}
SKIPPED = FLAT_GROUPS | {"skip_flat": True}
SEQUENCE = {"variant": "loss_mean", "loss_mean": "sequence"}
CONSTANT = {"variant": "loss_mean", "loss_mean": "constant"}
ALONE = {"packing": "alone", "packing_max_len": 64}
GAMMA = {"lambd": 0.9, "gamma": 0.99}
ONE = [  # ranks: 1
    step("zero0, short rows", tied=False, warmup_updates=2, **SHORT_ROWS),
    step("zero1, one micro-batch, clipped", zero_stage=1, micro_train_batch_size=99, max_norm=0.1),
    step("zero2, offload", zero_stage=2, tied=False, lambd=0.5, **OFFLOAD),
    step("zero3, checkpointing", zero_stage=3, gradient_checkpointing=True, **LONG_ROWS),
    step("grpo", **FLAT_GROUPS),
    step("grpo, sequence", **SKIPPED, **SEQUENCE, **SHORT_ROWS),
    step("constant", **CONSTANT, **LONG_ROWS),
    step("turns", batch="turns", **GAMMA, **LONG_ROWS),
    step("turns alone", batch="turns", **GAMMA, **ALONE),
    step("turns grpo", batch="turns", estimator="grpo", zero_stage=2, **SHORT_ROWS),
]
TEXTBOOK = {"variant": "textbook_ppo", "policy_updates": 3, "actor_learning_rate": 3.0}
TEXTBOOK = step("textbook", zero_stage=1, **TEXTBOOK, **SHORT_ROWS)
TWO = [  # ranks: 2
    step("zero0", warmup_updates=2),
    step("zero1, short rows, varlen", zero_stage=1, tied=False, attention="varlen", **SHORT_ROWS),
    step("zero2, offload", zero_stage=2, **OFFLOAD),
    step("zero3, grpo", zero_stage=3, tied=False, **SKIPPED, **LONG_ROWS, **OFFLOAD),
    step("zero3, checkpointing", zero_stage=3, gradient_checkpointing=True, max_norm=0.1),
    step("zero3, small parameters whole", zero_stage=3, whole=True, **CONSTANT),
    step("idle rank, zero0", batch="one", **SEQUENCE),
    step("idle rank, zero1", batch="one", zero_stage=1, tied=False),
    step("idle rank, zero3, varlen", batch="one", zero_stage=3, tied=False, attention="varlen"),
    step("zero1, grpo", zero_stage=1, **FLAT_GROUPS, **SEQUENCE, **SHORT_ROWS),
    step("turns, zero3", batch="turns", zero_stage=3, **GAMMA, **SHORT_ROWS),
    step("turns grpo alone", batch="turns", estimator="grpo", zero_stage=1, **ALONE),
]
NONFINITE = [
    nonfinite("nan", "policy"),
    nonfinite("inf", "critic"),
    nonfinite("inf", "policy", zero_stage=1),
    nonfinite("inf", "critic", zero_stage=2, bf16=True),
    nonfinite("inf", "policy", zero_stage=3, **OFFLOAD),
]
SPLITS = []
for stage, updates in ((1, 12), (3, 4)):
    settings = {"zero_stage": stage, "critic_updates": updates, "critic_learning_rate": 0.02}
    SPLITS.append(step(f"{updates} parts", step=7, **settings))
BF16 = []
for stage in (2, 3):
    rows = {"packing_max_len": 26, "micro_train_batch_size": 1}  # a sample each
    BF16.append(cell(f"bf16 zero{stage}", "bf16", bf16=True, zero_stage=stage, **rows))
PRECISIONS = {
    "zero1": {"zero_stage": 1},
    "bf16 zero2": {"zero_stage": 2, "bf16": True},
    "bf16 zero3": {"zero_stage": 3, "bf16": True},
}
ADAMW = []
for precision, offload in itertools.product(PRECISIONS, ("none", "optimizer")):
    settings = PRECISIONS[precision] | {"actor_learning_rate": 4e-3, "warmup_updates": 4}
    ADAMW.append(cell(f"{precision} {offload}", "adamw", max_norm=1.0, offload=offload, **settings))
LOGS = {"variant": ["log_kl", "log_ratio"], "estimator": "grpo", "skip_flat": True}
SMALL_STEPS = {"zero_stage": 2, "actor_learning_rate": 1e-3}
OTHERS = [
    cell("flat", "flat", estimator="grpo", **SMALL_STEPS),
    cell("flat, skipped", "flat", estimator="grpo", skip_flat=True, **SMALL_STEPS),
    cell("none with critic", "none", variant="overlong_drop", zero_stage=3),
    cell("none", "none", variant=["overlong_drop", "loss_mean"], estimator="grpo", zero_stage=2),
    cell("logging", "logging", zero_stage=3, **LOGS),
]


def taught(name: str, teacher: str, **settings) -> dict:
    settings |= {"variant": "distill", "teacher_weight": 0.75}
    return cell(name, "taught", spec={"teacher": teacher}, **settings)


TAUGHT = [
    taught("taught, short rows", "large", **SHORT_ROWS),
    taught("taught, zero3", "large", zero_stage=3, estimator="grpo", **LONG_ROWS),
    taught("taught alone, zero3", "small", zero_stage=3, tied=False, **ALONE),
    taught("taught, zero1", "small", zero_stage=1),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(models, tmp_path_factory, process_group):
    """results(ranks, name): what a cell has found."""
    # The first cell of a process can measure its peak memory.
    two = [cell("memory", "memory"), *TWO, *NONFINITE, *SPLITS, *BF16, *ADAMW, *OTHERS, TEXTBOOK]
    two += TAUGHT
    return reader([*ONE, *BF16, TEXTBOOK, *TAUGHT], two, tmp_path_factory.mktemp("cells"), models)


# ---- Batch ---------------------------------------------------------------------------------------


def draw(prompt, response, group=0, reward=1.0, logprobs=None, temperature=1.3, drawn=None):
    """A sample, as rollout.py draws it."""
    problem = SimpleNamespace(prompt_ids=prompt)
    request = SimpleNamespace(problem=problem, group=group, temperature=temperature)
    found = {"response_ids": response, "reward": reward, "rewards": None, "logprobs": logprobs}
    return SimpleNamespace(request=request, drawn=drawn or [True] * len(response), **found)


def test_a_batch_holds_what_the_sampler_drew(process_group):
    """The mask comes from the lengths, never from a padding id: id 0 is an answer's token here."""
    samples = [
        draw([5, 6], [0, 0, 3], group=1, reward=0.5, logprobs=[-1.0, -2.0, -3.0]),
        draw([7], [0], logprobs=[-4.0]),
        # The second and the third token are a reply.
        draw([8], [1, 2, 3, 4], logprobs=[-5.0, -6.0], drawn=[True, False, False, True]),
    ]
    batch = ppo.make_batch(samples, CPU, config())
    assert batch.samples is samples
    assert batch.prompt_ids == [[5, 6], [7], [8]]
    assert batch.response_ids == [[0, 0, 3], [0], [1, 2, 3, 4]]
    assert (batch.groups.tolist(), batch.rewards.tolist()) == ([1, 0, 0], [0.5, 1.0, 1.0])
    assert batch.per_token["logprobs"].tolist() == [-1, -2, -3, -4, -5, -6]
    assert (batch.response_lengths.tolist(), batch.start.tolist()) == ([3, 1, 2], [0, 3, 4])
    assert batch.sample_lengths == [5, 2, 5]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert batch.spread(torch.tensor([0.5, 2.0, 3.0])).tolist() == [0.5, 0.5, 0.5, 2.0, 3.0, 3.0]
    samples[0].logprobs = None
    assert ppo.make_batch(samples, CPU, config()).per_token == {}


def test_a_sample_of_another_temperature_is_no_silent_error(process_group):
    """The losses take all log-probs at --temperature."""
    samples = [draw([5], [1, 2], temperature=x) for x in (2.0, 0.5)]
    with pytest.raises(AssertionError, match="--temperature 2.0, and samples have"):
        ppo.make_batch(samples, CPU, config(temperature=2.0))


def test_one_reward_is_not_spread_over_all_samples(process_group):
    with pytest.raises(AssertionError, match="one reward for each sample"):
        ppo.make_batch([draw([5], [1, 2])] * 2, CPU, config(), rewards=[1.0])


# ---- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_get_equal_shares_and_rows_are_full(world):
    """Long samples that are dealt in turn leave ranks waiting. Chance would make runs differ."""
    rng = random.Random(world)
    sizes = [min(8192, 200 + int(rng.lognormvariate(6.5, 1.2))) for _ in range(40 * world)]
    samples = rng.sample(range(40 * world), 32 * world)
    dealt = ppo.deal(sizes, samples, world)
    assert dealt == ppo.deal(sizes, samples[::-1], world), "the order of the list decides"
    loads = [sum(sizes[i] for i in part) for part in dealt]
    assert max(loads) - min(loads) <= 0.02 * max(loads), "the fullest rank and the emptiest"
    for part in dealt:
        rows = ppo.pack(sizes, part, 8192)
        assert sorted(sum(rows, [])) == sorted(part)
        assert len(rows) <= 1.5 * sum(sizes[i] for i in part) / 8192 + 1


def micro_batches_of_all_ranks(monkeypatch, batch, samples, cfg, world: int) -> list[list]:
    """ppo.py may ask for the world and the rank, and for no collective."""
    monkeypatch.setattr(ppo, "dist", mock.Mock(spec=["get_world_size", "get_rank"]))
    ppo.dist.get_world_size.return_value = world
    ranks = []
    for rank in range(world):
        ppo.dist.get_rank.return_value = rank
        micros = list(ppo.micro_batches(batch, samples, cfg))
        is_last = [last for _, last in micros]
        assert is_last == [k == len(micros) - 1 for k in range(len(micros))]
        ranks.append([micro for micro, _ in micros])
    return ranks


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("packing", ["packed", "alone"])
def test_every_response_token_is_predicted_exactly_once(packing, seed, monkeypatch):
    """Over all ranks and micro-batches, stop tokens included, prompts and replies not. ORZ lost
    some samples and trained others twice. With --packing alone a row has one sample."""
    rng = random.Random(seed)
    world = rng.randint(1, 5)
    row_len = rng.randint(8, 80)
    rows = rng.randint(1, 4)
    # All tokens are different. Those of a sample count up.
    fresh = itertools.count(1)
    prompts = []
    responses = []
    for _ in range(rng.randint(1, 60)):
        prompt_len = rng.randint(1, row_len - 1)
        prompts.append(list(itertools.islice(fresh, prompt_len)))
        responses.append(list(itertools.islice(fresh, rng.randint(1, row_len - prompt_len))))
    # Half of the seeds have replies.
    drawn = [with_replies(rng, len(ids)) if seed % 2 else [True] * len(ids) for ids in responses]
    batch = batch_of_lists(prompts, responses, drawn=drawn)
    flat_ids = [
        id for ids, flags in zip(responses, drawn) for id, is_drawn in zip(ids, flags) if is_drawn
    ]
    samples = sorted(rng.sample(batch.all_indices(), rng.randint(1, len(prompts))))
    cfg = config(packing=packing, packing_max_len=row_len, micro_train_batch_size=rows)
    ranks = micro_batches_of_all_ranks(monkeypatch, batch, samples, cfg, world)

    assert len(set(map(len, ranks))) == 1, "ranks would wait for each other in ZeRO's collectives"
    assert any(micros[-1].real.any() for micros in ranks), "a filler on every rank"
    seen = []
    for micro in sum(ranks, []):
        ids, positions = micro.input_ids, micro.position_ids
        assert ids.numel() <= rows * row_len
        if not micro.real.any():
            assert len(micro.real) == 1, "a filler has one token"
            continue
        # Behind the first token of a sample its tokens and their positions count up.
        starts = (positions == 0) & (ids > 0)
        assert set(ids[starts].tolist()) <= {ids[0] for ids in prompts}
        is_inside = (positions > 0) & (ids > 0)
        for numbers in (ids, positions):
            assert ((numbers - numbers.roll(1, dims=1))[is_inside] == 1).all()
        assert packing == "packed" or (starts.sum(1) == 1).all()
        assert torch.equal(micro.token_ids, micro.select(ids) + 1)
        assert torch.equal(micro.token_ids, torch.tensor(flat_ids)[micro.flat_index])
        seen += micro.flat_index.tolist()
    assert sorted(seen) == tokens_of(batch, samples)
    # Without samples no rank runs a filler for nothing.
    assert not any(micro_batches_of_all_ranks(monkeypatch, batch, [], cfg, world))


def tokens_of(batch: ppo.Batch, samples) -> list[int]:
    tokens = []
    for i in samples:
        tokens += range(int(batch.start[i]), int(batch.start[i] + batch.response_lengths[i]))
    return tokens


# ---- advantages ----------------------------------------------------------------------------------


def estimate(name: str, batch, **settings) -> list[list[float]]:
    """The estimator's advantages, which are the naive ones, as a list for each sample."""
    cfg = config(estimator=name, **settings)
    found = cfg.raw_advantages(batch)
    expected = naive.raw_advantages(batch, cfg, cfg.lambd)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    return naive.per_sample(batch, found)


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_is_the_double_sum(gamma, lambd):
    """A sampler may stop at once: then the first token is the last one."""
    short = batch_of_lists([[1], [1]], [[5], [6]], [0, 1], [1.0, 0.75])
    short.per_token["values"] = torch.tensor([0.25, -0.5])
    for batch in (make_batch(), short):
        assert np.any(sum(estimate("gae", batch, gamma=gamma, lambd=lambd), []))


@pytest.mark.parametrize("estimator", sorted(naive.COMPARES))
def test_group_estimators_equal_loops(estimator):
    """Groups have any size and order. The std is the population's. ORZ never divided by it."""
    for seed in range(3):
        batch = make_batch()
        rng = random.Random(seed)
        rewards = [rng.choice([0.0, 0.0, 1.0, 0.1, rng.random()]) for _ in batch.sample_lengths]
        batch.rewards = torch.tensor(rewards, dtype=torch.float64)
        batch.groups = batch.groups[rng.sample(batch.all_indices(), len(rewards))]
        assert np.any(sum(estimate(estimator, batch), []))


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 12345.678])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", "reinforce_pp"])
def test_equal_rewards_have_advantages_of_exactly_zero(estimator, reward):
    """Rounding makes the mean of seven 0.1 differ from 0.1. Divided by a std that is rounding too,
    this would be 1. ORZ's whitening moved flat groups off zero."""
    variant = estimator if estimator == "reinforce_pp" else None
    cfg = config(variant=variant, estimator=estimator)
    for size in (1, 2, 7, 49):
        # reinforce compares all samples of the batch.
        others = 3 if naive.COMPARES.get(estimator) else 0
        groups = [5] * size + [1] * others
        rewards = [reward] * size + [0.0, 0.0, 1.0][:others]
        batch = batch_of_lists([[1]] * len(groups), [[1, 2]] * len(groups), groups, rewards)
        stats = ppo.compute_advantages(batch, cfg)
        assert "explained_variance" not in stats and all(map(math.isfinite, stats.values()))
        found = batch.per_token["advantages"]
        assert not found[: 2 * size].any() and found[2 * size :].all()


def test_whitening_of_equal_rewards_does_not_divide_by_zero():
    batch = batch_of_lists([[1]] * 9, [[1, 2]] * 9, [0] * 9, [0.1] * 9)
    batch.per_token["values"] = torch.zeros(18)
    stats = ppo.compute_advantages(batch, config(estimator="gae"))
    assert all(map(math.isfinite, stats.values()))
    assert batch.per_token["advantages"].abs().max() < 1e-6


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce"])
def test_a_reward_of_nan_is_not_taken_for_a_flat_group(estimator):
    """Its advantages are NaN, so the update raises."""
    batch = batch_of_lists([[1]] * 4, [[1, 2]] * 4, [0, 0, 1, 1], [1, float("nan"), 0, 1])
    batch.per_token["values"] = torch.zeros(8)
    ppo.compute_advantages(batch, config(estimator=estimator))
    assert batch.per_token["advantages"][:4].isnan().any()


def test_an_estimator_may_change_its_rewards_in_place():
    """Once, the logged `paid` was the changed one."""
    cfg = config(estimator="grpo")
    cfg.estimators = {"grpo": ppo.Estimator(lambda rewards, *_: rewards.sub_(0.5))}
    batch = batch_of_lists([[1]], [[2, 3]], [0], [1.0])
    ppo.compute_advantages(batch, cfg)
    assert batch.per_token["advantages"].tolist() == [0.5, 0.5] and batch.rewards.tolist() == [1]


@pytest.mark.parametrize("shape", ["(S, N)", "(1, S)", "()", "(N, 1)"])
def test_an_estimator_returns_one_number_a_sample_or_a_token(shape):
    """A transposed result was scrambled silently once."""
    cfg = config(estimator="grpo")
    batch = batch_of_lists([[1], [1]], [[2, 3, 4], [5]], [0, 1], [1, 1])
    scores = torch.ones(2, 3).double()
    wrong = {"(S, N)": scores.T, "(1, S)": scores[:1], "()": scores.sum(), "(N, 1)": scores[:, :1]}
    results = {"wrong": wrong[shape], "tokens": scores, "samples": scores[:, 0]}
    for name, result in results.items():
        cfg.estimators = {"grpo": ppo.Estimator(lambda *_, result=result: result)}
        if name == "wrong":
            with pytest.raises(AssertionError, match=r"--estimator grpo must return \(N,\) or"):
                ppo.compute_advantages(batch, cfg)
        else:
            ppo.compute_advantages(batch, cfg)
            assert batch.per_token["advantages"].tolist() == [1, 1, 1, 1]


CASES = [*itertools.product(["gae", *naive.COMPARES], [{}, SEQUENCE, CONSTANT])]


TURNS = [(name, GAMMA | {"batch": "turns"}) for name in ("gae", "grpo", "reinforce")]


@pytest.mark.parametrize("estimator, settings", [*CASES, ("gae", {"lambd": 0.5}), *TURNS])
def test_advantages_and_returns_equal_the_naive_ones(estimator, settings):
    """Some estimators are whitened, over all response tokens, with the population's std. The log
    and the critic's targets do not depend on the variant loss_mean. In responses with replies GAE
    goes from drawn token to drawn token."""
    settings = settings.copy()
    batch = make_batch(settings.pop("batch", "ragged"))
    cfg = config(estimator=estimator, **settings)
    cfg.token_passes(None, None, batch, 0)
    stats = ppo.compute_advantages(batch, cfg)
    if settings.get("variant"):
        batch.per_token["advantages"] *= batch.per_token["loss_weights"]
    advantages, returns = naive.advantages(batch, cfg)
    weights = torch.ones_like(advantages, requires_grad=True)
    naive.mean_loss(weights, batch, cfg).backward()
    weighted = advantages * weights.grad * len(advantages)
    for name, expected in (("advantages", weighted), ("returns", returns)):
        got = batch.per_token[name].double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    unexplained = (returns - batch.per_token["values"]).var(correction=0)
    expected = {"advantage": advantages.mean(), "advantage_abs": advantages.abs().mean()}
    expected |= {"return": returns.mean()}
    expected |= {"explained_variance": 1 - unexplained / returns.var(correction=0)}
    numbers = {name: number.item() for name, number in expected.items()}
    assert stats == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_the_numbers_of_the_log_are_those_of_the_samples_that_count():
    """Once, overlong_drop's log had an advantage of -7.2, where that of the others was 0."""
    batch = make_batch()
    finished = [i % 3 > 0 for i in range(16)]
    batch.samples = [SimpleNamespace(finish_reason="stop" if x else "length") for x in finished]
    batch.rewards[[not x for x in finished]] = -50.0
    stats = ppo.compute_advantages(batch, config(variant="overlong_drop"))
    counted = [i for i in range(16) if finished[i]]
    tokens = tokens_of(batch, counted)
    advantages, returns, values = (
        batch.per_token[name].double()[tokens] for name in ("advantages", "returns", "values")
    )
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
    expected = {"advantage": 0, "advantage_abs": advantages.abs().mean().item()}
    expected |= {"return": returns.mean().item(), "explained_variance": 1 - unexplained.item()}
    assert stats == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- passes, losses and updates: one update against its naive gradient ---------------------------


def new_head(cfg) -> torch.Tensor:
    """(1, H): what every critic starts with, on every rank."""
    return torch.randn((1, 64), generator=torch.Generator().manual_seed(cfg.seed)) / 65


@functools.cache
def naive_step(folder, batch_kind, estimator, lambd, gamma, loss_mean) -> dict[str, dict]:
    """Gradients of policy and critic. They do not depend on any knob of memory or speed."""
    batch = make_batch(batch_kind)
    cfg = config(estimator=estimator, lambd=lambd, gamma=gamma)
    cfg.loss_mean = loss_mean
    policy = naive.policy_gradient(naive.load(folder), batch, cfg)
    body = naive.load(folder, AutoModel)
    _, returns = naive.advantages(batch, cfg)
    old = batch.per_token["values"]
    head = new_head(cfg).double()
    critic = naive.critic_gradient(body, head, batch, old, returns, cfg.value_clip)
    return {"policy": policy, "critic": critic}


def norm_of(tensors: dict) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).norm().item()


def subtract(one: dict, two: dict) -> dict:
    return {name: one[name].double() - two[name].double() for name in one}


def moved_by(gradient: dict, before: dict, after: dict, lr: float, tolerance=1e-5) -> None:
    """The SGD update from `before` to `after` used this gradient: as a whole to the tolerance, and
    each tensor to 1e-4, because the weights of norms are near 1 and are rounded most."""
    whole = norm_of(gradient)
    errors = subtract(gradient, {name: x / lr for name, x in subtract(before, after).items()})
    for name, expected in gradient.items():
        limit = 1e-4 * (expected.norm() + 0.01 * whole)
        assert errors[name].norm() <= limit, f"{name}: {errors[name].norm()}"
    assert norm_of(errors) <= tolerance * whole


def check_step(result: dict, job: dict, models: dict) -> None:
    """A cell's critic and policy start as the base model and a new head, whole and under Hugging
    Face's names. They move by the naive gradients, and their passes give the naive numbers. With
    checkpoints layers run again in backward; in eval mode Hugging Face would ignore the flag."""
    cfg = config(**job["settings"])
    folder = models[job["tied"]]
    batch_kind = job["spec"]["batch"]
    starts = {"policy": naive.load(folder).state_dict()}
    starts["critic"] = naive.load(folder, AutoModel).state_dict()
    starts["critic"]["value_head.weight"] = new_head(cfg)
    stats = result["stats"]
    expected = {}
    lr = LR / cfg.warmup_updates
    tolerance = 1e-6 if batch_kind == "turns" else 1e-5
    learnt = (cfg.estimator, cfg.lambd, cfg.gamma, getattr(cfg, "loss_mean", "token"))
    for learner, gradient in naive_step(folder, batch_kind, *learnt).items():
        start = result[f"{learner}_start"]
        assert start.keys() == starts[learner].keys()
        assert not norm_of(subtract(start, starts[learner]))
        norm = norm_of(gradient)
        clip = min(1.0, cfg.max_norm / norm)
        clipped = {key: x * clip for key, x in gradient.items()}
        moved_by(clipped, start, result[learner], lr, tolerance)
        expected |= {f"{learner}_grad_norm": norm, f"{learner}_lr": lr}
    if job["tied"]:
        # vLLM on a CPU keeps the old head if it is not named.
        policy = result["policy"]
        assert torch.equal(policy["lm_head.weight"], policy["model.embed_tokens.weight"])
    calls = stats["policy_micro_batches"] + stats["critic_micro_batches"]
    assert result["calls"] == calls * (2 if cfg.gradient_checkpointing else 1)

    batch = make_batch(batch_kind)
    logprobs, entropy = naive.logprobs(naive.load(folder), batch, cfg.temperature)
    values = naive.values(naive.load(folder, AutoModel), new_head(cfg).double(), batch)
    torch.testing.assert_close(result["logprobs"].double(), logprobs, rtol=0, atol=3e-5)
    torch.testing.assert_close(result["values"].double(), values, rtol=0, atol=tolerance)
    advantages, returns = naive.advantages(batch, cfg)
    old = batch.per_token["values"].double()
    losses = naive.clipped_value_loss(values, old, returns, cfg.value_clip)
    passed = (advantages != 0) | (not cfg.skip_flat)
    learnt_from = naive.per_sample(batch, passed)
    lengths = [n for n, part in zip(batch.sample_lengths, learnt_from) if any(part)]
    expected |= {"policy_tokens": sum(lengths), "critic_tokens": sum(batch.sample_lengths)}
    expected["policy_loss"] = naive.mean_loss(-advantages * logprobs, batch, cfg).item()
    expected["entropy"] = entropy[passed].mean().item()
    expected |= {"critic_loss": losses.mean().item(), "critic_values": values.mean().item()}
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name in ("policy_loss", "critic_loss"):
        assert stats[name] == pytest.approx(expected[name], rel=1e-4, abs=tolerance)


def each(cells: list[dict]):
    return pytest.mark.parametrize("job", cells, ids=itemgetter("name"))


@each(ONE)
def test_step_on_one_rank(job, results, models):
    """The policy's update is that of naive clipped PPO at ratio 1, the critic's that of the naive
    value loss, to 1e-5. ORZ took means of means and duplicated packs."""
    check_step(results(1, job["name"]), job, models)


@each(TWO)
def test_step_on_two_ranks(job, results, models):
    """The numbers are the same, also when one rank has no sample, and when flat groups are skipped
    but counted in the denominator."""
    check_step(results(2, job["name"]), job, models)


@pytest.mark.parametrize("ranks", [1, 2])
def test_textbook_ppo_makes_the_updates_of_naive_clipped_ppo(ranks, results, models):
    """At ratios unlike 1: in the last update more than a fifth of the tokens is beyond a clip."""
    result = results(ranks, "textbook")
    cfg = config(**TEXTBOOK["settings"])
    model = naive.load(models[True])
    batch = make_batch()
    advantages, _ = naive.advantages(batch, cfg)
    old = naive.logprobs(model, batch, cfg.temperature)[0].detach()  # (T,)
    owner = batch.spread(torch.arange(16))  # (T,)
    shuffled = np.random.default_rng(hash64(cfg.seed, 0, "policy")).permutation(16)
    sgd = torch.optim.SGD(model.parameters(), lr=3.0)
    for part in np.array_split(shuffled, 3):
        mine = torch.isin(owner, torch.tensor(part))
        current, _ = naive.logprobs(model, batch, cfg.temperature)
        sgd.zero_grad()
        naive.clipped_ppo(current, old, advantages)[mine].mean().backward()
        sgd.step()
        ratio = (current - old).exp()[mine]
    assert (ratio < 0.8).double().mean() > 0.2 and (ratio > 1.2).double().mean() > 0.2
    change = subtract(model.state_dict(), result["policy_start"])
    assert norm_of(subtract(model.state_dict(), result["policy"])) < 1e-4 * norm_of(change)


@pytest.mark.parametrize("ranks", [1, 2])
@each(TAUGHT)
def test_distill_makes_the_update_of_a_loop_over_samples(job, ranks, results, models):
    """The teacher's log-probs are those of the ids that it shares with the policy, at the sampling
    temperature. An id that it lacks is its last one. Advantages are of single tokens."""
    result = results(ranks, job["name"])
    cfg = config(**job["settings"])
    batch = make_taught_batch()
    teacher = naive.load(models[job["spec"]["teacher"]])
    last_id = min(64, teacher.config.vocab_size) - 1
    known = [[min(id, last_id) for id in ids] for ids in batch.response_ids]

    def shared(ids):
        return SimpleNamespace(logits=teacher(ids).logits[..., : last_id + 1])

    with torch.no_grad():
        read = dataclasses.replace(batch, response_ids=known)
        of_teacher, _ = naive.logprobs(shared, read, cfg.temperature)
    model = naive.load(models[job["tied"]])
    of_policy, _ = naive.logprobs(model, batch, cfg.temperature)
    log_ratio = of_teacher - of_policy.detach()
    estimated, _ = naive.advantages(batch, cfg)
    advantages = 0.75 * log_ratio + 0.25 * estimated
    tokens = {name: numbers.double() for name, numbers in result["tokens"].items()}
    torch.testing.assert_close(tokens["teacher_logprobs"], of_teacher, rtol=0, atol=3e-5)
    torch.testing.assert_close(tokens["advantages"], advantages, rtol=0, atol=3e-5)
    k3 = log_ratio.exp() - 1 - log_ratio
    expected = {"teacher_k1": -log_ratio.mean().item(), "teacher_k3": k3.mean().item()}
    assert result["line"] == pytest.approx(expected, rel=1e-4)
    assert result["stats"]["policy_tokens"] == sum(batch.sample_lengths), "no sample is skipped"
    naive.clipped_ppo(of_policy, of_policy.detach(), advantages).mean().backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    moved_by(gradient, result["start"], result["after"], LR)


def test_logged_numbers_are_means_over_the_tokens_passed(results, models):
    """log_ratio's sampler is 0.01 off and log_kl's reference 0.02. The ratio is e^0.01, not that
    times the share of tokens that are not skipped; the entropy likewise."""
    stats = results(2, "logging")
    batch = make_batch("half flat")
    cfg = config(**LOGS)
    passed = naive.advantages(batch, cfg)[0] != 0
    assert 0.2 < passed.double().mean() < 0.8
    _, entropy = naive.logprobs(naive.load(models[True]), batch, cfg.temperature)
    expected = {"ratio": math.exp(0.01), "clipfrac": 0}
    expected |= {"approx_kl": math.exp(0.01) - 1.01, "kl": math.exp(-0.02) - 0.98}
    expected["entropy"] = entropy[passed].mean().item()
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=5e-7)


def test_memory_does_not_grow_with_vocabulary_times_tokens(results):
    """Full logits of 640 tokens at V = 151,936 are 0.4 GB; ORZ holds four of them. Above
    2^26 scores backward makes them again. A token's gradient stays, since all are copies of 16."""
    result = results(2, "memory")
    start, small, large = result["peaks"]
    assert large - small < 0.1 * result["logits"]
    assert large - start < 0.7 * result["logits"]
    expected, kept, again = result["gradients"]
    for gradient in (kept, again):
        assert (gradient - expected).norm() < 1e-5 * expected.norm()


# ---- train_critic --------------------------------------------------------------------------------


def part_of(batch: ppo.Batch, samples) -> ppo.Batch:
    """Some samples as a batch of their own."""
    prompts = [batch.prompt_ids[i] for i in samples]
    responses = [batch.response_ids[i] for i in samples]
    return batch_of_lists(prompts, responses)


@pytest.mark.parametrize("updates", [12, 4])
def test_critic_updates_use_each_token_once(updates, results, models):
    """The updates equal naive ones in a row, each divided by its own tokens. ORZ dropped the packs
    left over by 12 and trained padding packs twice."""
    result = results(2, f"{updates} parts")
    batch = make_batch()
    cfg = config()
    rng = np.random.default_rng(hash64(cfg.seed, 7, "critic"))
    body = naive.load(models[True], AutoModel)
    head = new_head(cfg).double()
    _, returns = naive.advantages(batch, cfg)
    old = batch.per_token["values"]
    for part in np.array_split(rng.permutation(16), updates):
        tokens = tokens_of(batch, part)
        some = part_of(batch, part)
        gradient = naive.critic_gradient(body, head, some, old[tokens], returns[tokens], 0.2)
        with torch.no_grad():
            for name, p in body.named_parameters():
                p -= 0.02 * gradient[name]
            head = head - 0.02 * gradient["value_head.weight"]
    expected = dict(body.named_parameters()) | {"value_head.weight": head}
    moves = subtract(expected, result["critic_start"])
    assert norm_of(subtract(expected, result["critic"])) < 1e-4 * norm_of(moves)


# ---- train_policy --------------------------------------------------------------------------------


def test_an_all_flat_step_makes_no_update_if_it_is_skipped(results):
    """Without --skip_flat the gradient is 0, and Adam's momentum moves the weights."""
    skipped, passed = results(2, "flat, skipped"), results(2, "flat")
    names = ("policy_micro_batches", "policy_grad_norm", "policy_tokens")
    assert [skipped["stats"][name] for name in names] == [0, 0, 0]
    assert passed["stats"]["policy_grad_norm"] == 0 and passed["stats"]["policy_tokens"] > 0
    for result, is_moved in ((skipped, False), (passed, True)):
        assert norm_of(subtract(result["before"], result["start"])), "the first step did nothing"
        assert bool(norm_of(subtract(result["before"], result["after"]))) == is_moved


@pytest.mark.parametrize("name", ["none", "none with critic"])
def test_a_step_in_which_no_sample_counts_makes_no_update(name, results):
    """With overlong_drop all samples may be truncated. An empty list does not mean all samples."""
    result = results(2, name)
    learners = ["policy", "critic"] if "critic" in name else ["policy"]
    for learner in learners:
        names = (f"{learner}_micro_batches", f"{learner}_grad_norm", f"{learner}_tokens")
        assert [result["stats"][name] for name in names] == [0, 0, 0]
        assert not norm_of(subtract(result[f"{learner}_start"], result[learner]))
    assert all(map(math.isfinite, result["stats"].values()))


def test_a_loss_or_a_logged_number_of_another_shape_is_refused(process_group):
    """A loss (M, 1) would become (M, M) silently."""
    batch = batch_of_lists([[1]], [[2, 3]])
    learner = SimpleNamespace(name="policy")
    ones = torch.ones(2)
    for losses, logged in ((ones[:, None], ones), (ones.sum(), ones), (ones, ones[:, None])):

        def losses_of(learner, batch, micro, cfg, stats, losses=losses, logged=logged):
            stats["x"] = logged
            return losses

        with pytest.raises(AssertionError, match="must be .M,., one number a token"):
            ppo.update(learner, losses_of, batch, [0], 1e-3, config())


@pytest.mark.parametrize("samples, parts", [(16, 3), (2, 2)])
def test_learners_get_the_rates_of_the_schedule(samples, parts, monkeypatch):
    """The first update uses lr / n. ORZ's uses 0, so it changes nothing. Fewer samples than critic
    updates do not slow the critic's warm-up down."""
    batch = part_of(make_batch("equal sizes"), range(samples))
    batch.per_token["values"] = torch.zeros(int(batch.response_lengths.sum()))
    batch.rewards = torch.arange(samples, dtype=torch.float64)
    settings = {"critic_updates": 3, "warmup_updates": 4}
    cfg = config(actor_learning_rate=1.0, critic_learning_rate=12.0, **settings)
    ppo.compute_advantages(batch, cfg)
    used = {"policy": [], "critic": []}

    def update(learner, loss, batch, indices, lr, *rest):
        used[learner.name].append(lr)
        return {f"{learner.name}_lr": lr}

    monkeypatch.setattr(ppo, "update", update)
    policy, critic = (SimpleNamespace(name=name) for name in used)
    expected = []
    for step in range(6):
        rates = [min(12, 3 * (3 * step + k + 1)) for k in range(parts)]
        expected += rates
        logged = cfg.train_critic(critic, batch, step)
        assert logged["critic_lr"] == pytest.approx(np.mean(rates))
        cfg.train_policy(policy, batch, step, total_steps=6)
    assert used["policy"] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert used["critic"] == pytest.approx(expected)


# ---- update --------------------------------------------------------------------------------------


@each(NONFINITE)
def test_nan_or_inf_stops_all_ranks_with_unchanged_weights(job, results):
    """ZeRO 0 would apply a NaN, ZeRO 1 to 3 skip the update silently, and a rank that goes on alone
    hangs the others. The fault is in one micro-batch of one rank."""
    for raised, is_unchanged in results(2, job["name"])["ranks"]:
        assert "not finite" in raised and is_unchanged


# ---- nanoorz/models.py: bf16 and AdamW -----------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_summed_and_communicated_in_fp32(stage, results):
    """8 copies of a sample in 8 micro-batches have the gradient of one sample, two ranks that of
    one rank. In bf16, DeepSpeed's default, 65 micro-batches had 8/9 of the right norm."""
    alone = results(1, f"bf16 zero{stage}")
    shared = results(2, f"bf16 zero{stage}")
    pairs = ((alone["copies"], alone["one"]), (shared["others"], alone["others"]))
    assert [stats["policy_micro_batches"] for pair in pairs for stats in pair] == [8, 1, 4, 8]
    for found, expected in pairs:
        error = (found["gradient"] - expected["gradient"]).norm()
        assert error < 1e-5 * expected["gradient"].norm()
        assert found["policy_grad_norm"] == pytest.approx(expected["policy_grad_norm"], rel=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_offload_updates_equal_those_without(precision, results):
    """Masters and moments live on the CPU, and AdamW does the same there. It has ORZ's numbers, and
    the rate of the second of four updates of warm-up."""
    plain = results(2, f"{precision} none")
    offloaded = results(2, f"{precision} optimizer")
    assert (plain["offloaded"], offloaded["offloaded"]) == (False, True)
    assert plain["numbers"] == {"betas": (0.9, 0.95), "weight_decay": 0, "lr": 2e-3}
    moves = subtract(plain["policy"], plain["start"])
    assert all(move.any() for move in moves.values())
    errors = subtract(plain["policy"], offloaded["policy"])
    assert norm_of(errors) <= 1e-5 * norm_of(moves)
    for got, expected in zip(offloaded["stats"], plain["stats"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
