"""Each variant does what its docstring says.

The steps are those of toy.py. `expected`, which is written from the variants' docstrings in loops
and float64, says what the steps must make of policy and critic.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import naive
import numpy as np
import pytest
import tiny
import torch
import toy
from conftest import config
from toy import SETTINGS, START, STEPS, TEXTS, make_problems, respond, take_steps

import ckpt
import ppo
import rollout
from nanoorz import models
from nanoorz.ranks import UserError, hash64
from tools import base_model

pytestmark = pytest.mark.usefixtures("process_group")

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
        chosen.append(problems[sorted(shuffled, key=lambda i: toy.DIFFICULTY[i])[offset]])
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
    """Prompts have 3 tokens, and the last 6 before the limit cost. A truncated response loses 1."""
    if sample.finish_reason == "length":
        return sample.reward - 1
    return sample.reward - max(0, len(sample.response_ids) - (min(12, 14 - 3) - 6)) / 6


def pay_format_reward(sample, mates, cfg):
    return sample.finish_reason == "stop" and TEXTS[cfg.task][sample.text][2]


def pay_lenient_reward(sample, mates, cfg):
    target = str(toy.TARGETS[sample.request.problem.index])
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
    "textbook_ppo": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.2, 0.2)),
    "clip_higher": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.2, 0.28)),
    "gspo": ("policy", lambda a, p, old: naive.clipped_ppo(p, old, a, 0.03, 0.04)),
    "cispo": ("policy", lambda a, p, old: -((p - old).exp().clamp(max=2).detach() * a * p)),
    "tis_cap": ("sampler", lambda a, p, q: -((p - q).exp().clamp(max=1.1).detach() * a * p)),
}
# `expected_step` names these.
OTHERS = ["critic_first", "critic_lambd", "kl_penalty", "loss_mean", "lr_end", "no_whitening"]
OTHERS += ["overlong_drop", "zero_values", "distill"]
NAMES = sorted([*DRAWS, *PAYS, *LOSSES, *OTHERS, *naive.VARIANTS])
OWN = {
    "overlong_penalty": {"overlong_cache": 6},
    "tis_cap": {"tis_cap": 1.1},
    "kl_penalty": {"gamma": 0.9, "lambd": 0.8},
    "critic_first": {"critic_only_steps": 1},
    "critic_lambd": {"lambd": 0.5, "critic_lambd": 0.9},
    "lr_end": {"lr_end": 0.5},
    "distill": {"teacher": "-", "teacher_weight": 0.25},
    # Its loss is that of whole samples if all tokens of a sample have the same advantage.
    "gspo": {"estimator": "reinforce", "policy_clip": 0.03, "policy_clip_high": 0.04},
}
# Each variant, and some of them once more with other flags.
CASES = [(name, OWN.get(name, {})) for name in NAMES]
CASES += [("kl_penalty", {"estimator": "reinforce"}), ("first_stage", {"task": "code"})]
CASES += [("loss_mean", {"loss_mean": "constant"})]
CASES += [("distill", {"teacher": "-", "estimator": x}) for x in ("reinforce", "grpo")]
MATH = ["format_reward", "lenient_reward", "majority_vote", "curriculum", "first_stage"]
CASES += [(name, {"task": "math"}) for name in MATH]
LONG = {"generate_max_len": 40, "max_len": 50, "packing_max_len": 60, "n_samples_per_prompt": 10}
# Every sample is cut and has reward 0.
CUT = {"generate_max_len": 1, "estimator": "grpo"}
CASES += [("adaptive_len", LONG), ("overlong_drop", CUT), ("entropy_bonus", CUT)]
CASES += [("overlong_drop", CUT | {"estimator": "gae"})]


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
    has_critic = cfg.estimator == "gae"
    values = others["critic"] * has_critic
    counting = [i for i, x in enumerate(samples) if x.finish_reason == "stop"]
    counting = counting if name == "overlong_drop" else list(range(len(samples)))
    if not counting:
        return log

    penalties = 0.01 * (others["reference"] - others["policy"]) * (name == "kl_penalty")
    penalties = [part.tolist() for part in penalties.split(lengths)]
    if has_critic or name == "zero_values":
        parts = [part.tolist() for part in values.split(lengths)]
        advantages = []
        for base, penalty in zip(naive.gae(paid, parts, cfg.gamma, cfg.lambd), penalties):
            for t in range(len(base)):
                advantages.append(base[t] + sum(0.72**k * x for k, x in enumerate(penalty[t:])))
        advantages = torch.tensor(advantages).double()
    else:
        paid = [score + sum(penalty) for score, penalty in zip(paid, penalties)]
        groups = [sample.request.group for sample in samples]
        advantages = torch.tensor(naive.scores(cfg.estimator, paid, groups, k=4))[owner]
    if has_critic:
        returns = advantages + values
        if name == "critic_lambd":
            returns = torch.tensor(sum(naive.gae(paid, parts, 1, 0.9), [])).double() + values
        count = cfg.critic_updates
        rates = [9 * min(1, (count * step + k + 1) / 2) for k in range(count)]

        def value_loss(now, chosen):
            return naive.clipped_value_loss(now, values, returns, 0.2)

        seed = hash64(cfg.seed, step, "critic")
        shared = (owner, counting, rates, seed)
        tables["critic"] = learn(tables["critic"], value_loss, *shared)
    is_whitened = cfg.estimator in ("gae", "zero_values", "reinforce", "reinforce_pp", "gdpo")
    if is_whitened and name != "no_whitening":
        used = advantages[torch.isin(owner, torch.tensor(counting))]
        advantages = (advantages - used.mean()) / used.std(correction=0)

    if name == "distill":
        log_ratio = others["teacher"] - others["policy"]
        share = cfg.teacher_weight
        advantages = share * log_ratio + (1 - share) * advantages
        log |= {"teacher_k1": -log_ratio.mean().item()}
        log |= {"teacher_k3": (log_ratio.exp() - 1 - log_ratio).mean().item()}

    if name == "loss_mean":
        ones = torch.ones_like(advantages, requires_grad=True)
        responses = SimpleNamespace(drawn=[x.drawn for x in samples])
        naive.mean_loss(ones, responses, cfg).backward()
        advantages = advantages * ones.grad * len(advantages)
    other, loss = LOSSES.get(name, ("policy", lambda a, p, _: -a * p))
    shares = []

    def mean_of_sample(numbers):
        return torch.stack([part.mean() for part in numbers.split(lengths)])[owner]

    def policy_loss(now, chosen):
        before = others[other]
        if name == "gspo":
            now, before = mean_of_sample(now), mean_of_sample(before)
            ratio = (now - before).exp()[chosen]
            shares.append(((ratio < 0.97) | (ratio > 1.04)).double().mean().item())
            log["clipped"] = naive.mean(shares)
        return loss(advantages, now, before)

    count = 8 if name in ("textbook_ppo", "clip_higher", "cispo", "gspo") else 1
    updates = range(step * count + 1, step * count + count + 1)
    fall = 8.5 / (STEPS * count - 2) if name == "lr_end" else 0
    if name == "critic_first":
        # The first step is the critic's.
        if step == 0:
            return log
        updates = [step]
    rates = [9 * min(1, n / 2) - fall * max(0, n - 2) for n in updates]
    seed = hash64(cfg.seed, step, "policy")
    shared = (owner, counting, rates, seed)
    tables["policy"] = learn(tables["policy"], policy_loss, *shared)
    return log


def learn(table, loss, owner, counting, rates, seed):
    """The table after an update at each rate, each over its part of one shuffle."""
    shuffle = np.random.default_rng(seed).permutation(counting)
    for part, rate in zip(np.array_split(shuffle, min(len(rates), len(shuffle))), rates):
        chosen = torch.isin(owner, torch.tensor(part))
        table = table.detach().requires_grad_()
        now = table[torch.arange(len(owner)) % 23]
        mean = loss(now, chosen)[chosen].mean()
        table = table - rate * torch.autograd.grad(mean, table)[0]
    return table.detach()


# ---- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, flags", CASES)
def test_a_variant_does_what_it_says(name, flags):
    found, logs = take_steps((name,), flags)
    wanted, wanted_logs = expected(name, flags)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for log, numbers in zip(logs, wanted_logs):
        assert {key: log[key] for key in numbers} == pytest.approx(numbers, rel=1e-4)


@pytest.mark.parametrize("name", ["log_kl", "log_ratio"])
def test_a_variant_that_logs_changes_nothing_else(name):
    assert torch.equal(take_steps((name,), {})[0], take_steps((), {})[0])


def test_ratio_far_is_the_share_of_tokens_with_a_ratio_beyond_2_or_below_a_half():
    logprobs = torch.tensor([1.0, 1.9, 2.1, 1 / 2.1, 1 / 1.9, 0.0]).log()
    batch = SimpleNamespace(per_token={"logprobs": torch.zeros(6)})
    micro = SimpleNamespace(flat_index=torch.arange(6), real=torch.ones(6))
    stats = {}
    config(variant="log_ratio").token_loss(logprobs, None, torch.ones(6), batch, micro, stats)
    assert stats["ratio_far"].tolist() == [False, False, True, True, False, True]


# ---- which groups are flat -----------------------------------------------------------------------

# The first samples of a problem as (answer, reward), and of the problem that takes its place. The
# labels' rewards are flat in both, and the votes are flat in the second one.
SPLIT = [("5", 0.0), ("5", 0.0), ("6", 0.0), ("6", 0.0)]
AGREED = [("5", 0.0), ("5", 0.0), ("5", 0.0), ("5", 0.0)]
SOLVED = [("5", 1.0), ("5", 1.0), ("6", 0.0), ("6", 0.0)]


def draw(variants, first, **flags):
    """The (answer, reward) of the samples of a step of one problem. Those of further draws are
    SOLVED."""
    flags |= {"estimator": "grpo", "generate_max_len": 9, "rollout_batch_size": 1}
    cfg = config(variant=variants, n_samples_per_prompt=4, **flags)
    problems = make_problems(cfg)[:1]

    def respond_as_told(requests, clock):
        samples = []
        for request in requests:
            told = first if request.seed in first_seeds else SOLVED
            answer, reward = told[request.sample_number]
            # The longer a response is, the more it loses by a penalty of length.
            ids = [7] * (5 + request.sample_number)
            samples.append(
                rollout.Sample(
                    request,
                    ids,
                    [True] * len(ids),
                    finish_reason="stop",
                    reward=reward,
                    answer=answer,
                )
            )
        return samples

    requests = rollout.requests_of_step(problems, cfg, 0)
    first_seeds = {request.seed for request in requests}
    stage = SimpleNamespace(draw=respond_as_told)
    samples = cfg.draw_step(stage, requests, problems, 0, SimpleNamespace(numbers={}))
    return [(sample.answer, sample.reward) for sample in samples]


def test_a_group_is_flat_by_what_a_variant_pays_in_place_of_the_grader():
    for variants in (["majority_vote", "dynamic_sampling"], ["dynamic_sampling", "majority_vote"]):
        assert draw(variants, SPLIT) == SPLIT
        assert draw(variants, AGREED) == SOLVED
    assert draw("dynamic_sampling", SPLIT) == SOLVED


def test_a_penalty_of_length_makes_no_group_differ():
    for variants in (
        ["overlong_penalty", "dynamic_sampling"],
        ["dynamic_sampling", "overlong_penalty"],
    ):
        assert draw(variants, AGREED, overlong_cache=6) == SOLVED


def test_the_first_stage_is_judged_by_what_is_paid():
    """Votes that differ expand a group, and those that agree do not. All labels' rewards are 0."""
    flags = {"first_stage": 3}
    assert draw(["majority_vote", "first_stage"], SPLIT, **flags) == SPLIT
    assert draw(["first_stage", "majority_vote"], AGREED, **flags) == AGREED[:3]
    assert draw("first_stage", AGREED, **flags) == AGREED, "a new problem gets all samples"


