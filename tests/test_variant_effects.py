"""Each variant does what its docstring says, and each pair is refused or does what neither does.

Three steps are taken without engines. Samples come from a hash of their requests, and policy and
critic are 23 numbers each. All other code is the product's. `expected`, which is written from the
variants' docstrings in loops and float64, says what the steps must make of these numbers.
`python test_variant_effects.py` compares in one of several ranks.
"""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import naive
import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from conftest import config, started_ranks

import ckpt
import ppo
import rollout
import train
from lib import common, metrics, models
from lib.advice import VARIANTS
from lib.common import UserError, hash64
from lib.flags import flags_of

pytestmark = pytest.mark.usefixtures("process_group")
# fp16 needs DeepSpeed's engines, lora those of a whole run (test_variant_runs.py), fp8 a GPU.
NAMES = sorted({path.stem for path in VARIANTS.glob("*.py")} - {"fp16", "fp8_rollout", "lora"})
# These only log.
LOGGERS = ("log_kl", "log_ratio")
NAMES = [name for name in NAMES if name not in LOGGERS]
STEPS = 3
SETTINGS = {"task": "countdown", "seed": 8, "n_samples_per_prompt": 8, "generate_max_len": 12}
SETTINGS |= {"max_len": 14, "prompt_max_len": 8, "packing_max_len": 40, "critic_updates": 3}
SETTINGS |= {"actor_learning_rate": 9, "critic_learning_rate": 9}
OWN = {
    "overlong_penalty": {"overlong_cache": 6},
    "tis_cap": {"tis_cap": 1.1},
    "kl_penalty": {"gamma": 0.9, "lambd": 0.8},
    "critic_first": {"critic_only_steps": 1},
    "critic_lambd": {"lambd": 0.5, "critic_lambd": 0.9},
    "lr_end": {"lr_end": 0.5},
    # Its loss is that of whole samples if all tokens of a sample have the same advantage.
    "gspo": {"estimator": "reinforce", "policy_clip": 0.03, "policy_clip_high": 0.04},
}
# Each variant, and some of them once more with other flags.
CASES = [(name, OWN.get(name, {})) for name in NAMES]
CASES += [("kl_penalty", {"estimator": "reinforce"}), ("first_stage", {"task": "code"})]
CASES += [("loss_mean", {"loss_mean": "constant"})]
MATH = ["format_reward", "lenient_reward", "majority_vote", "curriculum", "first_stage"]
CASES += [(name, {"task": "math"}) for name in MATH]
LONG = {"generate_max_len": 40, "max_len": 50, "packing_max_len": 60, "n_samples_per_prompt": 10}
# In the last case every sample is cut.
CASES += [("adaptive_len", LONG), ("overlong_drop", {"generate_max_len": 1})]

# Of each task: the responses with their value, the verifier's reward where that is the problem's
# target, whether a response has the form that is asked for, and what it claims.
TEXTS = {
    "countdown": {
        "8+5=13<\n9+8=17!": ("17", 1, 1, "17"),
        "8+9": ("17", 1, 0, ""),
        "9+8=16": ("17", 0, 1, "16"),
        "1+1=17!": ("2", 0, 1, "17"),
        "9*2=18>": ("18", 1, 1, "18"),
        "9+8=17!\n8-1": ("7", 0, 0, ""),
        "9+1=10<": ("10", 0, 1, "10"),
        "8/1=8": ("8", 0, 1, "8"),
        "nothing": (None, 0, 0, ""),
        "": (None, 0, 0, ""),
    },
    "math": {
        "<answer>\\boxed{18}</answer>": ("18", 1, 1, "18"),
        "<answer>\\boxed{17}</answer>": ("17", 1, 1, "17"),
        "Then <answer>\\boxed{17}</answer>": ("17", 1, 1, "17"),
        "perhaps 16, or 17": (None, 0, 0, "17"),
    },
    "code": {"half of the tests": ("17", 0.5, 1, ""), "no test": (None, 0, 0, "")},
}
TARGETS = [17, 18, 17, 18, 17]
# Of countdown few numbers are easy, and then large targets. In other tasks short questions are.
DIFFICULTY = [1, 2, 1, 0, 1]


