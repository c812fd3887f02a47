"""A lesson: from REINFORCE to PPO's advantages and a teacher. `python docs/lesson.py`

Each cell begins with `# %%`, so an editor can run the cells one by one. Cells 1 to 5 end with a
question, and the next cell answers it. An advantage is what a token is paid. The advantages of
cells 2 to 5 come from ppo.py. Cell 6 has the formula of variants/distill.py. The pictures are
written to out/lesson. The lesson takes half a minute on one free core, and less with `--quick`.
With `--quick` the models learn too little for what the text says.
"""

# %% [0] The toy: write 12 tokens, and get a reward of 0 or 1 at the end
import sys
from math import comb
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo

torch.set_num_threads(1)
OUT = Path("out/lesson")
OUT.mkdir(parents=True, exist_ok=True)
QUICK = "--quick" in sys.argv
SEEDS = range(1 if QUICK else 10)
UPDATES = 20 if QUICK else 120
TRIALS = 100 if QUICK else 400  # batches that measure the noise of a gradient

PROBLEMS, TOKENS, VOCABULARY = 8, 12, 4
# Token 0 is right at each place. Problem p is solved by need[p] right tokens: the first is easy.
need = torch.tensor([1, 2, 3, 3, 4, 5, 6, 7])
# The logits of the first policy: all tokens are equally likely.
uniform = torch.zeros(PROBLEMS, TOKENS, VOCABULARY, dtype=torch.float64)


def draw(logits, problems, generator):
    """Responses (N, 12), and `right` (N, 13): the number of right tokens before each place."""
    p = logits[problems].softmax(-1)  # (N, 12, 4)
    tokens = torch.multinomial(p.flatten(0, 1), 1, generator=generator).reshape(-1, TOKENS)
    right = torch.nn.functional.pad((tokens == 0).cumsum(1), (1, 0))  # (N, 13)
    return tokens, right, (right[:, -1] >= need[problems]).double()


def advantages_of(estimator, rewards, groups, values=None, lambd=1.0):
    """The advantages of ppo.py before whitening, (N, 12). groups: the problem of each response."""
    ids = [[0] * TOKENS] * len(rewards)
    batch = ppo.Batch([[0]] * len(rewards), ids, groups, rewards, torch.device("cpu"), {}, [])
    if values is not None:
        batch.per_token["values"] = values.reshape(-1)  # (T,)
    recipe = ppo.Recipe(estimator=estimator, lambd=lambd)
    return recipe.raw_advantages(batch).reshape(-1, TOKENS)


class TableCritic:
    """The value of (problem, place, right tokens so far): the mean reward that was seen there."""

    def __init__(self):
        self.table = torch.full((PROBLEMS, TOKENS, TOKENS + 1), 0.5, dtype=torch.float64)

    def index(self, problems, right):
        return problems[:, None], torch.arange(TOKENS), right[:, :-1]  # together (N, 12)

    def values(self, problems, right):
        return self.table[self.index(problems, right)]  # (N, 12)

    def learn(self, problems, right, rewards, rate=0.2):
        # The target of each token is the reward. With lambda 1 this is also the target in ppo.py.
        index = self.index(problems, right)
        empty = torch.zeros_like(self.table)
        count = empty.index_put(index, torch.ones_like(rewards)[:, None], accumulate=True)
        total = empty.index_put(index, rewards[:, None], accumulate=True)
        seen = count > 0
        self.table[seen] += rate * (total[seen] / count[seen] - self.table[seen])


def one_batch(logits, generator, estimator, lambd=1.0, shift=0.0, group=8, critic=None, pay=None):
    """Draws 8 responses to each problem. Returns gradient, problems, right tokens and rewards.

    `shift` is added to all rewards. `group` is the size of a group. `pay` replaces the advantages.
    """
    groups = torch.arange(8 * PROBLEMS) // group
    problems = groups % PROBLEMS
    tokens, right, rewards = draw(logits, problems, generator)
    values = critic.values(problems, right) if critic else None
    advantages = advantages_of(estimator, rewards + shift, groups, values, lambd)
    logits = logits.clone().requires_grad_()
    log_p = logits[problems].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # (N, 12)
    if pay:
        advantages = pay(advantages, tokens, log_p.detach())
    # The policy's loss is -A log p, a mean over tokens.
    (-advantages * log_p).mean().backward()
    return logits.grad, problems, right, rewards


