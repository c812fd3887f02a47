"""The policy has several updates in a step. The variants updates, cispo and gspo build on this one.

The batch gets `old_logprobs`, (T,): the log-probs before the first update. A ratio needs them, so
there is one more forward pass. Alone this variant has no ratio: from the second update on its
gradient is not that of the policy which drew the samples.
"""

from dataclasses import dataclass

import ppo
from lib import check
from lib.flags import flag


@dataclass
class SeveralUpdates(ppo.Recipe):
    policy_updates: int = flag(
        8, "Updates of the policy in a step. Each takes its part of the samples."
    )

    def check(self, world):
        super().check(world)
        is_right = self.policy_updates >= 1
        check.require_all(self, {"policy_updates": (is_right, "must be at least 1")})

    def token_passes(self, policy, critic, batch, step):
        super().token_passes(policy, critic, batch, step)
        batch.per_token["old_logprobs"] = ppo.compute_logprobs(policy, batch, self)

    def train_policy(self, policy, batch, step, total_steps):
        past = step * self.policy_updates
        total = total_steps * self.policy_updates
        rates = [self.policy_rate(past + k, total) for k in range(self.policy_updates)]
        samples = ppo.indices_of(self.samples_that_count, batch)
        needed = ppo.indices_of(self.samples_to_learn_from, batch)
        loss = self.policy_loss
        return ppo.update_in_parts(policy, loss, batch, samples, rates, self, step, needed)