def make_problems(cfg):
    problems = []
    for index, target in enumerate(TARGETS):
        pick = None if index == 1 else 2
        label = {"target": target, "numbers": [1, 8, 9, 9], "pick": pick}
        label = label if cfg.task == "countdown" else str(target)
        problem = {"index": index, "label": label, "question": "?" * DIFFICULTY[index]}
        problems.append(SimpleNamespace(**problem, prompt_ids=[1 + index, 2, 3]))
    return problems


def respond(cfg, request) -> rollout.Sample:
    """In place of vLLM and of the grader."""
    seed = hash64(request.seed, request.problem.index)
    # Most are short, so that a limit that follows them cuts the long ones.
    wanted = 2 + seed % 5 + (9 if seed % 13 == 0 else 0)
    ids = [7] * min(wanted, request.max_tokens)
    reason = "stop" if wanted <= request.max_tokens else "length"
    text = list(TEXTS[cfg.task])[hash64(seed, "text") % len(TEXTS[cfg.task])]
    value, reward, *_ = TEXTS[cfg.task][text]
    is_right = reason == "stop" and value == str(TARGETS[request.problem.index])
    logprobs = [-0.5 - (seed + k) % 3 / 2 for k in range(len(ids))]
    answer = value if reason == "stop" else None
    return rollout.Sample(request, ids, logprobs, text, reason, is_right * float(reward), answer)


START = {
    "policy": torch.linspace(-2, -0.1, 23),
    "critic": torch.linspace(-0.5, 1, 23),
    "reference": torch.linspace(-1.7, -0.3, 23),
}


class Learner:
    """A model of 23 numbers: token k of a batch has number k modulo 23."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name = name
        self.numbers = START[name].clone().requires_grad_()

    def __call__(self, micro, temperature=None):
        # A filler's number must not matter.
        numbers = self.numbers[micro.flat_index % 23] + 1e4 * (1 - micro.mask)  # (t,)
        return numbers if self.name == "critic" else (numbers, numbers.cos())

    def backward(self, loss, is_last):
        loss.backward()

    def apply_update(self, lr):
        # The real engines average over the ranks too.
        dist.all_reduce(self.numbers.grad)
        with torch.no_grad():
            self.numbers -= lr * self.numbers.grad / dist.get_world_size()
        self.numbers.grad = None
        return 1.0


def take_steps(names, flags):
    """What the product makes of policy and critic, and each step's numbers to log."""
    cfg = config(variant=names or None, **SETTINGS | flags)
    policy, critic, cfg._reference = (Learner(name) for name in START)
    problems = make_problems(cfg)
    logs = []

    def draw(requests, clock):
        samples = [respond(cfg, request) for request in requests]
        return (
            samples
            if "log_ratio" in cfg.variant_texts
            else [replace(x, logprobs=None) for x in samples]
        )

    train.check_flags(cfg, 2)
    cfg.check_run(STEPS)
    has_critic = cfg.estimators[cfg.estimator].needs_critic
    for step in range(STEPS):
        clock = metrics.Clock(step + 1)
        requests = rollout.requests_of_step(problems, cfg, step)
        samples = cfg.draw_step(SimpleNamespace(draw=draw), requests, problems, step, clock)
        batch = ppo.make_batch(samples, policy.device, cfg)
        cfg.token_passes(policy, critic if has_critic else None, batch, step)
        log = ppo.compute_advantages(batch, cfg)
        if has_critic:
            log |= cfg.train_critic(critic, batch, step)
        log |= cfg.train_policy(policy, batch, step, STEPS)
        log |= clock.numbers | metrics.of_samples(samples, batch)
        log = cfg.metrics(log | {"seconds": 2.0, "tokens_per_second": 500.0}, samples, batch)
        log["counted_tokens"] = log["tokens_per_second"] * log["seconds"]
        for memory in cfg.memory.values():
            log |= memory
        logs.append(log)
        losses = [(policy, cfg.policy_loss), (critic, cfg.critic_loss)]
        for learner, loss in losses if has_critic else losses[:1]:
            nothing, _ = loss(learner, batch, ppo.filler(policy.device))
            assert nothing.item() == 0, "a filler adds nothing"
    return torch.cat([policy.numbers.detach(), critic.numbers.detach()]), logs


# ---- what is drawn -------------------------------------------------------------------------------


def by(key, samples):
    parts = {}
    for sample in samples:
        parts.setdefault(getattr(sample.request, key), []).append(sample)
    return parts