def train(estimator, **how):
    """For each seed the solved share of the responses of each update. `how` is for one_batch.

    All updates have the same length, as those of Adam nearly have. So only the direction counts,
    and noise makes a direction worse.
    """
    curves = np.zeros((len(SEEDS), UPDATES))
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        logits = uniform.clone()
        critic = TableCritic() if estimator == "gae" else None
        for update in range(UPDATES):
            found = one_batch(logits, generator, estimator, critic=critic, **how)
            direction, problems, right, rewards = found
            curves[seed, update] = rewards.mean()
            logits -= direction / direction.norm().clamp(min=1e-9)
            if critic:
                critic.learn(problems, right, rewards)
    return curves


# The exact mean of the gradient of the first policy. For the logit of token v it is
# p (E[R] - E[R | token = v]), with p = 1/4, divided by the number of problems and places. A token
# decides the reward R if exactly need - 1 of the 11 other tokens are right.
decides = [comb(11, k - 1) * 3 ** (12 - k) / 4**11 for k in need.tolist()]
decides = torch.tensor(decides, dtype=torch.float64)  # (8,)
gain = decides[:, None] * torch.tensor([3 / 4, -1 / 4, -1 / 4, -1 / 4]) / VOCABULARY  # (8, 4)
true_gradient = (-gain / PROBLEMS / TOKENS)[:, None].expand(-1, TOKENS, -1)  # (8, 12, 4)


def noise(estimator, truth=true_gradient, **how):
    """The noise and the bias of the first gradient, both divided by the size of the true gradient.

    The noise is the std over batches. The bias is the error of the mean over batches, less the
    error that the noise explains. `how` is for one_batch.
    """
    generator = torch.Generator().manual_seed(0)
    found = [one_batch(uniform, generator, estimator, **how)[0] for _ in range(TRIALS)]
    found = torch.stack(found)  # (TRIALS, 8, 12, 4)
    variance = found.var(0).sum()
    error = (found.mean(0) - truth).square().sum() - variance / TRIALS
    size = truth.norm()
    return (variance.sqrt() / size).item(), (error.clamp(min=0).sqrt() / size).item()


def tell(title, curves, bars, print_bars=True):
    """Prints solved shares and noise. Draws the curves (means over seeds, with bands) and bars."""
    print(title)
    solved = [f"{name}: {runs.mean():.2f}" for name, runs in curves.items()]
    print(f"   solved, mean over {UPDATES} updates:", ", ".join(solved))
    if print_bars:
        noises = [f"{name}: {x:.1f}" for name, x in bars.items()]
        print("   noise of the first gradient:", ", ".join(noises))
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for name, runs in curves.items():
        smooth = np.lib.stride_tricks.sliding_window_view(runs, 9, axis=1).mean(-1)
        left.plot(smooth.mean(0), label=name)
        left.fill_between(range(smooth.shape[1]), smooth.min(0), smooth.max(0), alpha=0.2)
    left.set(xlabel="update", ylabel="solved", ylim=(0, 1))
    left.legend(frameon=False)
    right.barh(list(bars), list(bars.values()))
    right.set(xlabel="noise of the first gradient: std / size")
    right.invert_yaxis()
    figure.savefig(OUT / f"{title[0]}.png", dpi=80)


def show(title, numbers):
    print(f"   {title:24}", " ".join(f"{x:5}" for x in numbers))


# %% [1] REINFORCE: make the tokens of a response more likely, in proportion to its reward
# This estimator has no baseline: the advantage of each token is the reward.
def plain(rewards, values, mask, groups, cfg):
    return rewards


ppo.ESTIMATORS["plain"] = ppo.Estimator(plain)
curves = {"reward 0 or 1": train("plain"), "reward 1 or 2": train("plain", shift=1.0)}
bars = {"reward 0 or 1": noise("plain")[0], "reward 1 or 2": noise("plain", shift=1.0)[0]}
tell("1. REINFORCE pays all tokens of a response its reward.", curves, bars)
print("   If 1 is added to all rewards, the mean of the gradient is the same. Its noise grows.")
print("   QUESTION: which number should be subtracted from all rewards?\n")

