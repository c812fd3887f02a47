"""ppo.py against the slow and obvious way (naive.py), in the order of its functions.

What needs engines runs in ppo_worker.py on real DeepSpeed: one launch of one rank, one of two, many
cells each (cells.py). Alone: `pytest tests/test_ppo.py`; the wide matrix: `pytest -m long`.
"""

import functools
import itertools
import math
import random
from types import SimpleNamespace

import naive
import numpy as np
import pytest
import torch
from cells import cell, find, launch, make_models
from ppo_worker import CPU, LR, batch_of_lists, config, make_batch
from torch.overrides import TorchFunctionMode
from transformers import AutoModel

import ppo
from lib.common import hash64


def step(name: str, batch: str = "ragged", **settings) -> dict:
    return cell(name, "step", spec={"batch": batch}, **settings)


def nonfinite(name: str, how: str, model: str, **settings) -> dict:
    return cell(name, "nonfinite", spec={"how": how, "model": model}, **settings)


SHORT_ROWS = {"packing_max_len": 48, "micro_train_batch_size": 1}
ONE = [  # ranks: 1
    step("zero0", tied=False),
    step("zero1", zero_stage=1),
    step("zero2", zero_stage=2, tied=False),
    step("zero3", zero_stage=3),
    step("short rows, one by one", **SHORT_ROWS),
    step("long rows", packing_max_len=300, micro_train_batch_size=1),
    step("one micro-batch", packing_max_len=64, micro_train_batch_size=99, tied=False),
    step("checkpointing", gradient_checkpointing=True),
    step("clipped", max_norm=0.1),
    step("offload, zero2", zero_stage=2, offload="optimizer"),
    step("grpo", batch="half flat", estimator="grpo"),
    step("sequence", loss_mean="sequence"),
    step("sequence, grpo", batch="half flat", estimator="grpo", loss_mean="sequence", **SHORT_ROWS),
    step("constant", loss_mean="constant", packing_max_len=300),
    step("critic's own lambda", lambd=0.5, critic_lambd=0.9),
]
TWO = [  # ranks: 2
    step("zero0"),
    step("zero1", zero_stage=1, tied=False),
    step("zero2", zero_stage=2),
    step("zero3", zero_stage=3, tied=False),
    step("zero3, long rows", zero_stage=3, packing_max_len=200, micro_train_batch_size=3),
    step("zero1, short rows", zero_stage=1, **SHORT_ROWS),
    step("zero3, checkpointing", zero_stage=3, gradient_checkpointing=True, tied=False),
    step("zero3, small parameters whole", zero_stage=3, whole=True),
    step("zero3, clipped", zero_stage=3, max_norm=0.1),
    step("zero1, offload", zero_stage=1, offload="optimizer"),
    step("zero2, offload", zero_stage=2, offload="optimizer", **SHORT_ROWS),
    step("zero3, offload", zero_stage=3, offload="optimizer", tied=False),
    step("idle rank, zero0", batch="one"),
    step("idle rank, zero1", batch="one", zero_stage=1, tied=False),
    step("idle rank, zero2", batch="one", zero_stage=2),
    step("idle rank, zero3", batch="one", zero_stage=3, tied=False),
    step("grpo, zero0", batch="half flat", estimator="grpo"),
    step("grpo, zero3", batch="half flat", estimator="grpo", zero_stage=3),
    step("sequence, zero1, short rows", zero_stage=1, loss_mean="sequence", **SHORT_ROWS),
    step("sequence, grpo", batch="half flat", estimator="grpo", loss_mean="sequence"),
    step("sequence, idle rank", batch="one", loss_mean="sequence"),
    step("constant, zero3", zero_stage=3, loss_mean="constant"),
    nonfinite("nan, zero0", "nan", "policy"),
    nonfinite("nan, zero1", "nan", "critic", zero_stage=1),
    nonfinite("nan, zero2", "nan", "policy", zero_stage=2),
    nonfinite("nan, zero3", "nan", "critic", zero_stage=3),
    nonfinite("nan ratio", "ratio", "policy", zero_stage=1),
    nonfinite("inf, zero0", "inf", "critic"),
    nonfinite("inf, zero1", "inf", "policy", zero_stage=1),
    nonfinite("inf, zero2", "inf", "critic", zero_stage=2),
    nonfinite("inf, zero3", "inf", "policy", zero_stage=3),
    nonfinite("inf, zero3, offload", "inf", "policy", zero_stage=3, offload="optimizer"),
    nonfinite("nan, bf16 zero2", "nan", "policy", zero_stage=2, bf16=True),
    nonfinite("inf, bf16 zero2", "inf", "policy", zero_stage=2, bf16=True),
    nonfinite("inf, bf16 zero3", "inf", "policy", zero_stage=3, bf16=True),
    cell("flat, zero0", "flat", estimator="grpo", actor_learning_rate=1e-3),
    cell("flat, zero3", "flat", estimator="grpo", actor_learning_rate=1e-3, zero_stage=3),
    cell("logging", "logging", estimator="grpo", zero_stage=3),
]
SPLIT_STEP = 7  # of training: another shuffle each time
for zero_stage in (1, 3):
    steps = {"critic_updates": 12, "critic_learning_rate": 0.02, "zero_stage": zero_stage}
    TWO.append(cell(f"splits, zero{zero_stage}", "splits", spec={"step": SPLIT_STEP}, **steps))