def draw_dynamic_sampling(cfg, requests, problems, memory, step):
    samples = [respond(cfg, request) for request in requests]
    groups = by("group", samples)
    log = {"reward_drawn": naive.mean([x.reward for x in samples]), "tokens_dropped": 0}
    for number in range(4):
        flat = [key for key in groups if len({x.reward for x in groups[key]}) == 1]
        other = replace(cfg, seed=hash64(cfg.seed, "round", number))
        new = rollout.requests_of_step(problems, other, step)
        for k, key in enumerate(flat):
            log["tokens_dropped"] += sum(3 + len(x.response_ids) for x in groups[key])
            again = [replace(request, group=key) for request in new if request.group == k]
            groups[key] = [respond(cfg, request) for request in again]
    log["counted_tokens"] = 1000 + log["tokens_dropped"]
    return sum(groups.values(), []), log


def draw_first_stage(cfg, requests, problems, memory, step):
    drawn = []
    log = {"prompts_expanded": 0, "tokens_saved": 0}
    before = dict(memory)
    memory |= {request.problem.index: False for request in requests}
    for group in by("group", [respond(cfg, request) for request in requests]).values():
        index = group[0].request.problem.index
        first = {x.reward for x in group[:4]}
        is_hopeful = first == {0} and before.get(index, True) and cfg.task != "code"
        kept = group if len(first) > 1 or is_hopeful else group[:4]
        memory[index] = memory[index] or any(x.reward for x in kept)
        log["prompts_expanded"] += (len(kept) == 8) / 4
        log["tokens_saved"] += (8 - len(kept)) * naive.mean([len(x.response_ids) for x in kept])
        drawn += kept
    return drawn, log


def draw_adaptive_len(cfg, requests, problems, memory, step):
    def limit(index):
        return memory.get(index, memory.get("", cfg.generate_max_len))

    samples = []
    for request in requests:
        samples.append(respond(cfg, replace(request, max_tokens=limit(request.problem.index))))
    limits = {}
    for index in ["", *(x.request.problem.index for x in samples)]:
        part = [x for x in samples if index in ("", x.request.problem.index)]
        ended = [len(x.response_ids) for x in part if x.finish_reason == "stop"]
        is_enough = len(ended) >= 0.9 * len(part)
        wanted = int(1.5 * max(ended)) if is_enough else 2 * limit(index)
        limits[index] = min(cfg.generate_max_len, wanted)
    memory |= limits
    return samples, {}


def draw_curriculum(cfg, requests, problems, memory, step):
    chosen = []
    for position in range(4 * step, 4 * step + 4):
        number, offset = divmod(position, 5)
        shuffled = ppo.Recipe.episode_order(cfg, problems, number)
        chosen.append(problems[sorted(shuffled, key=lambda i: DIFFICULTY[i])[offset]])
    seeds = rollout.problem_seeds(cfg.seed, step, "train", 4)
    again = rollout.make_requests(chosen, seeds, 8, cfg.generate_max_len, 1.0, 1.0)
    return [respond(cfg, request) for request in again], {}


DRAWS = {
    "dynamic_sampling": draw_dynamic_sampling,
    "first_stage": draw_first_stage,
    "adaptive_len": draw_adaptive_len,
    "curriculum": draw_curriculum,
}

# ---- what is paid --------------------------------------------------------------------------------


def pay_majority_vote(sample, mates, cfg):
    votes = [mate.answer for mate in mates if mate.answer]
    return votes != [] and sample.answer == max(votes, key=votes.count)


def pay_overlong_penalty(sample, mates, cfg):
    """Prompts have 3 tokens, and the last 6 before the limit cost."""
    return sample.reward - max(0, len(sample.response_ids) - (min(12, 14 - 3) - 6)) / 6


def pay_format_reward(sample, mates, cfg):
    return sample.finish_reason == "stop" and TEXTS[cfg.task][sample.text][2]


def pay_lenient_reward(sample, mates, cfg):
    target = str(TARGETS[sample.request.problem.index])
    return sample.finish_reason == "stop" and TEXTS[cfg.task][sample.text][3] == target


