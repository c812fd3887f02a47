"""Only the critic learns in the first steps (ORZ: freezing_actor_steps).

A new critic's values are random, so the policy's first advantages would be poor. The policy's
warm-up begins when the policy begins to learn. VAPO (arXiv 2504.05118) also trains its critic
first.
In the chains, with a small lambda, fewer runs break: docs/lab.md.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag, require


@dataclass
class CriticFirst(ppo.Recipe):
    critic_only_steps: int = flag(10, "Steps at the start in which only the critic learns.")

    def check(self, world):
        super().check(world)
        needs_critic = self.estimators[self.estimator].needs_critic
        require(needs_critic, f"--estimator {self.estimator} has no critic; choose gae")
        learns = self.max_steps is None or self.critic_only_steps < self.max_steps
        told = f"--critic_only_steps {self.critic_only_steps}: the policy would learn in no step"
        require(learns, told)

    def train_policy(self, policy, batch, step, total_steps):
        step -= self.critic_only_steps
        total_steps -= self.critic_only_steps
        if step < 0:
            return {}
        return super().train_policy(policy, batch, step, total_steps)