WIDE = []
for stage, (row, rows), checkpointing, tied in itertools.product(
    (0, 1, 2, 3, "3 whole"), ((48, 1), (64, 3), (130, 1), (700, 1)), (False, True), (True, False)
):
    settings = {
        "zero_stage": int(str(stage)[0]),
        "whole": stage == "3 whole",
        "packing_max_len": row,
        "micro_train_batch_size": rows,
        "gradient_checkpointing": checkpointing,
        "tied": tied,
        "batch": "ragged" if tied else "one",
    }
    WIDE.append(step(f"zero{stage} rows {row} x {rows} {checkpointing} {tied}", **settings))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """results(ranks)(name): a cell's result; launched when the first one is wanted."""
    root = tmp_path_factory.mktemp("cells")
    cells = {1: ONE, 2: TWO}
    return functools.cache(lambda ranks: launch(ranks, cells[ranks], root / str(ranks), models))


@pytest.fixture(scope="module")
def wide(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("wide")
    return functools.cache(lambda ranks: launch(ranks, WIDE, root / str(ranks), models))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- Batch ---------------------------------------------------------------------------------------


def make_sample(prompt: list, response: list, group: int, reward: float, logprobs=None):
    problem = SimpleNamespace(prompt_ids=prompt)
    request = SimpleNamespace(problem=problem, group=group)
    return SimpleNamespace(request=request, response_ids=response, reward=reward, logprobs=logprobs)


def test_a_batch_holds_what_the_sampler_drew(process_group):
    """Its mask comes from the lengths, never from a padding id: id 0 is an answer's token here."""
    samples = [
        make_sample([5, 6], [0, 0, 3], 1, 0.5, [-1.0, -2.0, -3.0]),
        make_sample([7], [0], 0, 1.0, [-4.0]),
    ]
    batch = ppo.make_batch(samples, CPU, config())
    assert batch.samples is samples
    assert batch.prompt_ids == [[5, 6], [7]]
    assert batch.response_ids == [[0, 0, 3], [0]]
    assert batch.groups.tolist() == [1, 0]
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert batch.per_token["logprobs"].tolist() == [-1, -2, -3, -4]
    assert batch.response_lengths.tolist() == [3, 1]
    assert batch.start.tolist() == [0, 3]
    assert batch.sample_lengths == [5, 2]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.spread(torch.tensor([0.5, 2.0])).tolist() == [0.5, 0.5, 0.5, 2.0]
    samples[0].logprobs = None
    assert ppo.make_batch(samples, CPU, config()).per_token == {}


def test_samples_to_learn_from():
    """One advantage that is not 0 is enough. None at all is an empty list, and not everyone."""
    batch = make_batch("half flat")
    cfg = config(estimator="grpo")
    ppo.compute_advantages(batch, cfg)
    expected = [i for i in batch.all_samples() if int(batch.groups[i]) not in (0, 4, 9)]
    assert ppo.samples_to_learn_from(batch, cfg) == expected
    assert 0 < len(expected) < 16
    batch.per_token["advantages"].zero_()
    assert ppo.samples_to_learn_from(batch, cfg) == []
    batch.per_token["advantages"][int(batch.start[3]) + 1] = -1e-9
    assert ppo.samples_to_learn_from(batch, cfg) == [3]


# ---- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8])
def test_deal_is_even_complete_and_deterministic(world):
    """Long-tailed samples dealt round robin left ranks waiting; dealt at random, runs differ."""
    for seed in range(10):
        rng = random.Random(seed)
        sizes = []
        for _ in range(32 * world + rng.randint(0, 9)):
            sizes.append(min(8192, 200 + int(rng.lognormvariate(6.5, 1.2))))
        samples = rng.sample(range(len(sizes)), 32 * world)
        dealt = ppo.deal(sizes, samples, world)
        assert len(dealt) == world
        assert sorted(sum(dealt, [])) == sorted(samples)
        loads = [sum(sizes[i] for i in part) for part in dealt]
        assert max(loads) - min(loads) <= 0.02 * max(loads), "the fullest rank and the emptiest"
        assert dealt == ppo.deal(sizes, samples[::-1], world), "the order of the list decides"
    assert sorted(map(len, ppo.deal([3, 1], [0, 1], 4))) == [0, 0, 1, 1]


def test_pack_fills_rows_and_loses_nothing():
    """Rows never exceed their length, and best-fit leaves few of them."""
    rng = random.Random(0)
    for _ in range(50):
        row_len = rng.randint(5, 200)
        sizes = [rng.randint(1, row_len) for _ in range(rng.randint(1, 100))]
        samples = rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))
        rows = ppo.pack(sizes, samples, row_len)
        assert sorted(sum(rows, [])) == sorted(samples)
        for row in rows:
            assert row
            assert sum(sizes[i] for i in row) <= row_len
        tokens = sum(sizes[i] for i in samples)
        large = sum(sizes[i] > row_len / 2 for i in samples)  # no two of them share a row
        assert len(rows) <= 1.5 * max(tokens / row_len, large) + 1


