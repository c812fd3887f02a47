"""What named losses become where no ratio is needed: at pi = pi_old = sampler, docs/ratio_one.md.

Each loss is written as it was published, as the mean that is maximised, and differentiated in
float64 on a toy.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import ppo

LENGTHS = [2, 3, 5, 6, 8, 9]  # of six sequences
GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
VOCABULARY = 5
MEAN_LENGTH = 5.5
EXACT = 1e-12
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
        self.log_p_old = self.log_p.detach()
        noise = torch.randn(len(self.logprobs), generator=rng, dtype=torch.float64)  # (T,)
        self.old = self.logprobs.detach() + moved * noise
        self.sampler = self.old + moved * noise.flip(0)
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        self.scores = ppo.grpo(rewards, None, None, torch.tensor(GROUPS), None)  # (N,)
        self.advantages = self.scores.repeat_interleave(torch.tensor(LENGTHS))  # (T,)
        self.ratio = (self.logprobs - self.old).exp()  # (T,)

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.autograd.grad(objective, self.table, retain_graph=True)[0].flatten()


# ---- the means -----------------------------------------------------------------------------------


def token_mean(numbers: Tensor) -> Tensor:
    return numbers.sum() / sum(LENGTHS)


def sequence_mean(numbers: Tensor) -> Tensor:
    parts = numbers.split(LENGTHS)
    return sum(part.sum() / len(part) for part in parts) / len(parts)


def sample_mean_of_sums(numbers: Tensor) -> Tensor:
    return numbers.sum() / len(LENGTHS)


def of_sequences(numbers: Tensor) -> Tensor:
    """(T,) -> (N,), the mean of each sequence."""
    return torch.stack([part.mean() for part in numbers.split(LENGTHS)])


# ---- the losses as published ---------------------------------------------------------------------


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def ppo_clip(toy: Toy) -> Tensor:
    """arXiv 1707.06347, eq. 7."""
    return token_mean(clipped(toy.ratio, toy.advantages, 0.2, 0.2))


def grpo(toy: Toy) -> Tensor:
    """arXiv 2402.03300, eq. 3, without its KL term."""
    return sequence_mean(clipped(toy.ratio, toy.advantages, 0.2, 0.2))


def clip_higher(toy: Toy) -> Tensor:
    """DAPO, arXiv 2503.14476, eq. 8."""
    return token_mean(clipped(toy.ratio, toy.advantages, 0.2, 0.28))


def cispo(toy: Toy) -> Tensor:
    """arXiv 2506.13585, eq. 4 and 5. In its experiments no lower bound was effective."""
    weight = toy.ratio.clamp(max=1 + 0.28).detach()
    return token_mean(weight * toy.advantages * toy.logprobs)


def sapo(toy: Toy) -> Tensor:
    """arXiv 2511.20347, eq. 5 and 6: a sigmoid gate in place of the clip."""
    tau = torch.where(toy.advantages > 0, 1.0, 1.05).double()
    gate = torch.sigmoid(tau * (toy.ratio - 1)) * 4 / tau
    return sequence_mean(gate * toy.advantages)


def dppo(toy: Toy) -> Tensor:
    """arXiv 2602.04879, eq. 12, binary TV: masked where the probability itself has moved too far,
    away from the sampler's."""
    ratio = (toy.logprobs - toy.sampler).exp()
    distance = (toy.logprobs.exp() - toy.sampler.exp()).abs().detach()
    is_away = torch.where(toy.advantages > 0, ratio > 1, ratio < 1)
    mask = ~(is_away & (distance > 0.15))
    return sample_mean_of_sums(mask * ratio * toy.advantages)


def tis(toy: Toy) -> Tensor:
    """fengyao.notion.site/off-policy-rl: the clipped term, weighted by old policy over sampler."""
    weight = (toy.old - toy.sampler).exp().clamp(max=2.0)
    return token_mean(weight * clipped(toy.ratio, toy.advantages, 0.2, 0.2))


def masked(toy: Toy) -> Tensor:
    weight = (toy.old - toy.sampler).exp()
    weight = torch.where((weight >= 0.5) & (weight <= 5.0), weight, 0.0)
    return weight * clipped(toy.ratio, toy.advantages, 0.2, 0.2)


