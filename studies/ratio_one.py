"""What named losses become at ratio 1, where pi = pi_old = sampler: docs/stripped.md.

    python studies/ratio_one.py

Each loss is written as it was published, as the mean that is maximised, and differentiated in
float64 on a toy. Its gradient must be that of one of four means, to 1e-12. At another ratio it must
not be. tests/test_ppo.py shows that `update` takes PPO's mean. The variant loss_mean takes GRPO's.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo

LENGTHS = [2, 3, 5, 6, 8, 9]  # of six sequences
GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
VOCABULARY = 5
BETA = 0.1  # of the KL penalties


class Toy:
    """A policy whose logits depend on the token before; each sequence begins after token 0.

    `old` and `sampler` are log-probs of the policies that sampled: the same, unless they are moved.
    """

    def __init__(self, moved: float = 0.0):
        rng = torch.Generator().manual_seed(7)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=rng, dtype=torch.float64)
        self.table = table.requires_grad_()
        self.tokens = [torch.randint(VOCABULARY, (n,), generator=rng) for n in LENGTHS]
        before = torch.cat([torch.cat([torch.tensor([0]), ids[:-1]]) for ids in self.tokens])
        self.log_p = self.table.log_softmax(1)[before]  # (T, V), every token's distribution
        self.logprobs = self.log_p.gather(1, torch.cat(self.tokens)[:, None])[:, 0]  # (T,)
        noise = torch.randn(len(self.logprobs), generator=rng, dtype=torch.float64)  # (T,)
        self.old = self.logprobs.detach() + moved * noise
        self.sampler = self.old + moved * noise.flip(0)
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        self.scores = ppo.grpo(rewards, None, None, torch.tensor(GROUPS), None)  # (N,)
        self.advantages = self.scores.repeat_interleave(torch.tensor(LENGTHS))  # (T,)
        self.ratio = (self.logprobs - self.old).exp()  # (T,)
        self.sequence_ratio = of_sequences(self.logprobs - self.old).exp()  # (N,)
        self.old_to_sampler = (self.old - self.sampler).exp()  # (T,)

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.table, retain_graph=True)[0].flatten()


# ---- the means -----------------------------------------------------------------------------------


def of_sequences(numbers: Tensor) -> Tensor:
    """(T,) -> (N,), the mean of each sequence."""
    return torch.stack([part.mean() for part in numbers.split(LENGTHS)])


token_mean = torch.mean  # (T,) -> ()


def sequence_mean(numbers: Tensor) -> Tensor:
    return of_sequences(numbers).mean()


def mean_of_sums(numbers: Tensor) -> Tensor:
    return numbers.sum() / len(LENGTHS)


# ---- what each loss sums up, of tokens (T,) or of sequences (N,) ---------------------------------


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clip(toy: Toy, high: float = 0.2) -> Tensor:
    """PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3, without its KL term; Dr. GRPO,
    arXiv 2503.20783. DAPO, arXiv 2503.14476, eq. 8, has another `high`."""
    return clipped(toy.ratio, toy.advantages, 0.2, high)


def cispo(toy: Toy) -> Tensor:
    """arXiv 2506.13585, eq. 4 and 5. In its experiments no lower bound was effective."""
    return toy.ratio.clamp(max=1 + 0.28).detach() * toy.advantages * toy.logprobs


def sapo(toy: Toy) -> Tensor:
    """arXiv 2511.20347, eq. 5 and 6: a sigmoid gate in place of the clip."""
    tau = torch.where(toy.advantages > 0, 1.0, 1.05).double()
    return torch.sigmoid(tau * (toy.ratio - 1)) * 4 / tau * toy.advantages


def dppo(toy: Toy) -> Tensor:
    """arXiv 2602.04879, eq. 12, binary TV: masked where the probability itself has moved too far,
    away from the sampler's."""
    ratio = (toy.logprobs - toy.sampler).exp()
    distance = (toy.logprobs.exp() - toy.sampler.exp()).abs().detach()
    is_away = torch.where(toy.advantages > 0, ratio > 1, ratio < 1)
    return ~(is_away & (distance > 0.15)) * ratio * toy.advantages


def tis(toy: Toy) -> Tensor:
    """fengyao.notion.site/off-policy-rl: the clipped term, weighted by old policy over sampler."""
    return toy.old_to_sampler.clamp(max=2.0) * clip(toy)


def mis(toy: Toy) -> Tensor:
    """IcePop, arXiv 2510.18855, section 2: weights outside of 0.5 to 5 are 0. INTELLECT-3, arXiv
    2512.16144, eq. 1, takes the mean over tokens."""
    is_near = (toy.old_to_sampler >= 0.5) & (toy.old_to_sampler <= 5.0)
    return torch.where(is_near, toy.old_to_sampler, 0.0) * clip(toy)