# ---- single rules --------------------------------------------------------------------------------


def test_equal_answers_are_one_vote():
    answers = ["3", "1/2", "3", "0.5", None, "\\frac{1}{2}", "2"]
    request = SimpleNamespace(group=0)
    samples = [SimpleNamespace(request=request, answer=answer) for answer in answers]
    assert config(variant="majority_vote").paid(samples) == [0, 1, 0, 1, 0, 1, 0]


def test_the_overlong_penalty_is_bounded_by_the_limit_of_each_request():
    """A limit of 10 tokens, of which 6 cost, and a limit of 4 tokens, of which all cost."""
    cfg = config(variant="overlong_penalty", overlong_cache=6, max_len=64)
    problem = SimpleNamespace(prompt_ids=[1, 2])
    paid = []
    for limit, length in ((10, 4), (10, 7), (10, 10), (4, 0), (4, 1), (4, 4)):
        request = SimpleNamespace(problem=problem, max_tokens=limit)
        sample = SimpleNamespace(request=request, response_ids=[7] * length, finish_reason="stop")
        sample.reward, sample.rewards = 1.0, None
        paid += cfg.paid([sample])
    assert paid == [1, 0.5, 0, 1, 0.75, 0]


REFUSED = [
    (
        ["critic_first"],
        {"critic_only_steps": 3, "max_steps": 3},
        "--critic_only_steps 3: .* no step",
    ),
    (["critic_first"], {"estimator": "rloo"}, "--estimator rloo has no critic"),
    (["critic_lambd"], {"estimator": "grpo"}, "--estimator grpo has no critic"),
    (["log_ratio"], {"top_p": 0.9}, "--top_p 0.9: choose 1"),
    (["distill"], {"teacher": "-", "top_p": 0.9}, "--top_p 0.9: choose 1"),
    (["overlong_penalty"], {"overlong_cache": 13}, "--overlong_cache 13: .* at most 12 tokens"),
    (["first_stage"], {"first_stage": 8}, "--first_stage 8: choose at least 1, and less than --n_"),
    (["first_stage"], {"first_stage": 1, "estimator": "grpo"}, "--first_stage 1.* at least 2"),
    (
        ["pass_at_k"],
        {"n_samples_per_prompt": 4},
        "--n_samples_per_prompt 4: more than --pass_k 4 is needed",
    ),
    (["dynamic_sampling", "first_stage"], {}, "dynamic_sampling: name it after FirstStage"),
    (["loss_mean"], {"loss_mean": "token"}, "--loss_mean token: choose sequence or constant"),
    (["gdpo"], {"estimator": "grpo"}, "--estimator grpo: --variant gdpo normalises rewards itself"),
    (["gdpo", "hash_reward"], {}, "gdpo: another variant pays something else"),
    (["gdpo", "kl_penalty"], {}, "--variant gdpo: name it after KLPenalty"),
    (["kl_loss"], {"skip_flat": True}, "--skip_flat true: choose false"),
    (["entropy_bonus"], {"skip_flat": True}, "--skip_flat true: choose false"),
]