def mis(toy: Toy) -> Tensor:
    """IcePop, arXiv 2510.18855, section 2: weights outside of 0.5 to 5 are 0."""
    return sequence_mean(masked(toy))


def mis_over_tokens(toy: Toy) -> Tensor:
    """IcePop as INTELLECT-3 averages it, arXiv 2512.16144, eq. 1."""
    return token_mean(masked(toy))


def gspo(toy: Toy) -> Tensor:
    """arXiv 2507.18071, eq. 5 and 7: one ratio a sequence, the geometric mean of its tokens'."""
    ratio = of_sequences(toy.logprobs - toy.old).exp()
    return clipped(ratio, toy.scores, 3e-4, 4e-4).mean()


def gmpo(toy: Toy) -> Tensor:
    """arXiv 2507.20673: the geometric mean of ratios that are clipped before, one-sided."""
    log_ratio = toy.logprobs - toy.old
    sign = toy.advantages.sign()
    one_sided = sign * torch.min(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
    return (of_sequences(one_sided).exp() * toy.scores).mean()


def dr_grpo(toy: Toy) -> Tensor:
    """arXiv 2503.20783: no 1 / |o|. (Its advantages lack the std, which is not the loss's.)"""
    return sample_mean_of_sums(clipped(toy.ratio, toy.advantages, 0.2, 0.2))


def luspo(toy: Toy) -> Tensor:
    """arXiv 2602.05261: GSPO, each sequence times its length."""
    ratio = of_sequences(toy.logprobs - toy.old).exp()
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    return (clipped(ratio, toy.scores, 2e-3, 2.5e-3) * lengths).mean()


def penalised(toy: Toy, penalty: Tensor) -> Tensor:
    """arXiv 1707.06347, eq. 8, with an estimate of KL(pi_old, pi) a token."""
    return token_mean(toy.ratio * toy.advantages - BETA * penalty)


def kl_exact(toy: Toy) -> Tensor:
    """The whole distributions' KL, as in PPO's paper."""
    terms = toy.log_p_old.exp() * (toy.log_p_old - toy.log_p)
    return penalised(toy, terms.sum(1))


def kl_k1(toy: Toy) -> Tensor:
    """joschu.net/blog/kl-approx.html."""
    return penalised(toy, -toy.ratio.log())


def kl_k2(toy: Toy) -> Tensor:
    return penalised(toy, toy.ratio.log() ** 2 / 2)


def kl_k3(toy: Toy) -> Tensor:
    return penalised(toy, toy.ratio - 1 - toy.ratio.log())


def kl_in_reward(toy: Toy) -> Tensor:
    """arXiv 2203.02155: every token is paid less by its log-ratio, which has no gradient. At gamma
    = lambda = 1 a token's advantage holds all payments from it on."""
    paid = -BETA * toy.ratio.detach().log()
    from_here = torch.cat([part.flip(0).cumsum(0).flip(0) for part in paid.split(LENGTHS)])
    return token_mean(toy.ratio * (toy.advantages + from_here))


TOKEN, SEQUENCE = "the token mean", "the sequence mean"
SCALED = "the token mean times the mean length"
SHIFTED = "the token mean with beta added to every advantage"
# What the page's table says of each.
LOSSES = {
    "PPO's clip": (ppo_clip, TOKEN),
    "clip-higher": (clip_higher, TOKEN),
    "CISPO": (cispo, TOKEN),
    "TIS": (tis, TOKEN),
    "GRPO": (grpo, SEQUENCE),
    "GSPO": (gspo, SEQUENCE),
    "GMPO": (gmpo, SEQUENCE),
    "SAPO": (sapo, SEQUENCE),
    "MIS, as IcePop": (mis, SEQUENCE),
    "MIS, as INTELLECT-3": (mis_over_tokens, TOKEN),
    "DPPO's mask": (dppo, SCALED),
    "Dr. GRPO": (dr_grpo, SCALED),
    "LUSPO": (luspo, SCALED),
    "KL penalty, exact": (kl_exact, TOKEN),
    "KL penalty, k2": (kl_k2, TOKEN),
    "KL penalty, k3": (kl_k3, TOKEN),
    "KL penalty, k1": (kl_k1, SHIFTED),
    "KL in the reward": (kl_in_reward, TOKEN),
}


def reference(toy: Toy, kind: str) -> Tensor:
    """The gradient of sum A log p, by its mean."""
    if kind == SEQUENCE:
        return toy.gradient(sequence_mean(toy.advantages * toy.logprobs))
    shift = BETA if kind == SHIFTED else 0.0
    scale = MEAN_LENGTH if kind == SCALED else 1.0
    return scale * toy.gradient(token_mean((toy.advantages + shift) * toy.logprobs))


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_a_loss_is_no_more_than_its_mean(name):
    loss, kind = LOSSES[name]
    toy = Toy()
    assert difference(toy.gradient(loss(toy)), reference(toy, kind)) < EXACT
    for other in {TOKEN, SEQUENCE, SCALED, SHIFTED} - {kind}:
        assert difference(toy.gradient(loss(toy)), reference(toy, other)) > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_at_another_ratio_each_loss_is_something_else(name):
    """Else the test above would prove nothing about the losses."""
    loss, kind = LOSSES[name]
    toy = Toy(moved=0.5)
    assert difference(toy.gradient(loss(toy)), reference(toy, kind)) > 0.01


# ---- this repository's loss ----------------------------------------------------------------------


def shipped(toy: Toy, loss_mean="token") -> Tensor:
    """The gradient of -policy_loss, as `update` scales it, on the advantages that
    compute_advantages makes: in float32, so it equals to 1e-6."""
    prompts = [[1]] * len(LENGTHS)
    responses = [ids.tolist() for ids in toy.tokens]
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    device = torch.device("cpu")
    batch = ppo.Batch(prompts, responses, torch.tensor(GROUPS), rewards, device, {}, [])
    cfg = SimpleNamespace(
        estimator="grpo",
        loss_mean=loss_mean,
        generate_max_len=11,
        critic_lambd=None,
        advantage_normalization=True,
        temperature=1.0,
    )
    ppo.compute_advantages(batch, cfg)
    count = sum(LENGTHS)
    micro = SimpleNamespace(mask=torch.ones(count), flat_index=torch.arange(count))

    def policy(micro, temperature):
        return toy.logprobs, torch.zeros(count)

    loss, _ = ppo.policy_loss(policy, batch, micro, cfg)
    return toy.gradient(-loss / count)


def test_loss_mean_is_the_published_mean():
    """--loss_mean token is PPO's, sequence GRPO's; constant is Dr. GRPO's with generate_max_len as
    its constant."""
    toy = Toy()
    assert difference(shipped(toy, "token"), toy.gradient(ppo_clip(toy))) < 1e-6
    assert difference(shipped(toy, "sequence"), toy.gradient(grpo(toy))) < 1e-6
    assert difference(shipped(toy, "constant"), toy.gradient(dr_grpo(toy)) / 11) < 1e-6


def test_a_kl_to_the_base_model_is_not_inert():
    """A penalty to another model than the one that sampled acts at ratio 1, and its form matters.
    In expectation k2 in the loss and k1 in the reward follow KL(pi, base), k3 in the loss KL(base,
    pi), and k1 in the loss is nothing (arXiv 2506.09477)."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=rng, dtype=torch.float64).requires_grad_()
    log_p = logits.log_softmax(0)
    log_base = torch.randn(VOCABULARY, generator=rng, dtype=torch.float64).log_softmax(0)

    def gradient(number: Tensor) -> Tensor:
        return torch.autograd.grad(number, logits, retain_graph=True)[0]

    def expected(of_tokens: Tensor) -> Tensor:
        """Over tokens that were sampled from pi; sampling has no gradient."""
        return gradient((log_p.detach().exp() * of_tokens).sum())

    forward = gradient((log_p.exp() * (log_p - log_base)).sum())
    backward = gradient((log_base.exp() * (log_base - log_p)).sum())
    log_ratio = log_base - log_p
    assert difference(expected(log_ratio**2 / 2), forward) < EXACT
    assert difference(expected((log_p - log_base).detach() * log_p), forward) < EXACT
    assert difference(expected(log_ratio.exp() - 1 - log_ratio), backward) < EXACT
    assert expected(-log_ratio).norm() < EXACT
    assert difference(forward, backward) > 0.1
