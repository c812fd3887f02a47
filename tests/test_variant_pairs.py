"""Every ordered pair of variants is refused in one line, or does what neither does alone.

Three steps are taken without engines. Samples are made from their requests by a hash, and the
policy is a table of bigrams. All else is the product's code.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import ppo
import rollout as rollout_stage
import train
from lib import check, metrics
from lib.common import UserError, hash64
from lib.variants import Variants
from tasks import countdown

TOKENS = 24
TEXTS = ["9+8=17!", "1+1=17!", "8+9=17!", "9*5=45>", "5+4=9<", "", "9-8=17", "nothing", "9+8=16"]
LABEL = {"numbers": [5, 9, 8, 4], "target": 17, "pick": 2}
FLAGS = """--data x --task countdown --rollout_batch_size 4 --n_samples_per_prompt 6 --bf16 false
    --zero_stage 0 --generate_max_len 12 --max_len 20 --packing_max_len 40 --critic_updates 3
    --prompt_max_len 8 --actor_learning_rate 3 --critic_learning_rate 0.5
    --warmup_updates 2 --max_norm 0"""
# These make engines; tests/test_variant_effects.py trains with them.
WITH_ENGINES = {"lora", "fp16"}
NAMES = sorted({path.stem for path in (ROOT / "variants").glob("*.py")} - WITH_ENGINES)
OWN_FLAGS = {
    "first_stage": "--first_stage 3",
    "overlong_penalty": "--overlong_cache 6",
    "tis_cap": "--tis_cap 1.01",
    "pass_at_k": "--pass_k 2",
    "kl_penalty": "--kl_penalty_coef 0.3",
    "kl_loss": "--kl_loss_coef 0.3",
    "entropy_bonus": "--entropy_coef 0.1",
    "updates": "--policy_updates 3",
    "dynamic_sampling": "--sampling_rounds 1",
}
NEEDS = {"clip_higher": ["updates"]}


class Bigrams:
    """A policy or a critic whose parameter is a table: of logits, or of values."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name = name
        shape = (TOKENS, TOKENS) if name != "critic" else (TOKENS,)
        generator = torch.Generator().manual_seed(len(name))
        self.table = torch.randn(shape, generator=generator).requires_grad_()

    def __call__(self, micro, temperature=None):
        rows = self.table[micro.input_ids[micro.predict]]
        if self.name == "critic":
            return rows
        log_p = (rows / temperature).log_softmax(-1)
        return log_p.gather(1, micro.token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        norm = self.table.grad.norm().item()
        with torch.no_grad():
            self.table -= lr * self.table.grad
        self.table.grad = None
        return norm


def draw_by_hash(rollout, requests, clock):
    """In place of vLLM and of the grader's processes."""
    grader = countdown.Grader()
    samples = []
    for position, request in enumerate(requests):
        seed = hash64(request.seed, request.problem.index)
        # Most are short, so that a limit that follows them cuts the long ones.
        wanted = 1 + seed % 5 + (10 if seed % 13 == 0 else 0)
        ids = [hash64(seed, k) % TOKENS for k in range(min(wanted, request.max_tokens))]
        reason = "stop" if wanted <= request.max_tokens else "length"
        text = TEXTS[hash64(seed, "text") % len(TEXTS)]
        logprobs = [-1.0 - (token % 5) / 2 for token in ids]
        sample = rollout_stage.Sample(request, ids, logprobs, text, reason)
        sample.answer = grader.submit(position, text, reason, request.problem.label)
        samples.append(sample)
    for position, reward in grader.results().items():
        samples[position].reward = reward
    return samples


def problems():
    found = []
    for k in range(5):
        label = LABEL | {"target": 17 + k % 2}
        found.append(countdown.Problem(k, "", label, "", [1 + k, 2, 3]))
    return found


def take_steps(words):
    """What three steps with these variants have made of policy and critic. Raises UserError."""
    flags = FLAGS.split()
    for word in words:
        flags += OWN_FLAGS.get(word, "").split()
    cfg = train.parse_flags([*flags, *(["--variant", *words] if words else [])])
    policy, critic, reference = Bigrams("policy"), Bigrams("critic"), Bigrams("reference")
    with cfg.variants.installed(train.stages()):
        check.check_config(cfg, 1, ppo.ESTIMATORS)
        if not ppo.ESTIMATORS[cfg.estimator].needs_critic:
            critic = None
        rollout = SimpleNamespace(cfg=cfg)
        for step in range(3):
            clock = metrics.Clock(step + 1)
            requests = rollout_stage.requests_of_step(problems(), cfg, step)
            samples = rollout_stage.draw_step(rollout, requests, problems(), cfg, step, clock)
            if not cfg.log_ratio:
                for sample in samples:
                    sample.logprobs = None
            batch = ppo.make_batch(samples, torch.device("cpu"), cfg)
            passed = reference if cfg.log_kl else None
            ppo.token_passes(policy, critic, passed, batch, cfg, step)
            ppo.compute_advantages(batch, cfg)
            if critic:
                ppo.train_critic(critic, batch, cfg, step)
            ppo.train_policy(policy, batch, cfg, step, 9)
    tables = [policy.table] + ([critic.table] if critic else [])
    return torch.cat([table.detach().flatten() for table in tables])


@pytest.fixture
def learnt(process_group, monkeypatch):
    """learnt(words): what `take_steps` returns, or the text of its refusal; each computed once."""
    monkeypatch.setattr(rollout_stage, "draw", draw_by_hash)
    known = {}

    def of(words):
        if words not in known:
            try:
                known[words] = take_steps(words)
            except UserError as error:
                known[words] = str(error)
        return known[words]

    return of


def differs(one, two):
    return one.shape != two.shape or not torch.allclose(one, two, rtol=1e-4, atol=1e-6)


def with_needs(*names):
    words = []
    for name in names:
        words += NEEDS.get(name, []) + [name]
    return tuple(dict.fromkeys(words))


def test_each_variant_changes_what_is_learnt(learnt):
    core = learnt(())
    for name in NAMES:
        alone = learnt(with_needs(name))
        assert not isinstance(alone, str), (name, alone)
        assert alone.isfinite().all(), name
        assert differs(alone, core), f"{name} does nothing here"


# {pair}: why the two together do no more than one of them.
PASS_AT_K = "pass_at_k asks only whether what is paid is above 0, and no penalty reaches 1 there"
EXCEPTIONS = {
    ("overlong_penalty", "pass_at_k"): PASS_AT_K,
    ("pass_at_k", "overlong_penalty"): PASS_AT_K,
}


@pytest.mark.slow
def test_every_ordered_pair_is_refused_or_does_what_neither_does_alone(learnt):
    refused = {}
    wrong = []
    for one, two in itertools.permutations(NAMES, 2):
        words = with_needs(one, two)
        if set(words) in ({*with_needs(one)}, {*with_needs(two)}) or (one, two) in EXCEPTIONS:
            continue
        found = learnt(words)
        if isinstance(found, str):
            refused[one, two] = found
            continue
        for alone in ((), with_needs(one), with_needs(two)):
            if not found.isfinite().all() or not differs(found, learnt(alone)):
                wrong.append((words, "is like", alone))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(refused) < 100
    for pair, text in refused.items():
        assert "\n" not in text and text.startswith("--"), (pair, text)


def test_where_one_order_is_refused_the_line_gives_one_that_works():
    for one, two in itertools.permutations(NAMES, 2):
        words = with_needs(one, two)
        try:
            Variants(words)
        except UserError as error:
            _, found, order = str(error).partition("; use --variant ")
            if found:
                Variants(order.split())
            else:
                assert "leave one of them out" in str(error), error
