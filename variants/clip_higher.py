"""PPO's clip is wider above 1 than below 1: -min(r A, clip(r, 1 - 0.2, 1 + 0.28) A).

With an upper clip of 0.2 a token has no gradient once it is 1.2 times as likely. DAPO (arXiv
2503.14476, eq. 10) claims that this limits rare tokens most, and so exploration.
In the laboratory (GRPO, 8 updates, 3 seeds) the accuracy is 0.524 with it and 0.531 without it.
"""

from dataclasses import dataclass

import torch

from nanoorz.flags import flag
from variants.textbook_ppo import TextbookPPO


@dataclass
class ClipHigher(TextbookPPO):
    policy_clip: float = flag(0.2, "The loss lowers no ratio below 1 minus this number.")
    policy_clip_high: float = flag(0.28, "The loss raises no ratio above 1 plus this number.")

    def token_loss(self, logprobs, entropy, advantages, batch, micro, stats):
        old = batch.per_token["old_logprobs"][micro.flat_index]  # (M,)
        ratio = ((logprobs - old) * micro.real).exp()  # (M,)
        clipped = ratio.clamp(1 - self.policy_clip, 1 + self.policy_clip_high)  # (M,)
        return -torch.minimum(ratio * advantages, clipped * advantages)