class FakeDist:
    """torch.distributed of one rank among `world`; a maximum over ranks is at least `most`."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, rank: int, world: int, most: int):
        self.rank = rank
        self.world = world
        self.most = most
        self.seen = 0

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.world

    def all_reduce(self, tensor, op):
        assert op == "max"
        self.seen = int(tensor)
        tensor.fill_(max(self.seen, self.most))


def micro_batches_of_all_ranks(monkeypatch, batch, samples, cfg, world: int) -> list[list]:
    most = 0
    # The first round finds the maximum over ranks, the second one uses it.
    for _ in range(2):
        ranks = []
        seen = []
        for rank in range(world):
            fake = FakeDist(rank, world, most)
            monkeypatch.setattr(ppo, "dist", fake)
            ranks.append(ppo.micro_batches(batch, samples, cfg))
            seen.append(fake.seen)
        most = max(seen)
    return ranks


def random_batch(rng: random.Random, count: int, longest: int) -> ppo.Batch:
    """Tokens are all different, so that a token in the wrong place cannot look right."""
    fresh = itertools.count(1)
    prompts = []
    responses = []
    for _ in range(count):
        prompt_len = rng.randint(1, longest - 1)
        response_len = rng.randint(1, longest - prompt_len)
        prompts.append(list(itertools.islice(fresh, prompt_len)))
        responses.append(list(itertools.islice(fresh, response_len)))
    return batch_of_lists(prompts, responses)


def predicted_tokens(micro: ppo.MicroBatch, batch: ppo.Batch) -> list[int]:
    """The index of each token that the micro-batch predicts. Fails unless each is predicted from
    exactly its own sample's tokens before it, at positions from 0."""
    flat = sum(batch.response_ids, [])
    sequences = {}  # by their first token
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        sequences[prompt[0]] = prompt + response
    places = micro.predict.nonzero().tolist()
    for (r, t), token, index in zip(places, micro.token_ids.tolist(), micro.flat_index.tolist()):
        assert flat[index] == token
        position = int(micro.position_ids[r, t])
        context = micro.input_ids[r, t - position : t + 1].tolist()
        assert sequences[context[0]][: position + 2] == [*context, token]
        positions = micro.position_ids[r, t - position : t + 1].tolist()
        assert positions == list(range(position + 1))
    return micro.flat_index.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_every_response_token_is_predicted_exactly_once(seed, monkeypatch):
    """Over all ranks and micro-batches: no sample lost or trained twice (ORZ did both); the stop
    token, last of a response, included; prompts not."""
    rng = random.Random(seed)
    world = rng.randint(1, 5)
    row_len = rng.randint(8, 80)
    rows = rng.randint(1, 4)
    batch = random_batch(rng, rng.randint(1, 60), row_len)
    samples = sorted(rng.sample(batch.all_samples(), rng.randint(1, len(batch.sample_lengths))))
    cfg = config(packing_max_len=row_len, micro_train_batch_size=rows)
    ranks = micro_batches_of_all_ranks(monkeypatch, batch, samples, cfg, world)

    counts = {len(micros) for micros in ranks}
    assert len(counts) == 1, "ranks would wait for each other in ZeRO's collectives"
    assert any(micros[-1].mask.any() for micros in ranks), "a filler on every rank"
    seen = []
    for micro in sum(ranks, []):
        assert micro.position_ids.shape == micro.predict.shape == micro.input_ids.shape
        assert micro.input_ids.shape[0] <= rows
        assert micro.input_ids.shape[1] <= row_len
        starts = (micro.position_ids.flatten() == 0).nonzero()[:, 0].tolist()
        assert micro.borders.tolist() == [*starts, micro.input_ids.numel()]
        assert micro.borders.dtype == torch.int32
        assert micro.longest == int(micro.borders.diff().max()) and type(micro.longest) is int
        tokens = int(micro.predict.sum())
        assert len(micro.token_ids) == len(micro.flat_index) == len(micro.mask) == tokens > 0
        if micro.mask.any():
            assert (micro.mask == 1).all()
            seen += predicted_tokens(micro, batch)
    expected = []
    for i in samples:
        expected += range(int(batch.start[i]), int(batch.start[i]) + len(batch.response_ids[i]))
    assert sorted(seen) == expected


def test_no_samples_are_no_micro_batch(monkeypatch):
    """All groups flat: no rank runs a filler for nothing."""
    assert micro_batches_of_all_ranks(monkeypatch, make_batch(), [], config(), 3) == [[], [], []]


# ---- advantages ----------------------------------------------------------------------------------


