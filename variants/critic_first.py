"""Only the critic learns in the first steps (ORZ: freezing_actor_steps).

A new critic's values are random, so the policy's first advantages would be poor. The policy's
learning rate counts the policy's own updates, so its warm-up begins when the policy begins to
learn. VAPO (arXiv 2504.05118) also trains its critic first.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag, require, require_all


@dataclass
class CriticFirst(ppo.Recipe):
    critic_only_steps: int = flag(10, "Steps at the start in which only the critic learns.")

    def check(self, world):
        super().check(world)
        needs_critic = self.estimators[self.estimator].needs_critic
        require(needs_critic, f"--estimator {self.estimator} has no critic; choose gae")
        is_less = self.max_steps is None or self.critic_only_steps < self.max_steps
        advice = f"the policy would learn in none of {self.max_steps} steps; choose fewer"
        require_all(self, {"critic_only_steps": (is_less, advice)})

    def train_policy(self, policy, batch, step, total_steps):
        step -= self.critic_only_steps
        total_steps -= self.critic_only_steps
        if step < 0:
            return {}
        return super().train_policy(policy, batch, step, total_steps)