@pytest.mark.parametrize("names, flags, words", REFUSED)
def test_what_would_be_silently_wrong_is_refused_in_one_line(names, flags, words):
    with pytest.raises(UserError, match=words) as error:
        take_steps(names, flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "names, reward, told",
    [
        (["maxrl"], -1, "maxrl: a reward is negative"),
        (["pass_at_k"], 0.5, "pass_at_k: a reward is neither"),
        (["pass_at_k"], float("nan"), "pass_at_k: a reward is neither"),
    ],
)
def test_an_estimator_refuses_rewards_that_it_would_misread(names, reward, told):
    estimate = config(variant=names).estimators[names[0]].function
    rewards = torch.tensor([1.0, reward]).double()
    with pytest.raises(AssertionError, match=told):
        estimate(rewards, None, None, torch.zeros(2), config(variant=names))


def test_gdpo_normalises_each_reward_in_its_group_and_sums_by_the_weights():
    """The sum is whitened."""
    cfg = config(variant="gdpo", reward_weights=["short=0.5", "right=2"])
    right = [1, 0, 0, 1, 0, 0, 0, 0]
    short = [0.3, 0.9, 0.1, 0.2, 0.4, 0.4, 0.5, 0.1]
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    request = {k: SimpleNamespace(problem=toy.make_problems(cfg)[0], group=k) for k in (0, 1)}
    for x in request.values():
        x.temperature = 1.0
    samples = []
    for k in range(8):
        rewards = {"right": right[k], "short": short[k], "logged": k}
        samples.append(
            rollout.Sample(
                request[groups[k]], [7] * (k + 1), [True] * (k + 1), finish_reason="stop"
            )
        )
        samples[-1].rewards = rewards
    paid = cfg.paid(samples)
    assert paid == pytest.approx([2 * r + 0.5 * s for r, s in zip(right, short)])
    batch = ppo.make_batch(samples, torch.device("cpu"), cfg, paid)
    ppo.compute_advantages(batch, cfg)
    columns = [naive.scores("grpo", x, groups) for x in (right, short)]
    sums = [2 * r + 0.5 * s for r, s in zip(*columns)]
    of_tokens = [sums[k] for k in range(8) for _ in range(k + 1)]
    centre, spread = naive.mean(of_tokens), naive.std(of_tokens)
    expected = [(x - centre) / spread for x in of_tokens]
    assert batch.per_token["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_lr_end_refuses_another_last_step_after_a_resume():
    """The rate of each update depends on the last one."""
    cfg = config(variant="lr_end")
    cfg.policy_rate(0, 100)
    other = config(variant="lr_end")
    other.memory.update(cfg.memory)
    other.policy_rate(1, 100)
    with pytest.raises(UserError, match="^--variant lr_end: .* 100 updates, .* 90; keep --max_st"):
        other.policy_rate(1, 90)


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
            run.mkdir()
            assert not ckpt.save(run, ckpt.RunState(1), {"policy": policy.deepspeed}, 1)
            policy = models.make_policy(half)
            ckpt.resume(run, run / "step_000001", {"policy": policy.deepspeed})
            assert vars(policy.deepspeed.optimizer.loss_scaler) == vars(scaler)
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


def weights_of(learner) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in models.named_weights(learner)])


def test_a_frozen_embedding_is_the_tied_head_and_all_else_learns():
    tokenizer = base_model.make_tokenizer("ab", [])
    model = config(variant="frozen_embedding").policy_model(base_model.make_model(tokenizer, 1))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
