"""The seconds of a step, and the hours and dollars of a run, as arithmetic over a data sheet.

Nothing of it was measured on a card. docs/scaling.md says what the constants below assume, and
works the same sums by hand. Communication between ranks is taken to hide behind computation;
evaluations, saves and the start are left out.
"""

import math
from dataclasses import dataclass

import ppo
from lib import check
from tools import memory

# GB as sold, dense bf16 products with fp32 sums in TFLOP/s, and the memory's GB/s: the data sheets
# of NVIDIA, and for GeForce cards its white papers of each architecture.
CARDS = {
    "A10": (24, 125, 600),
    "A100": (80, 312, 2039),
    "A100-40": (40, 312, 1555),
    "A4000": (16, 76.7, 448),
    "A6000": (48, 154.8, 768),
    "H100": (80, 989, 3350),
    "H100-PCIE": (80, 756, 2000),
    "H200": (141, 989, 4800),
    "L4": (24, 121, 300),
    "L40S": (48, 362, 864),
    "3090": (24, 71, 936),
    "4080": (16, 97.5, 717),
    "4090": (24, 165.2, 1008),
    "5090": (32, 209.5, 1792),
}
# Volta, Turing and older.
WITHOUT_BF16 = ("T4", "V100", "P100", "1080TI", "2080TI", "TITAN", "RTX8000")

# Tokens of an average prompt, with its template.
PROMPT = 200
# Of the peak, in all matrix products. What checkpointing computes again counts as work.
MFU = 0.3
# Of the memory's bandwidth, while tokens are sampled.
BANDWIDTH = 0.6
# Seconds that a decoding takes besides: launches, the choice of tokens, the schedule.
OVERHEAD = 0.005
# Bytes a parameter that an optimizer step moves: gradient, masters, moments and weight.
STEP_BYTES = 30
# Bytes a second between a card and CPU memory, and of weights on their way to the sampler.
LINK = 20e9
# Seconds in which the sampler falls asleep and wakes up and the step is reported.
SWITCH = 2.0


@dataclass
class Card:
    name: str
    gb: float  # as it is sold
    flops: float  # a second, dense, in bf16
    bandwidth: float  # bytes a second


def find_card(name: str) -> Card:
    """Raises UserError for a card without bf16, and for a name that is not in the table."""
    key = name.upper()
    choices = f"cards with bf16 are {', '.join(CARDS)}"
    check.require(
        key not in WITHOUT_BF16,
        f"--card {name} has no bf16, so take one of Ampere or newer; {choices}",
    )
    check.require(key in CARDS, f"--card {name} is not known: {choices}; others have --card_gb")
    gb, tera, giga = CARDS[key]
    return Card(key, gb, tera * 1e12, giga * 1e9)


class Times:
    """The seconds of one step, phase by phase, which all ranks spend alike."""

    def __init__(self, cfg, config, world: int, card: Card, length_share: float):
        """length_share: an average response's length as a share of the longest one's."""
        self.cfg = cfg
        self.sizes = memory.Sizes(config, memory.known(cfg, "lora_rank", 0))
        self.world = world
        self.card = card
        self.prompt = min(PROMPT, cfg.prompt_max_len, cfg.max_len - 1)
        self.limit = min(cfg.generate_max_len, cfg.max_len - self.prompt)
        self.response = length_share * self.limit
        self.samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt / world

    def of_step(self, kv_tokens: int) -> dict[str, float]:
        """kv_tokens: what a sampler's cache holds, as planned."""
        seconds = {"rollout": self.rollout(kv_tokens)}
        if ppo.ESTIMATORS[self.cfg.estimator].needs_critic:
            seconds["critic"] = self.critic()
        seconds["policy"] = self.policy()
        seconds["sync"] = SWITCH + self.sizes.policy * memory.number_bytes(self.cfg) / LINK
        return seconds

    def rollout(self, kv_tokens: int) -> float:
        """Sequences replace each other in a full batch, and the last ones reach the limit."""
        samples = self.samples * self.cfg.tensor_parallel
        room = kv_tokens / (self.prompt + self.response)
        in_flight = min(samples, self.cfg.micro_rollout_batch_size, room)
        decodings = samples / in_flight * self.response + self.limit - self.response
        return decodings * self.decoding(in_flight)

    def decoding(self, in_flight: float) -> float:
        """A token for each sequence: all weights are read, and the keys and values so far."""
        length = self.prompt + self.response / 2
        cache = in_flight * length * memory.kv_bytes(self.cfg, self.sizes)
        read = memory.sampler_weights(self.cfg, self.sizes) + cache / self.cfg.tensor_parallel
        reading = read / (BANDWIDTH * self.card.bandwidth)
        products = 2 * self.multiplied() * in_flight / self.cfg.tensor_parallel
        return OVERHEAD + max(reading, products / (MFU * self.card.flops))

    def multiplied(self) -> int:
        """The policy's parameters, without an embedding that is only looked up."""
        return self.sizes.policy - self.sizes.embeddings + self.sizes.embedding

    def critic(self) -> float:
        """The values before the update, and the update in its steps."""
        body = self.sizes.critic - self.sizes.embedding
        learning = self.passes() * self.forward(body) + self.moved_gradients(self.sizes.critic)
        steps = self.cfg.critic_updates * self.optimizer_step(self.sizes.critic)
        return self.forward(body) + learning + steps

    def policy(self) -> float:
        passes = self.passes()
        if self.cfg.log_kl:
            passes += 1
        learning = passes * self.forward(self.multiplied())
        learning += self.moved_gradients(self.sizes.learnt)
        return learning + self.optimizer_step(self.sizes.learnt)

    def tokens(self) -> float:
        """That a rank trains on."""
        return self.samples * (self.prompt + self.response)

    def passes(self) -> int:
        """Of an update, in forward passes: a backward is two, and checkpointing makes one more."""
        return 4 if self.cfg.gradient_checkpointing else 3

    def forward(self, parameters: int) -> float:
        """A product and a sum for each parameter and token; a token sees half of its sample."""
        seen = (self.prompt + self.response) / 2
        attention = 4 * self.sizes.layers * self.sizes.hidden * seen
        products = self.tokens() * (2 * parameters + attention)
        return products / (MFU * self.card.flops)

    def optimizer_step(self, learnt: int) -> float:
        speed = self.card.bandwidth
        if not memory.on_card(self.cfg):
            speed = LINK
        return STEP_BYTES * learnt / memory.shards(self.cfg, self.world, stage=1) / speed

    def moved_gradients(self, learnt: int) -> float:
        """ZeRO-3's offloaded sums are in CPU memory: each micro-batch fetches and returns them."""
        if memory.on_card(self.cfg) or memory.has_sums(self.cfg):
            return 0.0
        row = self.cfg.micro_train_batch_size * self.cfg.packing_max_len
        micro_batches = math.ceil(self.tokens() / row)
        return micro_batches * 8 * learnt / memory.shards(self.cfg, self.world, stage=2) / LINK