def estimate(name: str, batch, **settings) -> list[list[float]]:
    """The shipped estimator on a batch, as a list for each sample."""
    values = torch.zeros(batch.mask.shape, dtype=torch.float64)
    values[batch.mask] = batch.per_token["values"].double()
    cfg = config(estimator=name, **settings)
    inputs = (batch.rewards, values, batch.mask, batch.groups, cfg)
    advantages = ppo.ESTIMATORS[name].function(*inputs)
    if name != "gae":
        assert advantages.shape == batch.rewards.shape
        advantages = advantages[:, None].expand_as(values)
    return naive.per_sample(batch, advantages[batch.mask])


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_is_the_double_sum(gamma, lambd):
    """The recursion could be off by one, put the reward on the wrong token, or read values of the
    padding."""
    batch = make_batch()
    values = naive.per_sample(batch, batch.per_token["values"].double())
    expected = naive.gae(batch.rewards.tolist(), values, gamma, lambd)
    for got, want in zip(estimate("gae", batch, gamma=gamma, lambd=lambd), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("longest", [1, 3])
def test_the_reward_of_a_one_token_response_is_on_that_token(longest):
    """A sampler that stops at once: first and last token are one. A reward on the token after it
    would be lost, or discounted once too often."""
    responses = [[5], [6], list(range(1, longest + 1))]
    values = {"values": torch.tensor([0.25, -0.5, *[0.125] * longest])}
    batch = batch_of_lists([[1]] * 3, responses, [0, 0, 1], [1.0, 0.75, 0.0], values)
    first, second, other = estimate("gae", batch, gamma=0.5, lambd=0.5)
    assert (first, second) == ([1 - 0.25], [0.75 + 0.5])
    assert other[-1] == -0.125


def test_gae_with_gamma_lambda_1_is_reward_minus_value():
    """ORZ's setting. The last token, the stop token, gets the reward like all others."""
    batch = make_batch()
    values = naive.per_sample(batch, batch.per_token["values"])
    got = estimate("gae", batch)
    for advantages, reward, of_sample in zip(got, batch.rewards.tolist(), values, strict=True):
        expected = [reward - value for value in of_sample]
        np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", sorted(naive.COMPARES))
@pytest.mark.parametrize("seed", range(3))
def test_group_estimators_against_loops(estimator, seed):
    """ORZ's GRPO never divided by the std. Groups of any size and order; the population's std."""
    batch = make_batch()
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 0.0, 1.0, 0.1, rng.random()]) for _ in batch.sample_lengths]
    batch.rewards = torch.tensor(rewards, dtype=torch.float64)
    batch.groups = batch.groups[rng.sample(batch.all_samples(), len(batch.sample_lengths))]
    expected = naive.scores(estimator, rewards, batch.groups.tolist())
    assert any(expected)
    for got, want, ids in zip(estimate(estimator, batch), expected, batch.response_ids):
        np.testing.assert_allclose(got, [want] * len(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", [x for x in naive.COMPARES if naive.COMPARES[x]])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e-9, 12345.678])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 49])
def test_a_flat_group_is_exactly_zero(estimator, reward, size):
    """The mean of 7 times 0.1 is not 0.1: rounding noise over a std that is rounding noise is an
    advantage of 1. Whitening moved flat groups off zero (ORZ's fault 1)."""
    count = size + 3
    groups = [5] * size + [1] * 3
    rewards = [reward] * size + [0.0, 0.0, 1.0]
    values = {"values": torch.zeros(2 * count)}
    batch = batch_of_lists([[1]] * count, [[1, 2]] * count, groups, rewards, values)
    got = np.array(estimate(estimator, batch))
    assert (got[:size] == 0).all()
    assert (got[size:] != 0).all()
    assert np.isfinite(got).all()
    # REINFORCE++ whitens over the batch, as it was published, and that moves flat groups.
    whiten = estimator != "reinforce_pp"
    ppo.compute_advantages(batch, config(estimator=estimator, advantage_normalization=whiten))
    assert not batch.per_token["advantages"][: 2 * size].any()


@pytest.mark.parametrize("estimator", naive.COMPARES)
def test_an_estimator_says_how_many_samples_it_needs(estimator):
    """With one sample a problem, those that compare have no advantage at all: a run that is not
    refused would take no step, silently."""
    batch = make_batch()
    batch.groups = torch.arange(len(batch.sample_lengths))
    cfg = config(estimator=estimator, advantage_normalization=False)
    ppo.compute_advantages(batch, cfg)
    compares = not batch.per_token["advantages"].any()
    assert compares == naive.COMPARES[estimator]
    assert compares == (ppo.ESTIMATORS[estimator].least_samples > 1)


@pytest.mark.parametrize("estimator", ["gae", *naive.COMPARES])
@pytest.mark.parametrize("whiten", [True, False])
def test_compute_advantages(estimator, whiten):
    """Whitening: once, over all response tokens, with the population's std, for some estimators
    only. Returns stay as they are."""
    batch = make_batch()
    cfg = config(estimator=estimator, advantage_normalization=whiten)
    stats = ppo.compute_advantages(batch, cfg)
    advantages, returns = naive.advantages(batch, cfg)
    got = batch.per_token["advantages"].double()
    torch.testing.assert_close(got, advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch.per_token["returns"].double(), returns, rtol=1e-5, atol=1e-6)
    is_white = abs(got.mean()) < 1e-6 and abs(got.square().mean() - 1) < 1e-5
    assert is_white == (whiten and estimator in ("gae", "reinforce", "reinforce_pp"))
    assert stats["advantage_abs"] == pytest.approx(advantages.abs().mean().item(), rel=1e-5)
    assert stats["return"] == pytest.approx(returns.mean().item(), rel=1e-5)
    if estimator == "gae":
        unexplained = np.var(returns.numpy() - batch.per_token["values"].numpy())
        explained = 1 - unexplained / np.var(returns.numpy())
        assert stats["explained_variance"] == pytest.approx(explained, abs=1e-5)


@pytest.mark.parametrize("estimator", ["gae", *naive.COMPARES])
def test_flat_rollout_has_no_explained_variance_and_no_nan(estimator):
    """All rewards equal: nothing to explain, and whitening must not divide by zero."""
    batch = make_batch("flat")
    batch.per_token["values"].zero_()
    stats = ppo.compute_advantages(batch, config(estimator=estimator))
    assert batch.per_token["advantages"].abs().max() < 1e-6
    assert all(map(math.isfinite, stats.values()))


@pytest.mark.parametrize("critic_lambd", [1.0, 0.9, 0.0])
def test_the_critic_has_its_own_lambda(critic_lambd):
    """Its target alone has it (VAPO's decoupled GAE); 0 is a lambda and not an absent one."""
    coupled = make_batch()
    ppo.compute_advantages(coupled, config(lambd=0.5))
    batch = make_batch()
    cfg = config(lambd=0.5, critic_lambd=critic_lambd)
    stats = ppo.compute_advantages(batch, cfg)
    assert torch.equal(batch.per_token["advantages"], coupled.per_token["advantages"])
    _, returns = naive.advantages(batch, cfg)
    torch.testing.assert_close(batch.per_token["returns"].double(), returns, rtol=1e-5, atol=1e-6)
    assert (batch.per_token["returns"] - coupled.per_token["returns"]).abs().max() > 0.1
    assert stats["return"] == pytest.approx(returns.mean().item(), rel=1e-5)


CARD = torch.device("cpu", 0)  # it is not equal to CPU


class OnCard(torch.Tensor):
    """A tensor of a second device, which is really the CPU. It cannot meet a tensor of the CPU,
    except a number, or a mask that it is indexed with. Nothing is added up in an order that a GPU
    would choose, since the ranks' advantages would differ."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        mixes = function is torch.Tensor.__getitem__ or function is torch.Tensor.__setitem__
        for x in arguments:
            if type(x) is torch.Tensor and x.dim() > 0 and not mixes:
                raise RuntimeError(f"{function}: tensors on two devices")
        assert function != torch.Tensor.index_add
        if function == torch.Tensor.device.__get__:
            return CARD
        if function == torch.Tensor.cpu:
            return arguments[0].as_subclass(torch.Tensor)
        return super().__torch_function__(function, types, arguments, options or {})


class Card(TorchFunctionMode):
    """What is made on CARD, or moved there, is there."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        made = function(*arguments, **options)
        if options.get("device") == CARD or CARD in [x for x in arguments if type(x) is type(CPU)]:
            return made.as_subclass(OnCard)
        return made


@pytest.mark.parametrize("estimator", ["gae", *naive.COMPARES])
def test_advantages_are_computed_on_the_device(estimator):
    """On the CPU they took ten seconds of every step at 8,192 samples of 8,000 tokens."""
    for settings in ({}, {"loss_mean": "sequence"}, {"lambd": 0.9, "critic_lambd": 1.0}):
        cfg = config(estimator=estimator, **settings)
        expected = make_batch()
        batch = make_batch()
        batch.device = CARD
        batch.per_token["values"] = batch.per_token["values"].as_subclass(OnCard)
        if estimator != "gae":
            expected.per_token.clear()
            batch.per_token.clear()
        stats = ppo.compute_advantages(expected, cfg)
        with Card():
            assert ppo.compute_advantages(batch, cfg) == stats
        for name in ("advantages", "returns"):
            assert type(batch.per_token[name]) is OnCard
            assert batch.per_token[name].tolist() == expected.per_token[name].tolist()
        learnt = ppo.samples_to_learn_from(expected, cfg)
        assert ppo.samples_to_learn_from(batch, cfg) == learnt


@pytest.mark.parametrize("loss_mean", ["sequence", "constant"])
def test_loss_mean_weighs_the_advantages_alone(loss_mean):
    """What is logged about them stays, and so do the critic's targets: a critic's error must not
    depend on how the policy's loss is averaged."""
    plain = make_batch()
    weighted = make_batch()
    expected = ppo.compute_advantages(plain, config())
    assert ppo.compute_advantages(weighted, config(loss_mean=loss_mean)) == expected
    assert torch.equal(weighted.per_token["returns"], plain.per_token["returns"])
    assert not torch.equal(weighted.per_token["advantages"], plain.per_token["advantages"])


# ---- passes, losses and updates: one step against its naive gradient -----------------------------


LEARNT = ("estimator", "loss_mean", "lambd", "critic_lambd")


@functools.cache
def naive_step(folder, batch_kind: str, learnt: tuple, head: tuple) -> tuple[dict, dict]:
    """Gradients of policy and critic. They do not depend on any knob of memory or speed."""
    batch = make_batch(batch_kind)
    cfg = config(**dict(zip(LEARNT, learnt)))
    policy = naive.policy_gradient(naive.load(folder), batch, cfg)
    body = naive.load(folder, AutoModel)
    head = torch.tensor([head], dtype=torch.float64)  # (1, H)
    _, returns = naive.advantages(batch, cfg)
    old = batch.per_token["values"]
    return policy, naive.critic_gradient(body, head, batch, old, returns, cfg.value_clip)


def norm_of(tensors: dict) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).norm().item()


def moved_by(gradient: dict, before: dict, after: dict, tolerance: float = 1e-5) -> None:
    """The SGD step from `before` to `after` used this gradient: as a whole, and each tensor."""
    whole = norm_of(gradient)
    differences = {}
    for name, expected in gradient.items():
        got = (before[name].double() - after[name].double()) / LR
        differences[name] = got - expected
        error = differences[name].norm().item()
        assert error <= 10 * tolerance * (expected.norm().item() + 0.01 * whole), f"{name}: {error}"
    assert norm_of(differences) <= tolerance * whole


def check_step(result: dict, job: dict, folder) -> None:
    """A cell's critic and policy have moved by the naive gradients, and its passes gave the naive
    numbers."""
    cfg = config(**job["settings"])
    batch_kind = job["spec"]["batch"]
    head = result["critic_start"]["value_head.weight"]
    learnt = tuple(getattr(cfg, name) for name in LEARNT)
    policy, critic = naive_step(folder, batch_kind, learnt, tuple(head[0].tolist()))
    starts = {"policy": naive.load(folder).state_dict(), "critic": result["critic_start"]}
    for name, gradient in (("policy", policy), ("critic", critic)):
        norm = norm_of(gradient)
        clip = min(1.0, cfg.max_norm / norm)
        clipped = {key: part * clip for key, part in gradient.items()}
        moved_by(clipped, starts[name], result[name])
        assert result["stats"][f"{name}_grad_norm"] == pytest.approx(norm, rel=1e-4)
    check_numbers(result, make_batch(batch_kind), cfg, folder)


@torch.no_grad()
def check_numbers(result: dict, batch: ppo.Batch, cfg, folder) -> None:
    """The passes' values and log-probs, and what the losses log."""
    logprobs, entropy = naive.logprobs(naive.load(folder), batch, cfg.temperature)
    head = result["critic_start"]["value_head.weight"].double()
    values = naive.values(naive.load(folder, AutoModel), head, batch)
    torch.testing.assert_close(result["logprobs"].double(), logprobs, rtol=0, atol=3e-5)
    torch.testing.assert_close(result["values"].double(), values, rtol=0, atol=3e-5)
    advantages, returns = naive.advantages(batch, cfg)
    old = batch.per_token["values"].double()
    losses = naive.clipped_value_loss(values, old, returns, cfg.value_clip)
    stats = result["stats"]
    passed = torch.ones_like(values, dtype=torch.bool)
    if cfg.estimator == "grpo":
        passed = advantages != 0
    policy_loss = naive.mean_loss(-advantages * logprobs, batch, cfg).item()
    assert stats["policy_loss"] == pytest.approx(policy_loss, rel=1e-4)
    assert stats["entropy"] == pytest.approx(entropy[passed].mean().item(), rel=1e-4)
    assert stats["critic_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert stats["critic_values"] == pytest.approx(values.mean().item(), abs=1e-5)


def names_of(cells: list[dict], kind: str) -> list[str]:
    return [job["name"] for job in cells if job["kind"] == kind]


@pytest.mark.parametrize("name", names_of(ONE, "step"))
def test_step_on_one_rank(name, results, models):
    """The policy's step is naive clipped PPO at ratio 1, the critic's the naive clipped value loss,
    to 1e-5, whatever packing, micro-batch, ZeRO stage, checkpointing and offload are. ORZ took
    means of means and duplicated packs (faults 2 and 3)."""
    job = find(ONE, name)
    check_step(results(1)(name), job, models[job["tied"]])


@pytest.mark.parametrize("name", names_of(TWO, "step"))
def test_step_on_two_ranks(name, results, models):
    """The same numbers from two ranks: also when one of them has no sample at all (no hang, no
    change), and when flat groups are skipped but counted in the denominator."""
    job = find(TWO, name)
    check_step(results(2)(name), job, models[job["tied"]])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", names_of(WIDE, "step"))
def test_step_wide(name, ranks, wide, models):
    """Every ZeRO stage with every packing, micro-batch size, checkpointing, tied and untied."""
    job = find(WIDE, name)
    check_step(wide(ranks)(name), job, models[job["tied"]])


def test_logged_numbers_are_means_over_the_tokens_passed(results, models):
    """Sampler and reference shifted by 0.01 and 0.02: the ratio is e^0.01, not that times the share
    of tokens not skipped; the entropy likewise."""
    stats = results(2)("logging")
    batch = make_batch("half flat")
    cfg = config(estimator="grpo")
    passed = naive.advantages(batch, cfg)[0] != 0
    assert 0.2 < passed.double().mean() < 0.8
    with torch.no_grad():
        _, entropy = naive.logprobs(naive.load(models[True]), batch, cfg.temperature)
    assert stats["ratio"] == pytest.approx(math.exp(0.01), rel=1e-4)
    assert stats["ratio_max"] == pytest.approx(math.exp(0.01), rel=1e-4)
    assert stats["approx_kl"] == pytest.approx(math.exp(0.01) - 1 - 0.01, rel=1e-2)
    assert stats["kl"] == pytest.approx(math.exp(-0.02) - 1 + 0.02, rel=1e-2)
    assert stats["clipfrac"] == 0
    assert stats["entropy"] == pytest.approx(entropy[passed].mean().item(), rel=1e-4)


def test_the_reference_itself_exercises_the_clips(models):
    """The critic's reference must have tokens on both sides of the value clip, or the comparison
    proves little."""
    batch = make_batch()
    head = torch.full((1, 64), 0.02, dtype=torch.float64)
    body = naive.load(models[True], AutoModel)
    values = naive.values(body, head, batch).detach().requires_grad_()
    _, returns = naive.advantages(batch, config())
    old = batch.per_token["values"]
    naive.clipped_value_loss(values, old.double(), returns, 0.2).sum().backward()
    outside = (values - old).abs() > 0.2
    dead = values.grad == 0
    assert 0.1 < dead.double().mean() < 0.9
    assert (outside & ~dead).any()
    assert not (dead & ~outside).any()


# ---- train_critic --------------------------------------------------------------------------------


def part_of(batch: ppo.Batch, samples) -> ppo.Batch:
    """Some samples as a batch of their own."""
    prompts = [batch.prompt_ids[i] for i in samples]
    responses = [batch.response_ids[i] for i in samples]
    return batch_of_lists(prompts, responses)


def tokens_of(batch: ppo.Batch, samples) -> list[int]:
    tokens = []
    for i in samples:
        tokens += range(int(batch.start[i]), int(batch.start[i] + batch.response_lengths[i]))
    return tokens


@pytest.mark.parametrize("stage", [1, 3])
def test_twelve_critic_steps_see_each_token_once(stage, results, models):
    """ORZ dropped the packs left over by 12 and trained padding packs twice. Each step is divided
    by its own tokens and starts from clean gradients and the last step's weights: all together are
    12 naive steps in a row."""
    result = results(2)(f"splits, zero{stage}")
    batch = make_batch()
    rng = np.random.default_rng(hash64(config().seed, SPLIT_STEP, "critic"))
    parts = np.array_split(rng.permutation(16), 12)
    for part, seen in zip(parts, result["seen"], strict=True):
        assert sorted(seen) == sorted(tokens_of(batch, part))
    assert sorted(sum(result["seen"], [])) == list(range(int(batch.response_lengths.sum())))

    body = naive.load(models[True], AutoModel)
    head = result["critic_start"]["value_head.weight"].double()
    _, returns = naive.advantages(batch, config())
    old = batch.per_token["values"]
    for part in parts:
        tokens = tokens_of(batch, part)
        some = part_of(batch, part)
        gradient = naive.critic_gradient(body, head, some, old[tokens], returns[tokens], 0.2)
        with torch.no_grad():
            for name, p in body.named_parameters():
                p -= 0.02 * gradient[name]
            head = head - 0.02 * gradient["value_head.weight"]
    expected = dict(body.named_parameters()) | {"value_head.weight": head}
    moves = {}
    errors = {}
    for name, start in result["critic_start"].items():
        moves[name] = expected[name] - start.double()
        errors[name] = expected[name] - result["critic"][name].double()
    assert norm_of(errors) < 1e-4 * norm_of(moves)


# ---- train_policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_all_flat_rollout_takes_no_step(stage, results):
    """Adam's moments of earlier steps would move the weights if a step with zero gradients were
    taken. Nor does an empty list mean all samples, where these have signal."""
    result = results(2)(f"flat, zero{stage}")
    for stats in (result["stats"], result["no_samples"]):
        assert stats["policy_micro_batches"] == 0
        assert stats["policy_grad_norm"] == 0
        assert stats["policy_tokens"] == 0
    assert result["steps"] == 1
    for name, before in result["before"].items():
        assert torch.equal(before, result["after"][name]), name
    norm = "model.norm.weight"
    assert (result["before"][norm] != result["start"][norm]).any(), "the healthy step did nothing"


def test_skipped_samples_count_in_the_denominator(results):
    """Flat groups are left out of the passes, yet the step is that of the unskipped sum (which
    test_step_* compare). Passes were really saved, and a mean over the active tokens alone would
    have shown."""
    batch = make_batch("half flat")
    cfg = config(estimator="grpo")
    ppo.compute_advantages(batch, cfg)
    active = (batch.per_token["advantages"] != 0).double().mean()
    assert 0.2 < active < 0.8
    stats = results(1)("grpo")["stats"]
    assert stats["policy_micro_batches"] < stats["critic_micro_batches"]
    assert stats["policy_tokens"] == sum(
        batch.sample_lengths[i] for i in ppo.samples_to_learn_from(batch, cfg)
    )
    assert stats["critic_tokens"] == sum(batch.sample_lengths)


def test_learning_rate():
    """ORZ's warm-up starts at 0: the first step of each optimizer changed nothing (fault 6)."""
    rates = [ppo.learning_rate(1e-6, 4, step) for step in range(6)]
    assert rates == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6, 1e-6])
    rates = [ppo.learning_rate(1e-6, 50, step) for step in (0, 99, 10_000)]
    assert rates == pytest.approx([1e-6 / 50, 1e-6, 1e-6])
    rates = [ppo.learning_rate(1e-6, 0, step) for step in (0, 1)]
    assert rates == pytest.approx([1e-6, 1e-6])
    rates = [ppo.learning_rate(1e-6, 4, step, 3e-7, 100) for step in range(101)]
    assert rates[3] == pytest.approx(1e-6)
    assert rates[99] == pytest.approx(3e-7)
    assert rates[100] == pytest.approx(3e-7)
    assert np.diff(rates[3:100]) == pytest.approx([-7e-7 / 96] * 96), "not linear"
    for total, step in itertools.product((0, 1, 4, 5), range(6)):
        assert math.isfinite(ppo.learning_rate(1e-6, 4, step, 3e-7, total))