def gspo(toy: Toy) -> Tensor:
    """arXiv 2507.18071, eq. 5 and 7: one ratio a sequence, the geometric mean of its tokens'."""
    return clipped(toy.sequence_ratio, toy.scores, 3e-4, 4e-4)


def gmpo(toy: Toy) -> Tensor:
    """arXiv 2507.20673: the geometric mean of ratios that are clipped before, one-sided."""
    log_ratio = toy.logprobs - toy.old
    sign = toy.advantages.sign()
    one_sided = sign * torch.min(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
    return of_sequences(one_sided).exp() * toy.scores


def luspo(toy: Toy) -> Tensor:
    """arXiv 2602.05261: GSPO, each sequence times its length."""
    return clipped(toy.sequence_ratio, toy.scores, 2e-3, 2.5e-3) * torch.tensor(LENGTHS)


def kl_exact(toy: Toy) -> Tensor:
    """The KL(pi_old, pi) of a token's whole distribution, as in PPO's paper."""
    old = toy.log_p.detach()
    return (old.exp() * (old - toy.log_p)).sum(1)


def penalised(kl) -> Callable[[Toy], Tensor]:
    """arXiv 1707.06347, eq. 8. kl: of a toy's tokens; k1 to k3 of joschu.net/blog/kl-approx.html
    estimate it."""
    return lambda toy: toy.ratio * toy.advantages - BETA * kl(toy)


def kl_in_reward(toy: Toy) -> Tensor:
    """arXiv 2203.02155: every token is paid less by its log-ratio, which has no gradient. At gamma
    = lambda = 1 a token's advantage holds all payments from it on."""
    paid = -BETA * toy.ratio.detach().log()
    from_here = torch.cat([part.flip(0).cumsum(0).flip(0) for part in paid.split(LENGTHS)])
    return toy.ratio * (toy.advantages + from_here)


TOKEN, SEQUENCE, SCALED, SHIFTED = "token mean", "sequence mean", "times mean length", "plus beta"
# What the page says that is left.
LEFT = {
    TOKEN: lambda toy: token_mean(toy.advantages * toy.logprobs),
    SEQUENCE: lambda toy: sequence_mean(toy.advantages * toy.logprobs),
    SCALED: lambda toy: 5.5 * token_mean(toy.advantages * toy.logprobs),
    SHIFTED: lambda toy: token_mean((toy.advantages + BETA) * toy.logprobs),
}
# {loss: (what it sums up, the mean as published, what is left)}
LOSSES = {
    "PPO's clip": (clip, token_mean, TOKEN),
    "clip-higher": (lambda toy: clip(toy, 0.28), token_mean, TOKEN),
    "CISPO": (cispo, token_mean, TOKEN),
    "TIS": (tis, token_mean, TOKEN),
    "GRPO": (clip, sequence_mean, SEQUENCE),
    "GSPO": (gspo, torch.mean, SEQUENCE),
    "GMPO": (gmpo, torch.mean, SEQUENCE),
    "SAPO": (sapo, sequence_mean, SEQUENCE),
    "MIS, as IcePop": (mis, sequence_mean, SEQUENCE),
    "MIS, as INTELLECT-3": (mis, token_mean, TOKEN),
    "DPPO's mask": (dppo, mean_of_sums, SCALED),
    "Dr. GRPO": (clip, mean_of_sums, SCALED),
    "LUSPO": (luspo, torch.mean, SCALED),
    "KL penalty, exact": (penalised(kl_exact), token_mean, TOKEN),
    "KL penalty, k2": (penalised(lambda toy: toy.ratio.log() ** 2 / 2), token_mean, TOKEN),
    "KL penalty, k3": (penalised(lambda toy: toy.ratio - 1 - toy.ratio.log()), token_mean, TOKEN),
    "KL penalty, k1": (penalised(lambda toy: -toy.ratio.log()), token_mean, SHIFTED),
    "KL in the reward": (kl_in_reward, token_mean, TOKEN),
}


def mean_of(name: str) -> str:
    """The mean whose gradient this loss has at ratio 1. Raises AssertionError if there is none."""
    terms, mean, kind = LOSSES[name]

    def difference(toy: Toy, left: str) -> float:
        expected = toy.gradient(LEFT[left](toy))
        return ((toy.gradient(mean(terms(toy))) - expected).norm() / expected.norm()).item()

    assert difference(Toy(), kind) < 1e-12
    assert all(difference(Toy(), other) > 0.01 for other in LEFT.keys() - {kind})
    assert difference(Toy(moved=0.5), kind) > 0.01
    return kind


if __name__ == "__main__":
    for name in LOSSES:
        print(f"{name}: {mean_of(name)}")
