"""The policy has several updates in a step, with PPO's ratio and clip (arXiv 1707.06347, eq. 7).

Open-Reasoner-Zero has one update in a step, which is strictly on-policy. Then the ratio and the
clip do nothing. Several updates need one more forward pass, for the log-probs before the updates.
Measured in the laboratory (PPO, 3 seeds): the accuracy is 0.551 with eight updates, and 0.570 with
one update. The standard error of the difference is 0.025.
"""

from dataclasses import dataclass

import torch

from lib.flags import flag
from variants.several_updates import SeveralUpdates


@dataclass
class Updates(SeveralUpdates):
    policy_clip: float = flag(0.2, "The loss moves no ratio further from 1 than this number.")
    policy_clip_high: float | None = flag(None, "The clip above 1. Default: --policy_clip.")

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats):
        old = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
        # The ratio is 1 only in the first update.
        ratio = ((logprobs - old) * micro.mask).exp()  # (M,)
        high = self.policy_clip if self.policy_clip_high is None else self.policy_clip_high
        clipped = ratio.clamp(1 - self.policy_clip, 1 + high)  # (M,)
        return -torch.minimum(ratio * advantages, clipped * advantages)