class Listener:
    """An engine of one number a token, all -1. It stays as it is, and notes what it was given."""

    device = CPU

    def __init__(self, name: str, batch: ppo.Batch):
        self.name = name
        self.numbers = -torch.ones(int(batch.response_lengths.sum()))  # (T,)
        self.numbers.requires_grad_()
        self.seen = []
        self.rates = []

    def __call__(self, micro, temperature=None):
        self.seen += micro.flat_index.tolist()
        numbers = self.numbers[micro.flat_index]
        if self.name == "critic":
            return numbers
        return numbers, torch.zeros_like(numbers)

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        self.rates.append(lr)
        return 1.0


@pytest.mark.parametrize("samples, critic_steps", [(16, 3), (2, 2)])
def test_engines_get_the_rates_of_the_closed_form(samples, critic_steps, process_group):
    """Over the steps of a run, warm-up and fall included. The critic's was one step late, or the
    same for all parts of a step. Fewer samples than critic steps do not slow the warm-up down."""
    batch = part_of(make_batch("equal sizes"), range(samples))
    batch.per_token["values"] = torch.zeros(int(batch.response_lengths.sum()))
    batch.rewards = torch.arange(samples, dtype=torch.float64)
    settings = {"critic_updates": 3, "warmup_updates": 4, "lr_end": 0.0}
    cfg = config(actor_learning_rate=1.0, critic_learning_rate=12.0, **settings)
    ppo.compute_advantages(batch, cfg)
    policy = Listener("policy", batch)
    critic = Listener("critic", batch)
    for step in range(6):
        logged = ppo.train_critic(critic, batch, cfg, step)
        assert logged["critic_lr"] == pytest.approx(np.mean(critic.rates[-critic_steps:]))
        logged = ppo.train_policy(policy, batch, cfg, step, total_steps=6)
        assert logged["policy_lr"] == policy.rates[-1]
    assert policy.rates == pytest.approx([0.25, 0.5, 0.75, 1, 0.5, 0])
    expected = []
    for step in range(6):
        expected += [min(12, 3 * (3 * step + k + 1)) for k in range(critic_steps)]
    assert critic.rates == pytest.approx(expected)


