"""A negative advantage blames a token. Here the negative advantages of most tokens become 0.

These tokens keep theirs:
- --blame none: no token, so the policy learns from positive advantages alone.
- --blame unsure: tokens that had a probability below 0.3 when they were drawn.
- --blame wrong, right: the wrong letters of tasks/chain.py, or the right ones.
- --blame random: letters at random places, in each response as many as are wrong.
In the chains GRPO breaks at a high learning rate, and holds if only wrong letters are blamed:
docs/lab.md.
"""

import math
import random
from dataclasses import dataclass

import torch

import ppo
from nanoorz.flags import flag, require

KINDS = ("none", "unsure", "wrong", "right", "random")


@dataclass
class Blame(ppo.Recipe):
    blame: str = flag("none", f"Which tokens may have a negative advantage: {', '.join(KINDS)}.")

    def check(self, world):
        super().check(world)
        require(self.blame in KINDS, f"--blame {self.blame}: choose {', '.join(KINDS)}")

    def sampling_params(self, params, request):
        params = super().sampling_params(params, request)
        if self.blame == "unsure":
            # The log-prob of the sampled token, and of no other token.
            params.logprobs = 0
        return params

    def whiten(self, advantages, batch):
        advantages = super().whiten(advantages, batch)
        return advantages.where((advantages > 0) | self._is_blamed(batch), 0.0)

    def _is_blamed(self, batch):
        """May the token have a negative advantage? (T,) bool."""
        if self.blame == "unsure":
            return batch.per_token["logprobs"] < math.log(0.3)
        if self.blame == "none":
            return torch.zeros(int(batch.response_lengths.sum()), dtype=bool, device=batch.device)
        blamed = [x for sample in batch.samples for x in self._blamed_letters(sample)]
        return torch.tensor(blamed, device=batch.device)

    def _blamed_letters(self, sample) -> list[bool]:
        wrong = _wrong_tokens(sample)
        if self.blame == "right":
            return [not is_wrong for is_wrong in wrong]
        if self.blame == "random":
            random.Random(sample.request.seed).shuffle(wrong)
        return wrong


def _wrong_tokens(sample) -> list[bool]:
    """For each drawn token: is the letter of its turn wrong?"""
    label = sample.request.problem.label
    keys = [label["letters"][0], *sample.turns]
    is_wrong = [label["after"].get(key) != turn for key, turn in zip(keys, sample.turns)]
    number = 0
    wrong = []
    for drawn, before in zip(sample.drawn, [True, *sample.drawn]):
        if before and not drawn:
            # A reply ends a turn.
            number += 1
        if drawn:
            wrong.append(is_wrong[number])
    return wrong