PAYS = {
    "inverted_reward": lambda sample, *_: 1 - sample.reward,
    "random_reward": lambda sample, *_: hash64(sample.request.seed, "coin") % 2,
    "hash_reward": lambda sample, *_: hash64(sample.text) % 2,
    "majority_vote": pay_majority_vote,
    "overlong_penalty": pay_overlong_penalty,
    "format_reward": pay_format_reward,
    "lenient_reward": pay_lenient_reward,
}

# ---- what is learnt ------------------------------------------------------------------------------

# By the advantages, the policy's log-probs and other ones: of the reference, of the policy before
# its updates, or of the sampler. GSPO's are the means of samples.
LOSSES = {
    "kl_loss": ("reference", lambda a, p, q: -a * p + 0.1 * ((q - p).exp() - 1 - (q - p))),
    "entropy_bonus": ("policy", lambda a, p, _: -a * p - 0.01 * p.cos()),
    "several_updates": ("policy", lambda a, p, _: -a * p),
    "updates": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.2, 0.2)),
    "clip_higher": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.2, 0.28)),
    "gspo": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.03, 0.04)),
    "cispo": ("policy", lambda a, p, old: -((p - old).exp().clamp(max=2).detach() * a * p)),
    "tis_cap": ("sampler", lambda a, p, q: -((p - q).exp().clamp(max=1.1).detach() * a * p)),
}


def expected(name, flags):
    """What three steps should make of policy and critic, and some of the numbers to log."""
    cfg = config(variant=name, **SETTINGS | flags)
    tables = {key: numbers.double() for key, numbers in START.items()}
    memory = {}
    logs = [expected_step(name, cfg, step, tables, memory) for step in range(STEPS)]
    return torch.cat([tables["policy"], tables["critic"]]).float(), logs


def expected_step(name, cfg, step, tables, memory):
    problems = make_problems(cfg)
    requests = rollout.requests_of_step(problems, cfg, step)
    samples, log = [respond(cfg, request) for request in requests], {}
    if name in DRAWS:
        samples, log = DRAWS[name](cfg, requests, problems, memory, step)
    mates = by("group", samples)
    paid = [sample.reward for sample in samples]
    if name in PAYS:
        paid = [float(PAYS[name](x, mates[x.request.group], cfg)) for x in samples]
    log |= {str(index): value for index, value in memory.items()}
    log |= {"reward": naive.mean([x.reward for x in samples]), "paid": naive.mean(paid)}

    # Tokens are flat, (T,). What is of a sample is a list.
    lengths = [len(sample.response_ids) for sample in samples]
    owner = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))  # (T,)
    others = {key: table[torch.arange(len(owner)) % 23] for key, table in tables.items()}
    others["sampler"] = torch.tensor(sum([x.logprobs for x in samples], [])).double()
    values = others["critic"]
    counting = [i for i, x in enumerate(samples) if x.finish_reason == "stop"]
    counting = counting if name == "overlong_drop" else list(range(len(samples)))
    if not counting:
        return log

    penalties = 0.01 * (others["reference"] - others["policy"]) * (name == "kl_penalty")
    penalties = [part.tolist() for part in penalties.split(lengths)]
    if cfg.estimator == "gae":
        parts = [part.tolist() for part in values.split(lengths)]
        advantages = []
        for base, penalty in zip(naive.gae(paid, parts, cfg.gamma, cfg.lambd), penalties):
            for t in range(len(base)):
                advantages.append(base[t] + sum(0.72**k * x for k, x in enumerate(penalty[t:])))
        advantages = torch.tensor(advantages).double()
        returns = advantages + values
        if name == "critic_lambd":
            returns = torch.tensor(sum(naive.gae(paid, parts, 1, 0.9), [])).double() + values
        rates = [9 * min(1, (3 * step + k) / 2) for k in (1, 2, 3)]

        def value_loss(now, chosen):
            return naive.clipped_value_loss(now, values, returns, 0.2)

        seed = hash64(cfg.seed, step, "critic")
        tables["critic"] = learn(tables["critic"], value_loss, owner, counting, rates, seed)
    else:
        paid = [score + sum(penalty) for score, penalty in zip(paid, penalties)]
        groups = [sample.request.group for sample in samples]
        advantages = torch.tensor(naive.scores(cfg.estimator, paid, groups, k=4))[owner]
    is_whitened = cfg.estimator in ("gae", "reinforce", "reinforce_pp")
    if is_whitened and name != "no_whitening":
        used = advantages[torch.isin(owner, torch.tensor(counting))]
        advantages = (advantages - used.mean()) / used.std(correction=0)

    if name == "loss_mean":
        ones = torch.ones_like(advantages, requires_grad=True)
        responses = SimpleNamespace(response_ids=[x.response_ids for x in samples])
        naive.mean_loss(ones, responses, cfg).backward()
        advantages = advantages * ones.grad * len(advantages)
    other, loss = LOSSES.get(name, ("policy", lambda a, p, _: -a * p))
    shares = []

    def policy_loss(now, chosen):
        before = others[other]
        if name == "gspo":
            # The log-probs of GSPO are the means of samples.
            now, before = (
                torch.stack([part.mean() for part in numbers.split(lengths)])[owner]
                for numbers in (now, before)
            )
            ratio = (now - before).exp()[chosen]
            shares.append(((ratio < 0.97) | (ratio > 1.04)).double().mean().item())
            log["clipped"] = naive.mean(shares)
        return loss(advantages, now, before)

    several = ("several_updates", "updates", "clip_higher", "cispo", "gspo")
    count = 8 if name in several else 1
    updates = range(step * count + 1, step * count + count + 1)
    fall = 8.5 / (STEPS * count - 2) if name == "lr_end" else 0
    if name == "critic_first":
        updates = range(step, step + 1) if step > 0 else []
    rates = [9 * min(1, n / 2) - fall * max(0, n - 2) for n in updates]
    if not rates:
        return log
    seed = hash64(cfg.seed, step, "policy")
    tables["policy"] = learn(tables["policy"], policy_loss, owner, counting, rates, seed)
    return log


