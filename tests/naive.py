"""PPO the slow and obvious way: python loops, one sample at a time, full logits, float64.

Tests compare ppo.py and nanoorz/ with these functions, which import neither. Shapes: T response
tokens, S those of one sample, L its length with the prompt, V vocabulary, H hidden.
"""

import itertools
import math

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

# ---- advantages ----------------------------------------------------------------------------------


def gae(rewards: list[float], values: list[list], gamma: float, lambd: float) -> list[list]:
    """The double sum of the definition."""
    advantages = []
    for reward, of_sample in zip(rewards, values):
        length = len(of_sample)
        token_rewards = [0.0] * (length - 1) + [reward]
        following = of_sample[1:] + [0.0]
        deltas = [token_rewards[t] + gamma * following[t] - of_sample[t] for t in range(length)]
        of_tokens = []
        for t in range(length):
            of_tokens.append(sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, length)))
        advantages.append(of_tokens)
    return advantages


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    """Of the population, not of a draw from it."""
    center = mean(numbers)
    return math.sqrt(mean([(x - center) ** 2 for x in numbers]))


# What `scores` knows, and whether it compares the samples of a problem.
COMPARES = {"grpo": True, "rloo": True, "reinforce": False}
# The variants that `scores` knows.
VARIANTS = ["dr_grpo", "reinforce_pp", "maxrl", "pass_at_k", "gdpo", "positive", "negative"]


def scores(estimator: str, rewards: list[float], groups: list[int], k: int = 2) -> list[float]:
    """One number a sample, which all of its tokens get."""
    found = []
    for i, reward in enumerate(rewards):
        mates = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        group = [rewards[j] for j in mates]
        if estimator == "reinforce":
            found.append(reward - mean(rewards))
        elif estimator == "positive":
            found.append(reward)
        elif estimator == "negative":
            found.append(reward - 1)
        elif min(group) == max(group):
            found.append(0.0)
        elif estimator in ("grpo", "gdpo"):
            found.append((reward - mean(group)) / std(group))
        elif estimator == "rloo":
            found.append(reward - mean([rewards[j] for j in mates if j != i]))
        elif estimator in ("dr_grpo", "reinforce_pp"):
            found.append(reward - mean(group))
        elif estimator == "maxrl":
            found.append((reward - mean(group)) / mean(group))
        elif estimator == "pass_at_k":
            found.append(mean_over_sets(mates.index(i), group, k))
    return found


def mean_over_sets(i: int, group: list[float], k: int) -> float:
    """GRPO over all sets of k of the group, of which a set is right if a member is right. Returns
    the mean score of the sets with member i."""
    of_sets = {}
    for members in itertools.combinations(range(len(group)), k):
        of_sets[members] = float(any(group[j] > 0 for j in members))
    rewards = list(of_sets.values())
    if not rewards or std(rewards) == 0:
        return 0.0
    own = mean([reward for members, reward in of_sets.items() if i in members])
    return (own - mean(rewards)) / std(rewards)


def drawn_places(batch) -> list[list[int]]:
    """Of each sample: the places in its response of the tokens that the policy has drawn."""
    return [[t for t, is_drawn in enumerate(drawn) if is_drawn] for drawn in batch.drawn]


def per_sample(batch, flat: Tensor) -> list[list[float]]:
    """A flat (T,) tensor as a list for each sample."""
    return [part.tolist() for part in flat.split(list(map(len, drawn_places(batch))))]


def raw_advantages(batch, cfg, lambd: float) -> Tensor:
    """The estimator's, (T,)."""
    rewards = batch.rewards.tolist()
    if cfg.estimator == "gae":
        values = per_sample(batch, batch.per_token["values"])
        parts = gae(rewards, values, cfg.gamma, lambd)
    else:
        of_samples = scores(cfg.estimator, rewards, batch.groups.tolist())
        parts = [[score] * len(places) for score, places in zip(of_samples, drawn_places(batch))]
    return torch.tensor(sum(parts, []), dtype=torch.float64)


def advantages(batch, cfg) -> tuple[Tensor, Tensor]:
    """Advantages, whitened for some, and returns, (T,) each. Not weighted by loss_mean."""
    found = targets = raw_advantages(batch, cfg, cfg.lambd)
    if cfg.estimator in ("gae", "reinforce"):
        found = (found - mean(found.tolist())) / std(found.tolist())
    return found, targets + batch.per_token["values"]


# ---- models --------------------------------------------------------------------------------------


def load(folder, auto_class=AutoModelForCausalLM):
    return auto_class.from_pretrained(folder, dtype=torch.float64)


def logprobs(model, batch, temperature) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, (T,) each, from full logits. temperature: a number, or (N,)."""
    of_tokens = []
    entropies = []
    of_samples = torch.as_tensor(temperature).expand(len(batch.prompt_ids)).tolist()
    rows = zip(batch.prompt_ids, batch.response_ids, of_samples, drawn_places(batch))
    for prompt, response, temperature, places in rows:
        logits = model(torch.tensor([prompt + response])).logits[0]  # (L, V)
        # Position t predicts token t + 1.
        log_p = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)  # (S, V)
        of_tokens.append(log_p[range(len(response)), response][places])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[places])
    return torch.cat(of_tokens), torch.cat(entropies)


def values(body, head: Tensor, batch) -> Tensor:
    """(T,), from a body and a head (1, H). A value is read before its token."""
    parts = []
    for prompt, response, places in zip(batch.prompt_ids, batch.response_ids, drawn_places(batch)):
        hidden = body(torch.tensor([prompt + response])).last_hidden_state[0]  # (L, H)
        parts.append((hidden[len(prompt) - 1 : -1] * head[0]).sum(-1)[places])
    return torch.cat(parts)


# ---- losses and gradients ------------------------------------------------------------------------


def clipped_ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, low=0.2, high=0.2) -> Tensor:
    """The textbook's loss of each token, with its ratio, (T,)."""
    ratio = (logprobs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """(T,)"""
    clipped = torch.min(torch.max(values, old - clip), old + clip)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def mean_loss(losses: Tensor, batch, cfg) -> Tensor:
    """(T,) -> (), by the variant loss_mean, as the papers write it."""
    of_samples = losses.split(list(map(len, drawn_places(batch))))
    kind = getattr(cfg, "loss_mean", "token")
    if kind == "sequence":
        return sum(part.mean() for part in of_samples) / len(of_samples)
    if kind == "constant":
        return sum(part.sum() / cfg.generate_max_len for part in of_samples) / len(of_samples)
    return losses.mean()


def policy_gradient(model, batch, cfg) -> dict[str, Tensor]:
    """Of clipped PPO at old = current, by name."""
    of_tokens, _ = advantages(batch, cfg)
    current, _ = logprobs(model, batch, cfg.temperature)
    mean_loss(clipped_ppo(current, current.detach(), of_tokens), batch, cfg).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def critic_gradient(body, head: Tensor, batch, old, returns, clip: float) -> dict[str, Tensor]:
    """Of the mean of the clipped value loss over all response tokens, by name."""
    body.zero_grad()
    head = head.detach().clone().requires_grad_()
    clipped_value_loss(values(body, head, batch), old.double(), returns, clip).mean().backward()
    return {name: p.grad for name, p in body.named_parameters()} | {"value_head.weight": head.grad}
