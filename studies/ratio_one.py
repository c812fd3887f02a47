"""What named losses become at ratio 1, where pi = pi_old = sampler: docs/ppo.md.

    python studies/ratio_one.py

Each loss is written as it was published, as the mean that is maximised, and differentiated in
float64 on a toy. At ratio 1 its gradient is that of one of four means, to 1e-12. At another ratio
it is not. tests/test_ppo.py shows that `update` takes the token mean. The variant loss_mean takes
the sequence mean.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo

LENGTHS = [2, 3, 5, 6, 8, 9]  # of six sequences, 33 tokens together
GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
BETA = 0.1  # of the KL penalties
# The first three are rows of the page's table.
TOKEN, SEQUENCE = "token mean", "sequence mean"
SCALED, SHIFTED = "token mean times mean length", "token mean, beta added to the advantages"


class Toy:
    """A policy of five states with five tokens, and the log-probs of drawn tokens, (T,).

    The old policy and the sampler are the same policy, unless they are moved.
    """

    def __init__(self, moved: float = 0.0):
        rng = torch.Generator().manual_seed(7)
        states = torch.randint(5, (sum(LENGTHS),), generator=rng)  # (T,)
        tokens = torch.randint(5, (sum(LENGTHS),), generator=rng)  # (T,)
        noise = torch.randn(sum(LENGTHS), generator=rng, dtype=torch.float64)  # (T,)
        self.logits = torch.randn(5, 5, generator=rng, dtype=torch.float64).requires_grad_()
        self.log_p = self.logits.log_softmax(1)[states]  # (T, 5)
        self.logprobs = self.log_p.gather(1, tokens[:, None])[:, 0]  # (T,)
        self.old = self.logprobs.detach() + moved * noise
        self.sampler = self.old + moved * noise.flip(0)
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        self.scores = ppo.grpo(rewards, None, None, torch.tensor(GROUPS), None)  # (N,)
        self.advantages = self.scores.repeat_interleave(torch.tensor(LENGTHS))  # (T,)
        self.ratio = (self.logprobs - self.old).exp()  # (T,)

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.logits, retain_graph=True)[0]


def means_of_sequences(numbers: Tensor) -> Tensor:
    """(T,) -> (N,)"""
    return torch.stack([part.mean() for part in numbers.split(LENGTHS)])


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def losses(toy: Toy) -> dict[str, dict[str, Tensor]]:
    """The means that the losses maximise, by the row of the page's table and by name."""
    ratio, advantages, log_ratio = toy.ratio, toy.advantages, toy.logprobs - toy.old
    clip = clipped(ratio, advantages, 0.2, 0.2)
    # TIS and MIS weight the clipped term by old policy over sampler.
    weight = (toy.old - toy.sampler).exp()
    masked = torch.where((weight >= 0.5) & (weight <= 5.0), weight, 0.0) * clip
    # GSPO: one ratio a sequence, the geometric mean of its tokens' ratios.
    sequence_ratio = means_of_sequences(log_ratio).exp()  # (N,)
    # GMPO: the geometric mean of ratios that are clipped before, on one side.
    sign = advantages.sign()
    one_sided = sign * torch.min(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
    # SAPO: a sigmoid gate in place of the clip.
    tau = torch.where(advantages > 0, 1.0, 1.05).double()
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    # LUSPO: GSPO, each sequence times its length.
    luspo = clipped(sequence_ratio, toy.scores, 2e-3, 2.5e-3) * torch.tensor(LENGTHS)
    # DPPO, binary TV: masked where the probability has moved too far away from the sampler's.
    to_sampler = (toy.logprobs - toy.sampler).exp()
    distance = (toy.logprobs.exp() - toy.sampler.exp()).abs()
    is_away = torch.where(advantages > 0, to_sampler > 1, to_sampler < 1)
    dppo = torch.where(is_away & (distance > 0.15), 0.0, to_sampler) * advantages
    # KL(pi_old, pi) of the whole distribution. k1 to k3 of joschu.net/blog/kl-approx.html estimate
    # it from the drawn token.
    old = toy.log_p.detach()
    kl = (old.exp() * (old - toy.log_p)).sum(1)
    k1, k2, k3 = -log_ratio, log_ratio**2 / 2, ratio - 1 - log_ratio
    # KL in the reward: each token is paid less by its log-ratio, which has no gradient. At gamma =
    # lambda = 1 the advantage of a token has the sum of all payments from this token on.
    paid = -BETA * log_ratio.detach()
    from_here = torch.cat([part.flip(0).cumsum(0).flip(0) for part in paid.split(LENGTHS)])
    token_mean = {
        "PPO's clip, arXiv 1707.06347, eq. 7": clip.mean(),
        "DAPO's clip-higher, 2503.14476, eq. 8": clipped(ratio, advantages, 0.2, 0.28).mean(),
        # In its experiments no lower bound was effective.
        "CISPO, 2506.13585, eq. 4": (
            ratio.clamp(max=1.28).detach() * advantages * toy.logprobs
        ).mean(),
        "TIS, fengyao.notion.site/off-policy-rl": (weight.clamp(max=2.0) * clip).mean(),
        "MIS as INTELLECT-3, 2512.16144, eq. 1": masked.mean(),
        "KL, exact, 1707.06347, eq. 8": (ratio * advantages - BETA * kl).mean(),
        "KL, k2": (ratio * advantages - BETA * k2).mean(),
        "KL, k3": (ratio * advantages - BETA * k3).mean(),
        "KL in the reward, 2203.02155": (ratio * (advantages + from_here)).mean(),
    }
    sequence_mean = {
        "GRPO, 2402.03300, eq. 3, without KL": means_of_sequences(clip).mean(),
        "GSPO, 2507.18071, eq. 5": clipped(sequence_ratio, toy.scores, 3e-4, 4e-4).mean(),
        "GMPO, 2507.20673": (means_of_sequences(one_sided).exp() * toy.scores).mean(),
        "SAPO, 2511.20347, eq. 5": means_of_sequences(gate * advantages).mean(),
        "MIS as IcePop, 2510.18855, section 2": means_of_sequences(masked).mean(),
    }
    scaled = {
        "Dr. GRPO, 2503.20783": clip.sum() / len(LENGTHS),
        "LUSPO, 2602.05261": luspo.mean(),
        "DPPO's mask, 2602.04879, eq. 12": dppo.sum() / len(LENGTHS),
    }
    shifted = {"KL, k1": (ratio * advantages - BETA * k1).mean()}
    return {TOKEN: token_mean, SEQUENCE: sequence_mean, SCALED: scaled, SHIFTED: shifted}


def find_mean(objective: Tensor, toy: Toy, tolerance: float = 1e-12) -> str:
    """The one of four means that has the same gradient as the objective."""
    terms = toy.advantages * toy.logprobs  # (T,)
    means = {
        TOKEN: terms.mean(),
        SEQUENCE: means_of_sequences(terms).mean(),
        SCALED: terms.sum() / len(LENGTHS),
        SHIFTED: (terms + BETA * toy.logprobs).mean(),
    }
    for name, mean in means.items():
        expected = toy.gradient(mean)
        if (toy.gradient(objective) - expected).norm() < tolerance * expected.norm():
            return name
    return "none"


if __name__ == "__main__":
    toy = Toy()
    for row in losses(toy).values():
        for name, objective in row.items():
            print(f"{name}: {find_mean(objective, toy)}")