def learn(table, loss, owner, counting, rates, seed):
    """The table after an update at each rate, each over its part of one shuffle."""
    shuffle = np.random.default_rng(seed).permutation(counting)
    for part, rate in zip(np.array_split(shuffle, min(len(rates), len(shuffle))), rates):
        table = table.detach().requires_grad_()
        now = table[torch.arange(len(owner)) % 23]
        chosen = torch.isin(owner, torch.tensor(part))
        mean = loss(now, chosen)[chosen].sum() / chosen.sum()
        table = table - rate * torch.autograd.grad(mean, table)[0]
    return table.detach()


# ---- the tests -----------------------------------------------------------------------------------


def hold(name, flags):
    found, logs = take_steps((name,), flags)
    wanted, wanted_logs = expected(name, flags)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for log, numbers in zip(logs, wanted_logs):
        assert {key: log[key] for key in numbers} == pytest.approx(numbers)


@pytest.mark.parametrize("name, flags", CASES)
def test_a_variant_does_what_it_says(name, flags):
    hold(name, flags)


@pytest.mark.slow
def test_a_variant_does_the_same_on_two_ranks():
    """All samples are learnt from, where a rank has its share of the samples only."""
    with started_ranks([__file__]) as ranks:
        for rank in ranks:
            said, errors = rank.communicate(timeout=300)
            assert f"{len(CASES)} cases hold" in said.splitlines(), errors[-3000:]


@functools.cache
def learnt(*names):
    """What the steps make of policy and critic, or the text of their refusal."""
    try:
        # By default the policy would learn in none of the three steps.
        flags = {"critic_only_steps": 1} if "critic_first" in names else {}
        return take_steps(names, flags)[0]
    except UserError as error:
        return str(error)


def differs(one, two):
    return not torch.allclose(one, two, rtol=1e-4, atol=1e-6)


def test_each_variant_changes_what_is_learnt():
    """Its own defaults suffice for that. Those that log change nothing."""
    for name in LOGGERS:
        assert torch.equal(learnt(name), learnt()), name
    for name in NAMES:
        assert learnt(name).isfinite().all() and differs(learnt(name), learnt()), name


@pytest.mark.parametrize("name", naive.VARIANTS_COMPARE)
def test_an_estimator_computes_on_the_device(name, monkeypatch):
    """On a GPU a tensor of the CPU would be an error."""
    there = torch.ones(3, device="meta")
    monkeypatch.setattr(ppo, "group_stats", lambda *_: (there, there, there))
    cfg = config(variant=name)
    assert cfg.estimators[name].function(there, there, there, there, cfg).is_meta


