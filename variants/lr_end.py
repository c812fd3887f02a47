"""The policy's learning rate falls linearly to --lr_end at the last update.

ORZ's 32B run had such a rate in its last 100 steps. The rate of each update depends on the last
step, so a resumed run must keep its last step.
"""

from dataclasses import dataclass

import ckpt
from lib import check


@dataclass
class Flags:
    lr_end: float = 0.0  # The policy's learning rate at the last update.


def check_config(original, cfg, world, estimators):
    original(cfg, world, estimators)
    check.require_all(cfg, {"lr_end": (0 <= cfg.lr_end < 1, "choose 0 or more, below 1")})


def find_start(original, run_dir, choice, new, fixed):
    path, state = original(run_dir, choice, new, fixed)
    if path:
        last = ckpt.load_state(path).total_steps
        advice = (
            f"{path} was made with {last} steps, this run has {new.total_steps}; keep --max_steps"
        )
        check.require(last == new.total_steps, f"--variant lr_end: {advice}")
    return path, state


def policy_rate(original, cfg, past_updates, total_updates):
    """After the warm-up the rate falls. The last update has exactly --lr_end."""
    peak = original(cfg, past_updates, total_updates)
    if past_updates < cfg.warmup_updates:
        return peak
    falling = max(1, total_updates - cfg.warmup_updates)
    progress = (past_updates + 1 - cfg.warmup_updates) / falling
    return peak + (cfg.lr_end - peak) * min(1.0, progress)
