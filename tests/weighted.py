"""A variant of the tests: the tokens of a batch have weights of their own in each loss."""

import torch

import ppo


def weights(count, name):
    """0, 0.5, 1, 0, 0.5, 1, ... for the policy. Every second token for the critic. The first 20
    tokens, which are several samples, do not count."""
    places = torch.arange(count)
    return (places % 3 / 2 if name == "policy" else places % 2 == 0) * (places >= 20)


class Weighted(ppo.Recipe):
    def token_weights(self, batch, name):
        return weights(len(super().token_weights(batch, name)), name)