# pass_at_k asks only whether what is paid is above 0, and no penalty reaches 1 there. Some variants
# are part of others. If the policy learns in two steps only, both are its warm-up.
EXCEPTIONS = [{"overlong_penalty", "pass_at_k"}, {"updates", "clip_higher"}]
EXCEPTIONS += [{"critic_first", "lr_end"}]
EXCEPTIONS += [{"several_updates", x} for x in ("updates", "clip_higher", "cispo", "gspo")]


@pytest.mark.slow
def test_every_ordered_pair_is_refused_or_does_what_neither_does_alone():
    """An order that the line of a refusal advises is accepted."""
    wrong = []
    refused = 0
    pairs = list(itertools.permutations(NAMES, 2))
    for one, two in pairs:
        found = learnt(one, two)
        if isinstance(found, str):
            refused += 1
            assert "\n" not in found and found.startswith("--"), (one, two, found)
            _, is_advised, order = found.partition("; use --variant ")
            if is_advised:
                config(variant=order.split())
            continue
        assert found.isfinite().all(), (one, two)
        for alone in ([], [one], [two]):
            if not differs(found, learnt(*alone)) and {one, two} not in EXCEPTIONS:
                wrong.append(f"{one} {two} is like {alone}")
    assert not wrong, "\n".join(wrong)
    assert refused < len(pairs) / 4


REFUSED = [
    (["critic_first"], {"critic_only_steps": 3}, "--critic_only_steps 3: .* in none of 3 steps"),
    (["log_ratio"], {"top_p": 0.9}, "--top_p 0.9: choose 1 with --variant log_ratio"),
    (["kl_penalty", "maxrl"], {}, "--estimator maxrl.* kl_penalty"),
    (["updates"], {"policy_updates": 0}, "--policy_updates 0.*at least 1"),
    (["critic_lambd"], {"critic_lambd": 1.5}, "--critic_lambd 1.5.*0 to 1"),
    (["critic_lambd"], {"estimator": "grpo"}, "--estimator grpo has no critic"),
    (["critic_first"], {"estimator": "rloo"}, "--estimator rloo has no critic"),
    (["lr_end"], {"lr_end": -1}, "--lr_end -1.*0 or more"),
    (["overlong_penalty"], {"overlong_cache": 0}, "--overlong_cache 0.*at least 1"),
    (["maxrl", "overlong_penalty"], {}, "--estimator maxrl.* negative"),
    (["tis_cap"], {"tis_cap": 0.5}, "--tis_cap 0.5.*at least 1"),
    (["first_stage"], {"first_stage": 0}, "--first_stage 0.*at least 1"),
    (["first_stage"], {"first_stage": 8}, "--first_stage 8.*--n_samples_per_prompt 8"),
    (["first_stage"], {"first_stage": 1, "estimator": "grpo"}, "--first_stage 1.* at least 2"),
    (["pass_at_k"], {"pass_k": 0}, "--pass_k 0.*at least 1"),
    # A set of k has no other set to be compared with.
    (["pass_at_k"], {"n_samples_per_prompt": 4}, "--n_samples_per_prompt 4.* at least 5"),
    (["pass_at_k", "first_stage"], {}, "--first_stage 4.* at least 5"),
    (["pass_at_k"], {"n_samples_per_prompt": 1, "pass_k": 1}, "use at least 2"),
    (["maxrl"], {"n_samples_per_prompt": 1}, "use at least 2"),
    (["dynamic_sampling", "first_stage"], {}, "--variant dynamic_sampling: name it behind"),
    (["no_whitening"], {"estimator": "grpo"}, "--variant no_whitening: grpo is not whitened"),
    (["loss_mean"], {"loss_mean": "token"}, "--loss_mean token: choose sequence or constant"),
    (["lora"], {"lora_rank": 0}, "--lora_rank 0.*at least 1"),
]


