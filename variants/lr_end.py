"""The policy's learning rate falls linearly to --lr_end at the last update, after the warm-up.

ORZ's 32B run had such a rate in its last 100 steps. The rate of each update depends on the number
of updates in the run, so a resumed run must keep it.
The laboratory has not measured this variant.
"""

from dataclasses import dataclass

import ppo
from nanoorz.flags import flag, require


@dataclass
class LrEnd(ppo.Recipe):
    lr_end: float = flag(0.0, "The policy's learning rate at the last update.")

    def policy_rate(self, past_updates, total_updates):
        last = self.memory.setdefault("LrEnd", {"last": total_updates})["last"]
        told = f"the checkpoint is of a run of {last} updates, and this run has {total_updates}"
        require(last == total_updates, f"--variant lr_end: {told}; keep --max_steps")
        peak = super().policy_rate(past_updates, total_updates)
        if past_updates < self.warmup_updates:
            return peak
        falling = max(1, total_updates - self.warmup_updates)
        progress = (past_updates + 1 - self.warmup_updates) / falling
        return peak + (self.lr_end - peak) * min(1.0, progress)
