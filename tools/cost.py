"""A library of plan.py and bench.py: the seconds of a step, computed from a card's data sheet.

No number here was measured on a card. docs/scaling.md lists the assumptions and what the
sums leave out.
"""

from collections import namedtuple

from nanoorz.flags import require
from tools import memory

# Name: GB as sold, TFLOP/s of dense bf16 products with fp32 sums, GB/s of the memory. The numbers
# are from NVIDIA's data sheets and, for GeForce cards, from its white papers.
CARDS = {"A10": (24, 125, 600), "A100": (80, 312, 2039), "A100-40": (40, 312, 1555)}
CARDS |= {"A4000": (16, 76.7, 448), "A6000": (48, 154.8, 768)}
CARDS |= {"H100": (80, 989, 3350), "H100-PCIE": (80, 756, 2000), "H200": (141, 989, 4800)}
CARDS |= {"L4": (24, 121, 300), "L40S": (48, 362, 864)}
CARDS |= {"3090": (24, 71, 936), "4080": (16, 97.5, 717)}
CARDS |= {"4090": (24, 165.2, 1008), "5090": (32, 209.5, 1792)}

PROMPT = 200  # tokens of an average prompt, with its template
MFU = 0.3  # share of the peak FLOP/s in matrix products; recomputed layers count as work
BANDWIDTH = 0.6  # share of the memory's GB/s while tokens are drawn
OVERHEAD = 0.005  # seconds of a decode for launches, the choice of tokens and the schedule
STEP_BYTES = 30  # an update moves so many bytes a parameter: gradient, masters, moments, weight
LINK = 20e9  # bytes a second between card and CPU memory, and from policy to sampler
SWITCH = 2.0  # seconds in which the sampler sleeps and wakes and the step is reported

# gb: as it is sold. flops: a second, dense, in bf16. bandwidth: bytes a second.
Card = namedtuple("Card", ["name", "gb", "flops", "bandwidth"])


def find_card(name: str) -> Card:
    """Raises UserError for a name that is not in CARDS."""
    choices = f"choose {', '.join(CARDS)}; cards older than Ampere have no bf16"
    known = name.upper() in CARDS
    require(known, f"--card {name} is not known: {choices}; or give a --card_gb alone")
    gb, tera, giga = CARDS[name.upper()]
    return Card(name.upper(), gb, tera * 1e12, giga * 1e9)


class Times:
    """The seconds of each phase of a step. All ranks need the same time."""

    def __init__(self, cfg, config, world: int, card: Card, length_share=0.5):
        """length_share: the length of an average response as a share of the limit."""
        self.cfg = cfg
        self.rank = memory.Rank(cfg, config, world)
        self.sizes = self.rank.sizes
        self.card = card
        self.prompt = min(PROMPT, cfg.prompt_max_len, cfg.max_len - 1)
        self.limit = min(cfg.generate_max_len, cfg.max_len - self.prompt)
        self.response = length_share * self.limit
        self.samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt / world
        # The tokens that a rank trains on.
        self.tokens = self.samples * (self.prompt + self.response)
        # An update in forward passes: a backward is two, and checkpointing adds one.
        self.passes = 4 if cfg.gradient_checkpointing else 3
        # The policy's parameters without an embedding that is only looked up.
        self.multiplied = self.sizes.policy - self.sizes.embeddings + self.sizes.embedding

    def of_step(self, kv_tokens: int) -> dict[str, float]:
        """kv_tokens: the tokens that a sampler's cache holds, as planned."""
        sizes = self.sizes
        seconds = {"rollout": self.rollout(kv_tokens)}
        if self.rank.has_critic:
            # The values are computed before the updates.
            learning = (1 + self.passes) * self.forward(sizes.critic - sizes.embedding)
            updates = self.cfg.critic_updates * self.update(sizes.critic)
            seconds["critic"] = learning + updates
        # The reference of log_kl takes one more forward pass.
        passes = self.passes + ("log_kl" in self.rank.variants)
        learning = passes * self.forward(self.multiplied)
        seconds["policy"] = learning + self.update(sizes.learnt)
        seconds["sync"] = SWITCH + sizes.policy * self.rank.width / LINK
        return seconds

    def rollout(self, kv_tokens: int) -> float:
        """New samples replace ended ones in a full batch. The last samples reach the limit."""
        samples = self.samples * self.cfg.tensor_parallel
        room = kv_tokens / (self.prompt + self.response)
        in_flight = min(samples, self.cfg.micro_rollout_batch_size, room)
        decodes = samples / in_flight * self.response + self.limit - self.response
        return decodes * self.decode(in_flight)

    def decode(self, in_flight: float) -> float:
        """A decode reads all weights and the keys and values, and adds a token to each sample."""
        length = self.prompt + self.response / 2
        cache = in_flight * length * self.rank.kv_bytes
        read = self.rank.sampler_weights + cache / self.cfg.tensor_parallel
        reading = read / (BANDWIDTH * self.card.bandwidth)
        products = 2 * self.multiplied * in_flight / self.cfg.tensor_parallel
        return OVERHEAD + max(reading, products / (MFU * self.card.flops))

    def forward(self, parameters: int) -> float:
        """A product and a sum for each parameter and token. A token sees half of its sample."""
        seen = (self.prompt + self.response) / 2
        attention = 4 * self.sizes.layers * self.sizes.hidden * seen
        return self.tokens * (2 * parameters + attention) / (MFU * self.card.flops)

    def update(self, learnt: int) -> float:
        speed = self.card.bandwidth if self.rank.on_card else LINK
        return STEP_BYTES * learnt / self.rank.shards(1) / speed