@pytest.mark.parametrize("names, flags, words", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(names, flags, words):
    with pytest.raises(UserError, match=words) as error:
        take_steps(names, flags)
    assert "\n" not in str(error.value)


def test_a_copy_of_a_variant_under_another_name_keeps_the_rules(tmp_path):
    """Once a copied first_stage was a traceback."""
    path = tmp_path / "my_first_stage.py"
    path.write_text(
        (VARIANTS / "first_stage.py").read_text().replace("class FirstStage", "class My")
    )
    copied = str(path)
    take_steps((copied,), {})
    with pytest.raises(UserError, match="--variant dynamic_sampling: name it behind"):
        take_steps(("dynamic_sampling", copied), {})


def test_maxrl_refuses_a_negative_reward():
    """A mean of 0 or less would turn the signs of the advantages around."""
    batch = SimpleNamespace(rewards=torch.tensor([1.0, -1.0]))
    with pytest.raises(UserError, match="maxrl: a reward is negative"):
        config(variant="maxrl").raw_advantages(batch)


def test_lr_end_refuses_another_last_step_after_a_resume():
    """The rate of each update depends on the last one."""
    cfg = config(variant="lr_end")
    cfg.check_run(100)
    other = config(variant="lr_end")
    other.memory.update(cfg.memory)
    other.check_run(100)
    with pytest.raises(UserError, match="^--variant lr_end: .* 100 steps, .* 90; keep --max_steps"):
        other.check_run(90)


def test_what_a_machine_lacks_is_refused_before_the_models_are_made(monkeypatch):
    """A plan of memory does not ask."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, words in (("lora", "requirements-extras.txt"), ("fp8_rollout", "needs a GPU")):
        cfg = config(variant=name)
        train.check_flags(cfg, 2)
        with pytest.raises(UserError, match=f"^--variant {name}.*{words}"):
            cfg.check_run(9)


@pytest.mark.slow
def test_fp16_learns_what_fp32_learns(tmp_path):
    """The loss is multiplied by a factor, and the gradient divided by it. On overflow no update is
    made, and the factor is halved. A checkpoint keeps the factor."""
    model = tiny.make_model(tmp_path / "model", tied=False)
    cfg = config(variant="fp16", model=model, actor_learning_rate=1e-2, warmup_updates=1)
    requests = rollout.requests_of_step(make_problems(cfg), cfg, 0)
    samples = [respond(replace(cfg, task="math"), request) for request in requests[:4]]
    batch = ppo.make_batch(samples, torch.device("cpu"), cfg)
    accelerator = models.deepspeed.get_accelerator()
    # DeepSpeed refuses fp16 on CPUs, where it is slow. All else is as on a GPU.
    allowed = mock.patch.object(accelerator, "is_fp16_supported", lambda: True)
    with allowed:
        for stage in (2, 3):
            half = replace(cfg, bf16=True, zero_stage=stage)
            policy = models.make_policy(half)
            before = weights_of(policy)
            assert before.dtype == torch.float16
            scaler = policy.deepspeed.optimizer.loss_scaler
            assert scaler.cur_scale == 2**16
            batch.per_token["advantages"] = batch.spread(torch.tensor([1e3, -1e3, 1e3, -1e3]))
            stats = half.train_policy(policy, batch, step=0, total_steps=9)
            assert stats["policy_grad_norm"] == 0 and scaler.cur_scale == 2**15
            assert weights_of(policy).equal(before)
            run = tmp_path / str(stage)
            state = ckpt.RunState(1, 9, 1, flags_of(half))
            assert not ckpt.save(run, state, {"policy": policy.deepspeed}, [], 1)
            policy = models.make_policy(half)
            ckpt.resume(run, run / "step_000001", {"policy": policy.deepspeed}, state)
            assert policy.deepspeed.optimizer.loss_scaler.cur_scale == 2**15
            # These are small enough.
            batch.per_token["advantages"] /= 1e4
            norms = []
            changes = []
            for learner, settings in ((models.make_policy(cfg), cfg), (policy, half)):
                before = weights_of(learner)
                norms.append(settings.train_policy(learner, batch, 0, 9)["policy_grad_norm"])
                changes.append((weights_of(learner) - before).float())
            assert norms[1] == pytest.approx(norms[0], rel=0.01)
            assert torch.cosine_similarity(*changes, dim=0) > 0.98
        assert rollout.make_settings(half, True)["dtype"] == "float16"
        assert rollout.make_settings(cfg, True)["dtype"] == "float32"


def weights_of(learner) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in models.named_weights(learner)])


if __name__ == "__main__":
    common.start_distributed()
    # Where a case does not hold, this rank ends, and the other one with it.
    for case in CASES:
        hold(*case)
    print(len(CASES), "cases hold", flush=True)
    dist.barrier()