# %% [2] A baseline: the mean reward of the batch
# ANSWER to 1: a number near the mean. Then a response better than usual is paid more than 0, and a
# response worse than usual less than 0. A number that does not depend on the response adds nothing
# to the mean of the gradient, because the probabilities of all tokens add up to 1.
curves = {"no baseline": curves["reward 0 or 1"], "mean of the batch": train("reinforce")}
bars["mean of the batch"] = noise("reinforce")[0]
tell("2. A baseline: pay the reward minus the mean of the batch.", curves, bars)
generator = torch.Generator().manual_seed(0)
rewards = draw(uniform, torch.arange(PROBLEMS).repeat_interleave(1000), generator)[2]
solved = rewards.reshape(PROBLEMS, -1).mean(1)
print("   At the start the problems are solved with", ", ".join(f"{x:.2f}" for x in solved))
print("   QUESTION: what does one mean for all problems do to the easiest problem?\n")

# %% [3] Groups: the mean of the other responses to the same problem
# ANSWER to 2: nearly all responses to the easiest problem are right, and these are paid much more
# than 0, whatever they say. This pay teaches nothing, and adds noise.
curves = {"mean of the batch": curves["mean of the batch"]}
curves["rloo"] = train("rloo")
curves["grpo"] = train("grpo")
bars["rloo, groups of 8"] = noise("rloo")[0]
bars["rloo, groups of 2"] = noise("rloo", group=2)[0]
title = "3. Groups: pay the reward minus the mean of the other responses to the problem (RLOO)."
tell(title, curves, bars)
print(f"""\
   A right response to the easiest problem was paid {1 - solved.mean():+.2f} in part 2, and
   is paid {1 - solved[0]:+.2f} now. In groups of 2 the baseline is one other response, which
   is a bad mean. GRPO divides the pay by the group's standard deviation.""")
generator = torch.Generator().manual_seed(3)
problems = torch.full((64,), 2)
tokens, right, rewards = draw(uniform, problems, generator)
example = next(i for i in range(64) if rewards[i] and right[i, 5] >= need[2])
advantages = advantages_of("rloo", rewards, problems)[example]
done = int((right[example] >= need[2]).nonzero()[0])
print(f"   A right response has its {need[2]} right tokens after {done} of {TOKENS} tokens.")
print(f"   Each of its tokens is paid {advantages[0]:+.2f}, also those that change nothing.")
print("   QUESTION: who knows, in the middle of a response, how it will end?\n")

# %% [4] A critic: how much reward is to be expected before each token?
# ANSWER to 3: nobody knows, but the mean of the rewards of all responses that were at this point is
# a guess. The critic learns this mean. A_t = reward - V_t. This is PPO with lambda 1.
critic = TableCritic()
generator = torch.Generator().manual_seed(1)
eight_each = torch.arange(PROBLEMS).repeat_interleave(8)
for _ in range(50 if QUICK else 1500):
    seen = draw(uniform, eight_each, generator)
    critic.learn(eight_each, seen[1], seen[2], rate=0.02)
curves = {"rloo": curves["rloo"], "critic, groups of 8": train("gae")}
bars.pop("reward 1 or 2")
bars["a critic that has learnt"] = noise("gae", critic=critic)[0]
bars["a critic that is new"] = noise("gae", critic=TableCritic())[0]
tell("4. A critic: pay each token the reward minus the value before the token.", curves, bars)
print("   A new critic has the value 0.5 everywhere. The curve starts with such a critic.")
values = critic.values(problems, right)
pay = advantages_of("gae", rewards, problems, values)[example]
words = ["right" if x == 0 else "wrong" for x in tokens[example]]
show("the response above", words)
show("value before the token", [f"{x:.2f}" for x in values[example]])
show("pay, lambda 1", [f"{x:+.2f}" for x in pay])
print("   The tokens after the last one that matters are paid about 0. A wrong token before it is")
print("   paid more than 0, because the tokens after it were right.")
print("   QUESTION: the critic knows the value after a token too. Can it pay this token alone?\n")

