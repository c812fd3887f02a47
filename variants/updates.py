"""The policy has several updates in a step, with PPO's ratio and clip (arXiv 1707.06347, eq. 7).

Open-Reasoner-Zero has one update in a step, which is strictly on-policy. Then the ratio and the
clip do nothing. Several updates need one more forward pass, for the log-probs before the updates.
Measured in the laboratory (PPO, 3 seeds): the accuracy is 0.551 with eight updates, and 0.570 with
one update. The standard error of the difference is 0.025.
"""

from dataclasses import dataclass

import torch

NEEDS = ["several_updates"]


@dataclass
class Flags:
    policy_clip: float = 0.2  # The loss moves no ratio further from 1 than this number.
    policy_clip_high: float | None = None  # The clip above 1. Default: --policy_clip.


def token_loss(_original, logprobs, entropy, advantages, batch, micro, cfg, stats):
    old = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
    # The ratio is 1 only in the first update.
    ratio = ((logprobs - old) * micro.mask).exp()  # (M,)
    high = cfg.policy_clip if cfg.policy_clip_high is None else cfg.policy_clip_high
    clipped = ratio.clamp(1 - cfg.policy_clip, 1 + high)  # (M,)
    return -torch.minimum(ratio * advantages, clipped * advantages)