def test_the_critic_warms_up_alone(process_group):
    """The policy's engine is not touched meanwhile, and its rate, with its fall at the end, is that
    of a run that begins after the warm-up. The critic's own rate is counted from step 0."""
    batch = make_batch("equal sizes")
    batch.rewards = torch.arange(16, dtype=torch.float64)
    batch.per_token["values"] = torch.zeros(int(batch.response_lengths.sum()))
    settings = {"actor_learning_rate": 1.0, "warmup_updates": 2, "lr_end": 0.0}
    cfg = config(critic_only_steps=3, critic_learning_rate=4.0, **settings)
    ppo.compute_advantages(batch, cfg)
    policy = Listener("policy", batch)
    critic = Listener("critic", batch)
    for step in range(7):
        ppo.train_critic(critic, batch, cfg, step)
        logged = ppo.train_policy(policy, batch, cfg, step, total_steps=7)
        assert bool(logged) == (step >= 3), "the policy's numbers are absent"
        assert len(policy.rates) == max(0, step - 2)
    assert policy.rates == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert critic.rates == pytest.approx([2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])


def test_the_critic_s_parts_are_others_in_every_step(process_group):
    """The same two halves again and again would be the same two steps."""
    batch = make_batch("equal sizes")
    ppo.compute_advantages(batch, config())
    halves = set()
    for step in range(4):
        critic = Listener("critic", batch)
        ppo.train_critic(critic, batch, config(critic_updates=2), step)
        assert sorted(critic.seen) == list(range(16 * 20)), "each token once"
        halves.add(frozenset(critic.seen[: 8 * 20]))
    assert len(halves) == 4


# ---- update --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_of(TWO, "nonfinite"))
def test_nan_or_inf_stops_all_ranks_with_unchanged_weights(name, results):
    """ZeRO 0 would apply a NaN, ZeRO 1 to 3 skip the step silently, and a rank that goes on alone
    hangs the others. The fault is in one micro-batch of one rank only. No weight may move by a
    bit."""
    ranks = results(2)(name)["ranks"]
    assert len(ranks) == 2
    for raised, unchanged in ranks:
        assert "not finite" in raised
        assert unchanged
