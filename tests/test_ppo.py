"""ppo.py against slow, naive references written here: padded batches, full logits, python loops, float64.

What needs engines runs in ppo_worker.py, on real DeepSpeed: one launch of one rank, one of two, many cells each; a
test then compares one cell with the reference. Alone: `pytest tests/test_ppo.py`; wide matrix: `pytest -m long`."""
import contextlib
import copy
import functools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from conftest import held_port
from ppo_worker import LR, config, everyone, make_batch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3NextConfig,
)

import ppo
import train
from tools.check import check_architecture

HERE = Path(__file__).parent


# -- cells on real engines ---------------------------------------------------------------------------------------------

def cell(name: str, kind: str, tied=True, batch="ragged", how="nan", model="policy", **settings) -> dict:
    return {"name": name, "kind": kind, "tied": tied, "batch": batch, "how": how, "model": model, "config": settings}


def step(name: str, **settings) -> dict:
    return cell(name, "step", **settings)


ONE = [  # ranks: 1
    cell("memory", "memory"),
    step("zero0", tied=False),
    step("zero1", zero_stage=1),
    step("zero2", zero_stage=2, tied=False),
    step("zero3", zero_stage=3),
    step("short rows, one by one", packing_max_len=48, micro_train_batch_size=1),
    step("long rows", packing_max_len=300, micro_train_batch_size=1),
    step("one micro-batch", packing_max_len=64, micro_train_batch_size=99, tied=False),
    step("checkpointing", gradient_checkpointing=True),
    step("clipped", max_norm=0.1),
    step("grpo", estimator="grpo", batch="half flat"),
    cell("bf16 zero2", "bf16", zero_stage=2, bf16=True, packing_max_len=26, micro_train_batch_size=1),
    cell("bf16 zero3", "bf16", zero_stage=3, bf16=True, packing_max_len=26, micro_train_batch_size=1),
]
TWO = [  # ranks: 2
    *(step(f"zero{z}", zero_stage=z, tied=z % 2 == 0) for z in range(4)),
    step("zero3, long rows", zero_stage=3, packing_max_len=200, micro_train_batch_size=3),
    step("zero1, short rows", zero_stage=1, packing_max_len=48, micro_train_batch_size=1),
    step("zero3, checkpointing", zero_stage=3, gradient_checkpointing=True, tied=False),
    step("zero3, small parameters whole", zero_stage=3, zero3_persistence_threshold=100_000),
    step("zero3, clipped", zero_stage=3, max_norm=0.1),
    *(step(f"idle rank, zero{z}", zero_stage=z, batch="one", tied=z % 2 == 1) for z in range(4)),
    *(step(f"grpo, zero{z}", zero_stage=z, estimator="grpo", batch="half flat") for z in (0, 3)),
    *(cell(f"nan, zero{z}", "nonfinite", zero_stage=z, model=("policy", "critic")[z % 2]) for z in range(4)),
    cell("nan ratio", "nonfinite", zero_stage=1, how="ratio"),
    *(cell(f"inf, zero{z}", "nonfinite", zero_stage=z, how="inf", model=("critic", "policy")[z % 2]) for z in range(4)),
    *(cell(f"{how}, bf16 zero{z}", "nonfinite", zero_stage=z, how=how, bf16=True)
      for how, z in (("nan", 2), ("inf", 2), ("inf", 3))),
    *(cell(f"flat, zero{z}", "flat", zero_stage=z, estimator="grpo") for z in (0, 3)),
    *(cell(f"splits, zero{z}", "splits", zero_stage=z) for z in (1, 3)),
    cell("bf16 zero2", "bf16", zero_stage=2, bf16=True, packing_max_len=26, micro_train_batch_size=1),
    cell("bf16 zero3", "bf16", zero_stage=3, bf16=True, packing_max_len=26, micro_train_batch_size=1),
    cell("logging", "logging", zero_stage=3, estimator="grpo", log_ratio=True, log_kl=True),
]
WIDE = [step(f"zero{z} {threshold} rows {rows} x {many} {'checkpointing' if gc else ''} {batch}",
             zero_stage=z, zero3_persistence_threshold=threshold, packing_max_len=rows, micro_train_batch_size=many,
             gradient_checkpointing=gc, tied=tied, batch=batch)
        for z, threshold in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 3000))
        for rows, many in ((48, 1), (64, 3), (130, 1), (700, 1)) for gc in (False, True)
        for tied, batch in ((True, "ragged"), (False, "one"))]


def launch(ranks: int, cells: list[dict], folder: Path, models: dict):
    """Runs the cells in one launch and returns how to read a cell's result, or why there is none."""
    folder.mkdir()
    cells = [c | {"config": c["config"] | {"model": str(models[c["tied"]])}} for c in cells]
    (folder / "cells.json").write_text(json.dumps(cells))
    accelerate = ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1",
                  "--num_processes", str(ranks), "--main_process_port"]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "20000000"}  # freed memory goes back at once: the memory cell measures peaks
    with (folder / "log.txt").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired), held_port() as port:
        launcher = [*accelerate, port] if ranks > 1 else []
        command = [sys.executable, *launcher, str(HERE / "ppo_worker.py"), str(folder)]
        subprocess.run(command, stdout=log, stderr=log, timeout=600, env=env)

    def read(name: str) -> dict:
        path, log = folder / f"{name}.pt", (folder / "log.txt").read_text()
        assert path.exists(), f"cell {name!r} on {ranks} ranks left no result:\n{log[-4000:]}"
        return torch.load(path)

    return read


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    """Tied and untied; their configs ask for dropout, which must stay off: a dropped unit would break ratio = 1."""
    root = tmp_path_factory.mktemp("models")
    folders = {tied: tiny.make_model(root / f"tied-{tied}", tied=tied) for tied in (True, False)}
    for folder in folders.values():
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.3}))
    return folders


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """results(ranks)(name): a cell's result; the launch happens once, when its first result is wanted."""
    root, cells = tmp_path_factory.mktemp("cells"), {1: ONE, 2: TWO}
    return functools.cache(lambda ranks: launch(ranks, cells[ranks], root / f"ranks-{ranks}", models))