# %% [5] Lambda: trust the critic's value after a few tokens, in the place of the reward
# ANSWER to 4: yes, if the critic is right. With lambda 0 a token is paid V after it minus V before
# it. With lambda 1 it is paid the reward minus V before it. Between them later changes of V count
# less, by lambda for each token. If the critic is wrong, lambda below 1 has a wrong mean: a bias.
LAMBDAS = (1.0, 0.95, 0.8, 0.5, 0.0)
learnt = {x: noise("gae", lambd=x, critic=critic) for x in LAMBDAS}  # (noise, bias)
new = {x: noise("gae", lambd=x, critic=TableCritic()) for x in LAMBDAS}
bars = {f"lambda {x:g}, learnt": learnt[x][0] for x in LAMBDAS}
bars |= {f"lambda {x:g}, new": new[x][0] for x in LAMBDAS}
curves = {"lambda 1": curves["critic, groups of 8"]}
curves["lambda 0.95"] = train("gae", lambd=0.95)
curves["lambda 0.8"] = train("gae", lambd=0.8)
tell("5. Lambda: believe the critic more, and the reward less.", curves, bars, print_bars=False)
show("the same response", words)
pay = advantages_of("gae", rewards, problems, values, lambd=0.0)[example]
show("pay, lambda 0", [f"{x:+.2f}" for x in pay])
print("            | a critic that has learnt | a new critic")
print("     lambda |       noise         bias |    noise         bias")
for x in LAMBDAS:
    print("{:11.2f} |{:12.1f} {:12.2f} |{:9.1f} {:12.2f}".format(x, *learnt[x], *new[x]))
print("""\
   With lambda 1 there is no bias: the number is the error of this measurement. A critic that
   has learnt lowers the noise at little bias. A new critic with lambda 0 pays only the last
   token, so its gradient is small and wrong.
   ORZ takes lambda 1. With 0.95 the reward counts 0.006 for a token 100 places before
   the end. The critic decides the rest. docs/lab.md shows what a real critic knows.""")
print("   QUESTION: a larger model already solves the problems. Can it pay the tokens?\n")

# %% [6] A teacher: a model that already solves the problems scores each drawn token
# ANSWER to 5: yes. A_t = log p of the teacher - log p of the policy, for the token that the policy
# drew. It needs no reward and no critic. Its mean gradient is that of KL(policy, teacher).
teacher = torch.tensor([0.55, 0.15, 0.15, 0.15], dtype=torch.float64).log()  # (4,) at each place


# The next two functions pay as --variant distill does, with --teacher_weight 1 and 0.5.
def teach(advantages, tokens, log_p):
    return teacher[tokens] - log_p


def half_teach(advantages, tokens, log_p):
    return (teacher[tokens] - log_p) / 2 + advantages / 2


start = torch.zeros_like(uniform).requires_grad_()
log_p = start.log_softmax(-1)  # (8, 12, 4)
(log_p.exp() * (log_p - teacher)).sum(-1).mean().backward()  # KL(policy, teacher) of a token
logits = teacher.expand(PROBLEMS, TOKENS, -1)
rewards_of_teacher = draw(logits, torch.arange(PROBLEMS).repeat_interleave(1000), generator)[2]
curves = {"lambda 0.8": curves["lambda 0.8"]}
curves["teacher"] = train("grpo", pay=teach)
curves["half teacher, half GRPO"] = train("grpo", pay=half_teach)
of_teacher = noise("grpo", pay=teach, truth=start.grad)[0]
bars = {"lambda 0.8": learnt[0.8][0], "teacher": of_teacher}
tell("6. A teacher: pay each token log p of the teacher minus log p of the policy.", curves, bars)
print(f"   The teacher solves {rewards_of_teacher.mean():.2f}. Solved in the last ten updates:")
for name, runs in curves.items():
    show(name, [f"{runs[:, -10:].mean():.2f}"])
print("   A teacher needs no reward. A policy that learns from a teacher alone ends with what the")
print("   teacher solves.")
print(f"The pictures are in {OUT}")
