"""Only the critic learns in the first steps (ORZ: freezing_actor_steps).

A new critic's values are random, so the policy's first advantages would be poor. The policy's
learning rate counts the policy's own updates, so its warm-up begins when the policy begins to
learn. VAPO (arXiv 2504.05118) also trains its critic first.
"""

from dataclasses import dataclass

from lib import check


@dataclass
class Flags:
    critic_only_steps: int = 10  # Steps at the start in which only the critic learns.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    needs_critic = estimators[cfg.estimator].needs_critic
    check.require(needs_critic, f"--estimator {cfg.estimator} has no critic; choose gae")


def count_steps(original, cfg, problem_count):
    steps = original(cfg, problem_count)
    is_less = cfg.critic_only_steps < steps
    advice = f"the policy would learn in none of {steps} steps; choose fewer"
    check.require_all(cfg, {"critic_only_steps": (is_less, advice)})
    return steps


def train_policy(original, policy, batch, cfg, step, total_steps):
    step -= cfg.critic_only_steps
    total_steps -= cfg.critic_only_steps
    if step < 0:
        return {}
    return original(policy, batch, cfg, step, total_steps)