@pytest.fixture(scope="module")
def wide(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("wide")
    return functools.cache(lambda ranks: launch(ranks, WIDE, root / f"ranks-{ranks}", models))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- naive references --------------------------------------------------------------------------------------------------

def naive_gae(rewards: list, values: list[list], gamma: float, lambd: float) -> list[list[float]]:
    """The double sum, straight from the definition."""
    out = []
    for reward, v in zip(rewards, values):
        length = len(v)
        rewards_of_tokens, following = [0.0] * (length - 1) + [reward], v[1:] + [0.0]
        delta = [r + gamma * n - now for r, n, now in zip(rewards_of_tokens, following, v)]
        out.append([sum((gamma * lambd) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)])
    return out


def naive_scores(estimator: str, rewards: list[float], groups: list[int]) -> list[float]:
    out = []
    for i, r in enumerate(rewards):
        group = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i]]
        others = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and j != i]
        if estimator == "reinforce":
            out.append(r - sum(rewards) / len(rewards))
        elif min(group) == max(group):
            out.append(0.0)
        elif estimator == "grpo":
            out.append((r - np.mean(group)) / math.sqrt(sum((x - np.mean(group)) ** 2 for x in group) / len(group)))
        else:
            out.append(r - sum(others) / len(others))
    return out


def per_sample(batch, flat) -> list[list[float]]:
    """A flat (T,) tensor as a list per sample."""
    flat, out = flat.tolist(), []
    for ids in batch.response_ids:
        out, flat = [*out, flat[:len(ids)]], flat[len(ids):]
    assert not flat
    return out


def naive_advantages(batch, cfg) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages, whitened for gae and reinforce, and returns, (T,) each, in float64."""
    values = per_sample(batch, batch.tokens["values"].double())
    if cfg.estimator == "gae":
        parts = naive_gae(batch.rewards.tolist(), values, cfg.gamma, cfg.lambd)
    else:
        scores = naive_scores(cfg.estimator, batch.rewards.tolist(), batch.groups.tolist())
        parts = [[score] * len(v) for score, v in zip(scores, values)]
    flat = [a for part in parts for a in part]
    returns = [a + v for part, vs in zip(parts, values) for a, v in zip(part, vs)]
    if cfg.estimator in ("gae", "reinforce") and cfg.advantage_normalization:
        mean = sum(flat) / len(flat)
        std = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
        flat = [(a - mean) / std for a in flat]
    return torch.tensor(flat, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


def padded(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and attention mask, (N, L): no packing at all."""
    rows = [prompt + response for prompt, response in zip(batch.prompt_ids, batch.response_ids)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def responses_only(batch, per_position: torch.Tensor) -> torch.Tensor:
    """(N, L) numbers read at the position before each token -> (T,) numbers of the response tokens."""
    return torch.cat([per_position[i, len(p) - 1:len(p) - 1 + len(r)]
                      for i, (p, r) in enumerate(zip(batch.prompt_ids, batch.response_ids))])


def naive_logprobs(model, batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies (T,) from full, padded logits."""
    ids, mask = padded(batch)
    logp = (model(ids, attention_mask=mask).logits / temperature).log_softmax(-1)  # (N, L, V)
    following = torch.cat([ids[:, 1:], ids[:, :1]], 1)  # (N, L)
    return (responses_only(batch, logp.gather(2, following[:, :, None])[:, :, 0]),
            responses_only(batch, -(logp.exp() * logp).sum(-1)))


def naive_values(body, head: torch.Tensor, batch) -> torch.Tensor:
    ids, mask = padded(batch)
    return responses_only(batch, (body(ids, attention_mask=mask).last_hidden_state * head[0]).sum(-1))  # (T,)


def clipped_ppo(logprobs, old, advantages) -> torch.Tensor:
    """The textbook's per-token policy loss, with its ratio."""
    ratio = (logprobs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def clipped_value_loss(values, old, returns, clip: float) -> torch.Tensor:
    low, high = old - clip, old + clip
    return 0.5 * torch.max((values - returns) ** 2, (torch.min(torch.max(values, low), high) - returns) ** 2)


def load(folder, auto_class=AutoModelForCausalLM):
    return auto_class.from_pretrained(folder, dtype=torch.float64)


def policy_gradient(folder, batch, cfg) -> dict[str, torch.Tensor]:
    """name -> gradient of the naive clipped PPO at old = current, over all response tokens."""
    model, (advantages, _) = load(folder), naive_advantages(batch, cfg)
    logprobs, _ = naive_logprobs(model, batch, cfg.temperature)
    (clipped_ppo(logprobs, logprobs.detach(), advantages).sum() / len(logprobs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def critic_gradient(body, head, batch, old, returns, clip: float) -> dict[str, torch.Tensor]:
    body.zero_grad()
    head = head.detach().clone().requires_grad_()
    values = naive_values(body, head, batch)
    (clipped_value_loss(values, old.double(), returns, clip).sum() / len(values)).backward()
    return {name: p.grad for name, p in body.named_parameters()} | {"value_head.weight": head.grad}


@functools.cache
def reference(folder, batch_kind: str, estimator: str, head: tuple) -> tuple[dict, dict]:
    """Naive policy and critic gradients of a cell's batch; they do not depend on any memory or speed knob."""
    batch, cfg = make_batch(batch_kind), config(folder, estimator=estimator)
    _, returns = naive_advantages(batch, cfg)
    critic = critic_gradient(load(folder, AutoModel), torch.tensor([head], dtype=torch.float64), batch,
                             batch.tokens["values"], returns, cfg.value_clip)
    return policy_gradient(folder, batch, cfg), critic


def close(actual: dict, before: dict, gradient: dict, lr: float = LR, tolerance: float = 1e-5) -> None:
    """The SGD step that turned `before` into `actual` used `gradient`: as a whole, and each tensor of it."""
    whole = torch.cat([g.flatten() for g in gradient.values()]).norm()
    error = 0.0
    for name, g in gradient.items():
        off = ((before[name].double() - actual[name].double()) / lr - g).norm()
        assert off <= 10 * tolerance * (g.norm() + 0.01 * whole), f"{name}: off by {off / g.norm():.2g} of its gradient"
        error += off ** 2
    assert error ** 0.5 <= tolerance * whole, f"gradient off by {error ** 0.5 / whole:.2g}"


def check_step(result: dict, spec: dict, folder) -> None:
    """A cell's critic and policy have moved by exactly the naive gradients, and its passes gave the naive numbers."""
    cfg, batch = config(folder, **spec["config"]), make_batch(spec["batch"])
    head = result["critic_start"]["value_head.weight"]
    policy, critic = reference(folder, spec["batch"], cfg.estimator, tuple(head[0].tolist()))
    for gradient, kind in ((policy, "policy"), (critic, "critic")):
        whole = torch.cat([g.flatten() for g in gradient.values()]).norm().item()
        clip = min(1.0, cfg.max_norm / whole)
        before = load(folder).state_dict() if kind == "policy" else result["critic_start"]
        close(result[kind], before, {name: g * clip for name, g in gradient.items()})
        assert result[f"{kind}_stats"]["grad_norm"] == pytest.approx(whole, rel=1e-4)
    with torch.no_grad():
        logprobs, entropy = naive_logprobs(load(folder), batch, cfg.temperature)
        torch.testing.assert_close(result["logprobs"].double(), logprobs, rtol=0, atol=3e-5)
        values = naive_values(load(folder, AutoModel), head.double(), batch)
        torch.testing.assert_close(result["values"].double(), values, rtol=0, atol=3e-5)
        advantages, returns = naive_advantages(batch, cfg)
        loss = clipped_value_loss(values, batch.tokens["values"].double(), returns, cfg.value_clip).mean().item()
    stats = result["policy_stats"]
    assert stats["policy_loss"] == pytest.approx(-(advantages * logprobs).mean().item(), rel=1e-4)
    if spec["batch"] != "half flat":
        assert stats["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert result["critic_stats"]["critic_loss"] == pytest.approx(loss, rel=1e-4)
    assert result["critic_stats"]["values"] == pytest.approx(values.mean().item(), abs=1e-5)


# -- 1 advantages ------------------------------------------------------------------------------------------------------

def estimate(name: str, batch, **settings) -> list[list[float]]:
    """The shipped estimator on a batch, as a list per sample; past each response's end it must be 0."""
    values = torch.zeros(batch.mask.shape, dtype=torch.float64)
    values[batch.mask] = batch.tokens["values"].double()
    out = ppo.ESTIMATORS[name](batch.rewards, values, batch.mask, batch.groups, config("", estimator=name, **settings))
    assert out.shape == batch.mask.shape and not out[~batch.mask].any()
    return per_sample(batch, out[batch.mask])


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_is_the_double_sum(gamma, lambd):
    """Guards the backward recursion: off by one, reward on the wrong token, values of padding leaking in."""
    batch = make_batch()
    values = per_sample(batch, batch.tokens["values"].double())
    expected = naive_gae(batch.rewards.tolist(), values, gamma, lambd)
    for got, want in zip(estimate("gae", batch, gamma=gamma, lambd=lambd), expected):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_gae_with_gamma_lambda_1_is_reward_minus_value():
    """ORZ's setting; also that the last token, the stop token, gets the reward like all others."""
    batch = make_batch()
    values = per_sample(batch, batch.tokens["values"])
    for got, reward, v in zip(estimate("gae", batch), batch.rewards.tolist(), values):
        np.testing.assert_allclose(got, [reward - x for x in v], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce"])
@pytest.mark.parametrize("seed", range(3))
def test_group_estimators_against_loops(estimator, seed):
    """Guards group statistics (ORZ's GRPO never divided by std): groups of any size and order, population std."""
    batch, rng = make_batch(), random.Random(seed)
    batch.rewards = torch.tensor([rng.choice([0.0, 1.0, 0.1, rng.random()]) for _ in batch.size], dtype=torch.float64)
    batch.groups = batch.groups[rng.sample(everyone(batch), len(batch.size))]
    expected = naive_scores(estimator, batch.rewards.tolist(), batch.groups.tolist())
    for got, want, ids in zip(estimate(estimator, batch), expected, batch.response_ids):
        assert len(got) == len(ids)
        np.testing.assert_allclose(got, [want] * len(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e-9, 12345.678])
def test_a_flat_group_is_exactly_zero(estimator, reward):
    """The mean of 7 times 0.1 is not 0.1: rounding noise over a std that is rounding noise is an advantage of 1."""
    for size in (1, 2, 3, 7, 49):
        batch = ppo.Batch([[1]] * (size + 3), [[1, 2]] * (size + 3), torch.tensor([5] * size + [1, 1, 1]),
                          torch.tensor([reward] * size + [0.0, 1.0, 1.0], dtype=torch.float64),
                          {"values": torch.zeros(2 * size + 6)})
        got = estimate(estimator, batch)
        assert all(a == 0.0 for part in got[:size] for a in part)
        assert all(a != 0.0 and math.isfinite(a) for part in got[size:] for a in part)
        ppo.compute_advantages(batch, config("", estimator=estimator), "cpu")
        assert not batch.tokens["advantages"][:2 * size].any(), "whitening moved a flat group off zero (ORZ's fault 1)"


@pytest.mark.parametrize("estimator", sorted(ppo.ESTIMATORS))
@pytest.mark.parametrize("whiten", [True, False])
def test_compute_advantages(estimator, whiten):
    """Guards whitening: once, over all response tokens, population std, gae and reinforce only; returns stay as is."""
    batch, cfg = make_batch(), config("", estimator=estimator, advantage_normalization=whiten)
    stats = ppo.compute_advantages(batch, cfg, "cpu")
    advantages, returns = naive_advantages(batch, cfg)
    torch.testing.assert_close(batch.tokens["advantages"].double(), advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch.tokens["returns"].double(), returns, rtol=1e-5, atol=1e-6)
    whitened = batch.tokens["advantages"].double()
    is_white = abs(whitened.mean()) < 1e-6 and abs(whitened.square().mean() - 1) < 1e-5
    assert is_white == (whiten and estimator in ("gae", "reinforce"))
    assert stats["advantage_abs"] == pytest.approx(advantages.abs().mean().item(), rel=1e-5)
    assert stats["return"] == pytest.approx(returns.mean().item(), rel=1e-5)
    if estimator == "gae":
        left = np.var([r - v for r, v in zip(returns.tolist(), batch.tokens["values"].tolist())])
        assert stats["explained_variance"] == pytest.approx(1 - left / np.var(returns.tolist()), abs=1e-5)


def test_flat_rollout_has_no_explained_variance_and_no_nan():
    """All rewards equal: nothing to explain, and whitening must not divide by zero."""
    for estimator in ppo.ESTIMATORS:
        batch = make_batch("flat")
        batch.tokens["values"].zero_()
        stats = ppo.compute_advantages(batch, config("", estimator=estimator), "cpu")
        assert batch.tokens["advantages"].abs().max() < 1e-6 and math.isfinite(stats["advantage"])
        assert math.isfinite(stats.get("explained_variance", 0.0))


# -- 2, 3 gradients ----------------------------------------------------------------------------------------------------

def test_the_reference_itself_exercises_the_clips(models):
    """The critic's reference must have tokens on both sides of the value clip, or the comparison proves little."""
    batch = make_batch()
    head = torch.full((1, 64), 0.02, dtype=torch.float64)
    values = naive_values(load(models[True], AutoModel), head, batch).detach().requires_grad_()
    _, returns = naive_advantages(batch, config(""))
    clipped_value_loss(values, batch.tokens["values"].double(), returns, 0.2).sum().backward()
    outside = (values - batch.tokens["values"]).abs() > 0.2
    dead = values.grad == 0
    assert 0.1 < dead.double().mean() < 0.9 and (outside & ~dead).any() and not (dead & ~outside).any()


@pytest.mark.parametrize("name", [c["name"] for c in ONE if c["kind"] == "step"])
def test_step_on_one_rank(name, results, models):
    """Policy step = naive clipped PPO at ratio 1, critic step = naive clipped value loss, to 1e-5, whatever the
    packing, micro-batch, ZeRO stage, checkpointing. Guards ORZ's faults 2 and 3: means of means, duplicated packs."""
    spec = next(c for c in ONE if c["name"] == name)
    check_step(results(1)(name), spec, models[spec["tied"]])


@pytest.mark.parametrize("name", [c["name"] for c in TWO if c["kind"] == "step"])
def test_step_on_two_ranks(name, results, models):
    """The same numbers from two ranks, also when one of them has no sample at all (no hang, no change), and when flat
    groups are skipped but counted in the denominator."""
    spec = next(c for c in TWO if c["name"] == name)
    check_step(results(2)(name), spec, models[spec["tied"]])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [c["name"] for c in WIDE])
def test_step_wide(name, ranks, wide, models):
    """Every ZeRO stage with every packing, micro-batch size, checkpointing, tied and untied."""
    spec = next(c for c in WIDE if c["name"] == name)
    check_step(wide(ranks)(name), spec, models[spec["tied"]])


def test_gradient_checkpointing_recomputes(results):
    """A model from from_pretrained is in eval mode, where Hugging Face silently ignores gradient checkpointing."""
    for ranks, name in ((1, "checkpointing"), (2, "zero3, checkpointing")):
        result = results(ranks)(name)
        micro_batches = result["policy_stats"]["micro_batches"] + result["critic_stats"]["micro_batches"]
        assert result["mlp_calls"] == 2 * micro_batches, "layers ran once per micro-batch: nothing was recomputed"
    plain = results(1)("zero1")
    assert plain["mlp_calls"] == plain["policy_stats"]["micro_batches"] + plain["critic_stats"]["micro_batches"]


def test_progress_is_reported_after_each_micro_batch(results):
    result = results(1)("short rows, one by one")
    count = result["critic_stats"]["micro_batches"]
    assert count > 5 and result["progress"] == [((k + 1) / count,) for k in range(count)] * 2


# -- 4 bf16 ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_summed_in_fp32(stage, results):
    """DeepSpeed's default sums bf16 gradients in bf16: over many micro-batches small terms vanish (the norm came out as
    8/9 of the right one). 64 copies of a sample in 64 micro-batches have exactly the gradient of one."""
    cell = results(1)(f"bf16 zero{stage}")
    many, one = cell["64"], cell["1"]
    assert (many["micro_batches"], one["micro_batches"]) == (64, 1)
    assert (many["gradient"] - one["gradient"]).norm() < 1e-5 * one["gradient"].norm()
    assert many["norm"] == pytest.approx(one["norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_communicated_in_fp32(stage, results):
    """Sums over ranks rounded to bf16 would differ from one rank's by 1e-3; the master weights would show it."""
    one, two = (results(ranks)(f"bf16 zero{stage}")["16"] for ranks in (1, 2))
    assert (one["micro_batches"], two["micro_batches"]) == (16, 8)
    assert (one["gradient"] - two["gradient"]).norm() < 1e-5 * one["gradient"].norm()


# -- 5, 7 packing ------------------------------------------------------------------------------------------------------

class FakeDist:
    """torch.distributed of one rank among `world`; `most` is what the maximum over ranks turns out to be."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, rank: int, world: int, most: int = 0):
        self.rank, self.world, self.most, self.seen = rank, world, most, 0

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
    for look in range(2):
        ranks = []
        for rank in range(world):
            fake = FakeDist(rank, world, most if look else 0)
            monkeypatch.setattr(ppo, "dist", fake)
            ranks.append(ppo.micro_batches(batch, samples, cfg, "cpu"))
            most = max(most, fake.seen)
    return ranks


def random_batch(rng: random.Random, count: int, longest: int) -> ppo.Batch:
    """Tokens are all different, so that a token in the wrong place cannot look right."""
    lengths = [(n := rng.randint(1, longest - 1), rng.randint(1, longest - n)) for _ in range(count)]
    fresh = iter(range(1, 10 ** 9))
    prompts = [[next(fresh) for _ in range(p)] for p, _ in lengths]
    responses = [[next(fresh) for _ in range(r)] for _, r in lengths]
    return ppo.Batch(prompts, responses, torch.zeros(count), torch.zeros(count), {})


@pytest.mark.parametrize("seed", range(40))
def test_every_response_token_is_predicted_exactly_once(seed, monkeypatch):
    """Over all ranks and micro-batches: no sample lost or trained twice (ORZ did both), the stop token, last of a
    response, included, prompts not, and each token after exactly its own sample's tokens, at positions from 0."""
    rng = random.Random(seed)
    world, row, many = rng.randint(1, 5), rng.randint(8, 80), rng.randint(1, 4)
    batch = random_batch(rng, rng.randint(1, 60), row)
    samples = sorted(rng.sample(everyone(batch), rng.randint(1, len(batch.size))))
    sequences = [p + r for p, r in zip(batch.prompt_ids, batch.response_ids)]
    flat = [t for ids in batch.response_ids for t in ids]
    cfg = config("", packing_max_len=row, micro_train_batch_size=many)
    ranks = micro_batches_of_all_ranks(monkeypatch, batch, samples, cfg, world)
    seen = []
    assert len({len(micros) for micros in ranks}) == 1, "ranks would wait for each other in ZeRO's collectives"
    assert any(m.weight.any() for micros in ranks for m in micros[-1:]), "a micro-batch that is filler on every rank"
    for m in (m for micros in ranks for m in micros):
        rows, length = m.input_ids.shape
        assert m.position_ids.shape == m.predict.shape == m.input_ids.shape
        assert rows <= many and length <= row
        assert len(m.token_ids) == len(m.index) == len(m.weight) == int(m.predict.sum()) > 0
        if not m.weight.any():
            continue
        assert (m.weight == 1).all()
        for (r, at), token, index in zip(m.predict.nonzero().tolist(), m.token_ids.tolist(), m.index.tolist()):
            assert flat[index] == token
            position = int(m.position_ids[r, at])
            context = m.input_ids[r, at - position:at + 1].tolist()
            sequence = next(s for s in sequences if s[0] == context[0])
            assert sequence[:position + 2] == [*context, token]
            assert m.position_ids[r, at - position:at + 1].tolist() == list(range(position + 1))
            seen.append(index)
    expected = [int(batch.start[i]) + k for i in samples for k in range(len(batch.response_ids[i]))]
    assert sorted(seen) == expected


def test_nothing_to_do_is_no_micro_batch(monkeypatch):
    """All groups flat: no rank runs a filler for nothing."""
    batch = make_batch()
    assert micro_batches_of_all_ranks(monkeypatch, batch, [], config(""), 3) == [[], [], []]


def test_pack_fills_rows_and_loses_nothing():
    """Rows never exceed their length, and best-fit leaves few of them."""
    rng = random.Random(0)
    for _ in range(50):
        row = rng.randint(5, 200)
        sizes = [rng.randint(1, row) for _ in range(rng.randint(1, 100))]
        samples = rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))
        rows = ppo.pack(sizes, samples, row)
        assert sorted(i for r in rows for i in r) == sorted(samples)
        assert all(r and sum(sizes[i] for i in r) <= row for r in rows)
        least = max(sum(sizes[i] for i in samples) / row, sum(sizes[i] > row / 2 for i in samples))
        assert len(rows) <= 1.5 * least + 1


def in_process(models, kind: str, tied: bool = True, attention: str = "sdpa"):
    """A shipped Policy or Critic without an engine, in float32."""
    auto_class = {"policy": AutoModelForCausalLM, "critic": AutoModel}[kind]
    model = auto_class.from_pretrained(models[tied], dtype=torch.float32, attn_implementation=attention)
    return ppo.Policy(model) if kind == "policy" else ppo.Critic(model, 5)


def forward(monkeypatch, module, batch, cfg) -> torch.Tensor:
    """Packed log-probs or values of all response tokens (T,)."""
    out = torch.full((int(batch.length.sum()),), float("nan"))
    for rows in micro_batches_of_all_ranks(monkeypatch, batch, everyone(batch), cfg, 1)[0]:
        with torch.no_grad():
            out[rows.index] = module(rows, cfg.temperature)[0] if isinstance(module, ppo.Policy) else module(rows)
    return out


def test_flash_attention_gets_one_row(monkeypatch):
    """transformers isolates packed samples under FlashAttention only at batch size 1: with several rows they would see
    each other, silently."""
    cfg = config("", packing_max_len=64, micro_train_batch_size=3, attention="flash_attention_2")
    for micro in micro_batches_of_all_ranks(monkeypatch, make_batch(), everyone(make_batch()), cfg, 1)[0]:
        assert len(micro.input_ids) == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("row,many", [(48, 1), (100, 2), (640, 1), (64, 99)])
def test_packed_equals_unpacked(attention, row, many, models, monkeypatch):
    """Segments of a row must not see each other (without use_cache=False they do, silently; ORZ's fault 8)."""
    batch, cfg = make_batch(), config("", packing_max_len=row, micro_train_batch_size=many, attention=attention)
    with torch.no_grad():
        logprobs, _ = naive_logprobs(load(models[False]), batch, cfg.temperature)
        critic = in_process(models, "critic", attention=attention)
        values = naive_values(load(models[True], AutoModel), critic.value_head.weight.double(), batch)
    got = forward(monkeypatch, in_process(models, "policy", False, attention), batch, cfg)
    torch.testing.assert_close(got.double(), logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(forward(monkeypatch, critic, batch, cfg).double(), values, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_other_samples_of_a_row_do_not_matter(kind, models, monkeypatch):
    """Changing any one sample leaves the numbers of all its neighbours in the row alone."""
    module, batch, cfg = in_process(models, kind), make_batch(), config("", packing_max_len=640)
    before = per_sample(batch, forward(monkeypatch, module, batch, cfg))
    for changed in (0, 1, 7, 15):
        other = copy.deepcopy(batch)
        other.prompt_ids[changed] = [(t + 7) % 55 + 1 for t in batch.prompt_ids[changed]]
        other.response_ids[changed] = [(t + 9) % 55 + 1 for t in batch.response_ids[changed]]
        after = per_sample(batch, forward(monkeypatch, module, other, cfg))
        for i in everyone(batch):
            off = np.abs(np.subtract(before[i], after[i])).max()
            assert off > 1e-3 if i == changed else off < 1e-6


def test_a_tokens_value_is_read_before_it(models, monkeypatch):
    """V(s_t) must not know the token whose advantage it is the baseline of; else PPO learns nothing from that token."""
    critic, batch, cfg = in_process(models, "critic"), make_batch(), config("")
    before = per_sample(batch, forward(monkeypatch, critic, batch, cfg))
    for sample, at in ((1, 39), (1, 20), (3, 0), (2, 1), (0, 0)):
        other = copy.deepcopy(batch)
        other.response_ids[sample][at] = batch.response_ids[sample][at] % 55 + 1
        after = per_sample(batch, forward(monkeypatch, critic, other, cfg))
        assert np.abs(np.subtract(before[sample], after[sample]))[:at + 1].max() < 1e-6
        assert (np.abs(np.subtract(before[sample], after[sample]))[at + 1:] > 1e-6).all()


# -- 6 the chunked head ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 64])
@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
def test_chunked_logprobs_equal_full_ones(temperature, chunk, through):
    """Forward and backward, with respect to hidden states and head, for chunks that do and do not divide T."""
    rng = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(shape, generator=rng) / 24 ** 0.25 for shape in ((50, 24), (97, 24)))
    ids, weights = torch.randint(97, (50,), generator=rng), torch.randn((2, 50), generator=rng)
    pick = {"logprobs": (1, 0), "entropy": (0, 1), "both": (1, 1)}[through]

    def gradients(function, dtype):
        h, w = hidden.to(dtype).clone().requires_grad_(), weight.to(dtype).clone().requires_grad_()
        logprobs, entropy = function(h, w)
        terms = [(x * y.to(dtype)).sum() for x, y, use in zip((logprobs, entropy), weights, pick) if use]
        sum(terms).backward()
        return logprobs, entropy, h.grad, w.grad

    def naive(h, w):
        logp = (h @ w.T / temperature).log_softmax(-1)
        return logp[range(50), ids], -(logp.exp() * logp).sum(-1)

    want = gradients(naive, torch.float64)
    got = gradients(lambda h, w: ppo.ChunkedLogprob.apply(h, w, ids, temperature, chunk), torch.float32)
    for x, y in zip(got, want):
        assert (x.double() - y).norm() < 1e-5 * y.norm()


def test_scores_too_large_to_keep_are_made_again():
    """Above 2^26 scores backward makes them from the hidden states, at the same temperature: other code than above."""
    rng, tokens, vocab = torch.Generator().manual_seed(3), 700, 100_000
    hidden, weight = torch.randn((tokens, 4), generator=rng), torch.randn((vocab, 4), generator=rng)
    ids, up = torch.randint(vocab, (tokens,), generator=rng), torch.randn((2, tokens), generator=rng)
    assert tokens * vocab > 2**26

    def gradients(function, dtype) -> list:
        h, w = (x.to(dtype).requires_grad_() for x in (hidden.clone(), weight.clone()))
        logprobs, entropy = function(h, w)
        (logprobs * up[0] + entropy * up[1]).sum().backward()
        return [h.grad, w.grad]

    def naive(h, w):
        logp = (h @ w.T / 1.3).log_softmax(-1)
        return logp[range(tokens), ids], -(logp.exp() * logp).sum(-1)

    got = gradients(lambda h, w: ppo.ChunkedLogprob.apply(h, w, ids, 1.3, 256), torch.float32)
    for x, y in zip(got, gradients(naive, torch.float64)):
        assert (x.double() - y).norm() < 1e-4 * y.norm(), "full logits in fp32 are 3e-5 off here"


def test_chunked_head_sums_bf16_gradients_in_fp32():
    """The head's gradient is a sum over chunks: in bf16 it would lose small terms, the more the smaller the chunks."""
    rng = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(shape, generator=rng).bfloat16() for shape in ((2048, 8), (40, 8)))
    ids, grads = torch.randint(40, (2048,), generator=rng), []
    for chunk in (4, 2048):
        w = weight.clone().requires_grad_()
        ppo.ChunkedLogprob.apply(hidden, w, ids, 1.0, chunk)[0].sum().backward()
        grads.append(w.grad.double())
    assert (grads[0] - grads[1]).norm() < 3e-3 * grads[1].norm()


def test_policy_swaps_the_head_but_not_its_parameter(models):
    """The head stays one parameter under its Hugging Face name, tied or not: a second name would be synced, saved."""
    for tied in (True, False):
        policy = in_process(models, "policy", tied)
        names = [name for name, _ in policy.named_parameters()]
        assert names == ["model." + name for name, _ in load(models[tied]).named_parameters()]
        assert isinstance(policy.model.get_output_embeddings(), ppo.ChunkedHead)


def test_memory_does_not_grow_with_vocabulary_times_tokens(results):
    """Full logits of 2,048 tokens at V = 151,936 are 1.2 GB, and ORZ held four of them (fault 7)."""
    cell = results(1)("memory")
    start, small, large = cell["peaks"]
    assert large - small < 0.05 * cell["logits"], f"2,048 tokens cost {(large - small) / 2 ** 20:.0f} MB more than 256"
    assert large - start < 0.5 * cell["logits"]


# -- 8, 9, 10 edges of an update ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [0, 3])
def test_all_flat_rollout_takes_no_step(stage, results):
    """Adam's moments of earlier steps would move the weights if a step with zero gradients were taken."""
    cell = results(2)(f"flat, zero{stage}")
    assert cell["stats"]["micro_batches"] == 0 and cell["stats"]["grad_norm"] == 0 and cell["steps"] == 1
    for name, before in cell["before"].items():
        assert torch.equal(before, cell["after"][name]), name
    assert (cell["before"]["model.norm.weight"] != 1).any(), "the healthy step before it did nothing"


def test_adam_has_the_recipes_numbers(results):
    """ORZ: betas 0.9 and 0.95, no weight decay; the learning rate is the one given to update."""
    for stage in (0, 3):
        for group in results(2)(f"flat, zero{stage}")["adam"]:
            assert tuple(group["betas"]) == (0.9, 0.95) and group["weight_decay"] == 0 and group["lr"] == 1e-3


def test_skipped_samples_count_in_the_denominator(results):
    """Flat groups are left out of the passes, yet the step is that of the unskipped sum (as test_step_* compare); here:
    passes were really saved, and a mean over the active tokens alone would have shown."""
    batch, cfg = make_batch("half flat"), config("", estimator="grpo")
    ppo.compute_advantages(batch, cfg, "cpu")
    active = (batch.tokens["advantages"] != 0).double().mean()
    assert 0.2 < active < 0.8
    stats = results(1)("grpo")
    assert stats["policy_stats"]["micro_batches"] < stats["critic_stats"]["micro_batches"]


NONFINITE = [c["name"] for c in TWO if c["kind"] == "nonfinite"]


@pytest.mark.parametrize("name", NONFINITE)
def test_nan_or_inf_stops_all_ranks_with_unchanged_weights(name, results):
    """ZeRO 0 would apply a NaN, ZeRO 1-3 skip the step silently, and a rank that goes on alone hangs the others. The
    fault is in one micro-batch of one rank only; bit for bit, no weight may move."""
    ranks = results(2)(name)["ranks"]
    assert len(ranks) == 2
    for raised, unchanged in ranks:
        assert raised and unchanged


def test_logged_numbers_are_means_over_the_tokens_passed(results, models):
    """Sampler and reference shifted by 0.01 and 0.02: ratio e^0.01, not that times the share of tokens not skipped; the
    entropy likewise."""
    stats, batch, cfg = results(2)("logging"), make_batch("half flat"), config("", estimator="grpo")
    active = naive_advantages(batch, cfg)[0] != 0
    with torch.no_grad():
        entropy = naive_logprobs(load(models[True]), batch, cfg.temperature)[1]
    assert stats["ratio"] == pytest.approx(math.exp(0.01), rel=1e-4)
    assert stats["approx_kl"] == pytest.approx(math.exp(0.01) - 1 - 0.01, rel=1e-2)
    assert abs(stats["approx_kl_k1"]) == pytest.approx(0.01, rel=1e-3)
    assert stats["kl"] == pytest.approx(math.exp(-0.02) - 1 + 0.02, rel=1e-2)
    assert stats["clipfrac"] == 0
    assert stats["entropy"] == pytest.approx(entropy[active].mean().item(), rel=1e-4)


# -- 11 the critic -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [1, 3])
def test_twelve_critic_steps_see_each_token_once(stage, results, models):
    """ORZ dropped the packs left over by 12 and trained padding packs twice. Also: each step is divided by its own
    tokens, starts from clean gradients and from the last step's weights: equal to 12 naive steps in a row."""
    cell, batch = results(2)(f"splits, zero{stage}"), make_batch()
    parts = np.array_split(np.random.default_rng(0).permutation(16), 12)
    for part, seen in zip(parts, cell["seen"]):
        assert sorted(seen) == sorted(int(batch.start[i]) + k for i in part for k in range(int(batch.length[i])))
    assert sorted(t for seen in cell["seen"] for t in seen) == list(range(int(batch.length.sum())))
    body, head = load(models[True], AutoModel), cell["critic_start"]["value_head.weight"].double()
    _, returns = naive_advantages(batch, config(""))
    returns, old = per_sample(batch, returns), per_sample(batch, batch.tokens["values"])
    for part in parts:
        some = SimpleNamespace(prompt_ids=[batch.prompt_ids[i] for i in part],
                               response_ids=[batch.response_ids[i] for i in part])
        gradient = critic_gradient(body, head, some, torch.tensor([x for i in part for x in old[i]]),
                                   torch.tensor([x for i in part for x in returns[i]], dtype=torch.float64), 0.2)
        with torch.no_grad():
            for name, p in body.named_parameters():
                p -= 0.02 * gradient[name]
            head = head - 0.02 * gradient["value_head.weight"]
    final = dict(body.named_parameters()) | {"value_head.weight": head}
    moved = sum((final[n].double() - w.double()).norm() ** 2 for n, w in cell["critic_start"].items()) ** 0.5
    off = sum((final[n].double() - w.double()).norm() ** 2 for n, w in cell["critic"].items()) ** 0.5
    assert off < 1e-4 * moved


def test_value_head_init(models):
    """Normal with *standard deviation* 1/(H+1) (the code, not the paper), a function of the seed alone."""
    body = load(models[True], AutoModel)
    torch.manual_seed(0)
    heads = torch.stack([ppo.Critic(body, k).value_head.weight[0].detach().float() for k in range(300)])  # (300, H)
    torch.manual_seed(1)
    assert torch.equal(ppo.Critic(body, 17).value_head.weight[0].float(), heads[17])
    assert heads.std() * 65 == pytest.approx(1, abs=0.03) and heads.mean().abs() * 65 < 0.03
    assert len({tuple(h.tolist()) for h in heads}) == 300
    assert (heads.abs() * 65 > 2).double().mean() == pytest.approx(0.0455, abs=0.01)  # a normal's tail, no uniform's


def test_value_head_is_the_same_everywhere(results):
    """Under ZeRO-3 a plain .normal_() is a no-op, which left a zero head; and each rank must hold the same one."""
    head = results(1)("zero1")["critic_start"]["value_head.weight"]
    assert head.shape == (1, 64) and (head != 0).all()
    for ranks, name in ((1, "zero3"), (2, "zero0"), (2, "zero3"), (2, "zero3, small parameters whole")):
        assert torch.equal(results(ranks)(name)["critic_start"]["value_head.weight"], head)


# -- 12 to 15 ----------------------------------------------------------------------------------------------------------

def test_learning_rate():
    """ORZ's warm-up starts at 0: the first step of each optimizer changed nothing (fault 6)."""
    lr = functools.partial(train.learning_rate, 1e-6)
    assert [lr(None, 4, 100, k) for k in range(6)] == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6, 1e-6])
    assert [lr(None, 50, 100, k) for k in (0, 99, 10_000)] == pytest.approx([1e-6 / 50, 1e-6, 1e-6])
    assert [lr(None, 0, 100, k) for k in (0, 1)] == pytest.approx([1e-6, 1e-6])
    ramp = [lr(3e-7, 4, 100, k) for k in range(101)]
    assert ramp[3] == pytest.approx(1e-6) and ramp[99] == pytest.approx(3e-7) and ramp[100] == pytest.approx(3e-7)
    assert np.diff(ramp[3:100]) == pytest.approx([-7e-7 / 96] * 96), "not linear"
    assert all(math.isfinite(lr(3e-7, 4, total, k)) for total in (0, 1, 4, 5) for k in range(6))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_deal_is_even_complete_and_deterministic(world):
    """Long-tailed samples dealt round robin left ranks waiting; dealt at random, runs would differ."""
    for seed in range(10):
        rng = random.Random(seed)
        sizes = [min(8192, 200 + int(rng.lognormvariate(6.5, 1.2))) for _ in range(32 * world + rng.randint(0, 9))]
        samples = rng.sample(range(len(sizes)), 32 * world)
        dealt = ppo.deal(sizes, samples, world)
        assert len(dealt) == world and sorted(i for part in dealt for i in part) == sorted(samples)
        loads = [sum(sizes[i] for i in part) for part in dealt]
        assert max(loads) - min(loads) <= 0.02 * max(loads), "the fullest rank and the emptiest"
        assert dealt == ppo.deal(sizes, samples[::-1], world), "the order of the list decides"
    assert sorted(map(len, ppo.deal([3, 1], [0, 1], 4))) == [0, 0, 1, 1]


@pytest.mark.parametrize("ranks,name", [(1, "zero0"), (1, "zero1"), (1, "zero3"), (2, "zero2"), (2, "zero3"),
                                        (2, "zero3, long rows")])
def test_named_weights_are_a_hugging_face_state_dict(ranks, name, results, models):
    """Every name, whole tensors under ZeRO-3, the tied head named too (vLLM on a CPU keeps the old one otherwise)."""
    spec = next(c for c in (ONE, TWO)[ranks - 1] if c["name"] == name)
    result, folder = results(ranks)(name), models[spec["tied"]]
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder))
    assert set(result["policy"]) == set(model.state_dict())
    assert all(result["policy"][key].shape == tensor.shape for key, tensor in model.state_dict().items())
    model.load_state_dict(result["policy"], strict=True)
    if spec["tied"]:
        assert torch.equal(result["policy"]["lm_head.weight"], result["policy"]["model.embed_tokens.weight"])
    body = AutoModel.from_pretrained(folder)
    assert set(result["critic"]) == set(body.state_dict()) | {"value_head.weight"}
    for key, tensor in body.state_dict().items():
        assert torch.equal(result["critic_start"][key], tensor), "the critic does not start from the base model's body"


def test_check_architecture():
    """Layers that reach across a row's samples must be refused: windows, recurrent states, mixtures of them."""
    for good in (Qwen2Config(), Qwen2Config(use_sliding_window=False, sliding_window=4096), Qwen3Config(),
                 LlamaConfig(), MistralConfig(sliding_window=None)):
        check_architecture(good)
    for bad in (Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=2), Gemma2Config(),
                MistralConfig(sliding_window=4096), Qwen3NextConfig(), JambaConfig(), MambaConfig(), Mamba2Config()):
        with pytest.raises(ValueError, match="cannot be packed"):
            check_architecture(bad)
