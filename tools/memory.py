"""The memory of one rank, phase by phase, as arithmetic over the model's config alone.

What stays on the card (weights, masters and moments, gradient sums, ZeRO's buckets) is counted once
and what comes and goes in each phase of a step. All numbers are bytes until the plan is made, which
is in GiB. docs/scaling.md works the same sums by hand. They assume bf16 attention by varlen kernels
and DeepSpeed's defaults, apart from what lib/models.py sets.
"""

from dataclasses import dataclass

from torch import nn
from transformers import AutoConfig, Qwen2Config

import ppo
from lib import check

GIB = 2**30
# A card of 80 GB shows 79.1 GiB.
VISIBLE = 0.989
# A larger share is not planned for, since the allocator cannot use every gap.
USABLE = 0.95
# CUDA's own context, and NCCL's buffers of the world and of DeepSpeed's copy of it.
CONTEXT = 1.5 * GIB
# CUDA graphs and the runner's buffers, which vLLM keeps while it sleeps.
ASLEEP = 1.5 * GIB
GRAPHS = GIB
# Elements of DeepSpeed's reduce bucket, as lib/models.py sets it.
BUCKET = 10**8
# Elements that ZeRO-3 may keep gathered, and that its optimizer handles at once: defaults.
LIVE = 10**9
SUBGROUP = 10**9
# A chunk of fp32 logits in lib/head.py.
CHUNK = 2**29

SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
# The models of the recipes can be planned, and made with random weights, without a network.
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
}


def model_config(name: str, **changes):
    """Of a shape known here, a folder or a model of the hub. Raises OSError or ValueError."""
    if name not in SHAPES:
        return AutoConfig.from_pretrained(name, **changes)
    shape = dict(zip(SHAPE_FIELDS, SHAPES[name]))
    return Qwen2Config(**shape | {"max_position_embeddings": 131072} | changes)


def known(config, name: str, default):
    """A field that some architectures lack, or leave empty."""
    return getattr(config, name, None) or default


class Sizes:
    """What the sums need to know of a model, in elements.

    rank: of the policy's adapters, which --variant lora makes.
    """

    def __init__(self, config, rank=0):
        self.hidden = config.hidden_size
        self.layers = config.num_hidden_layers
        self.intermediate = known(config, "intermediate_size", 4 * self.hidden)
        heads = config.num_attention_heads
        head_size = known(config, "head_dim", self.hidden // heads)
        # The keys of one token in one layer; its values are as many.
        self.keys = head_size * known(config, "num_key_value_heads", heads)
        self.embedding = config.vocab_size * self.hidden
        self.policy = check.count_parameters(config)
        # A tied head is the embedding, which the critic has too.
        self.critic = self.policy + self.hidden
        self.embeddings = self.embedding
        if not config.tie_word_embeddings:
            self.critic -= self.embedding
            self.embeddings += self.embedding
        self.vocab = config.vocab_size
        self.adapters = 0
        if rank:
            self.adapters = rank * adapted_sides(config)
        # What the policy's optimizer steps through.
        self.learnt = self.adapters or self.policy


def adapted_sides(config) -> int:
    """Inputs and outputs of the body's linear layers: what an adapter of rank 1 has."""
    body = check.skeleton(config).base_model
    layers = [module for module in body.modules() if isinstance(module, nn.Linear)]
    return sum(layer.in_features + layer.out_features for layer in layers)


@dataclass
class Memory:
    """GiB on one rank, item by item."""

    always: dict[str, float]
    # Of each phase, at its highest point: what it needs besides.
    phases: dict[str, dict[str, float]]
    card: float  # what the card shows
    kv_tokens: int  # tokens that the sampler's cache holds

    def peak(self, phase: str) -> float:
        return total(self.always) + total(self.phases[phase])

    def too_large(self) -> dict[str, float]:
        """The peaks that do not fit."""
        peaks = {phase: self.peak(phase) for phase in self.phases}
        return {phase: peak for phase, peak in peaks.items() if peak > USABLE * self.card}


def estimate(cfg, config, world: int, card_gb: float) -> Memory:
    """The plan of one rank. config: the model's. card_gb: as the card is sold."""
    sizes = Sizes(config, known(cfg, "lora_rank", 0))
    card = VISIBLE * card_gb * GIB
    phases = {"rollout": {"sampler awake": sampler_bytes(cfg, sizes, card)}}
    if ppo.ESTIMATORS[cfg.estimator].needs_critic:
        critic = (sizes.critic, sizes.critic)
        phases["critic"] = training_bytes(cfg, sizes, world, *critic, has_head=False)
    policy = (sizes.policy, sizes.learnt)
    phases["policy"] = training_bytes(cfg, sizes, world, *policy, has_head=True)
    phases["sync"] = {"sampler awake": sync_bytes(cfg, sizes, card)}
    return Memory(
        in_gib(resident_bytes(cfg, sizes, world)),
        {phase: in_gib(items) for phase, items in phases.items()},
        card / GIB,
        count_kv_tokens(cfg, sizes, card),
    )


def total(items: dict[str, float]) -> float:
    return sum(items.values())


def in_gib(items: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in items.items() if size > 0}


def number_bytes(cfg) -> int:
    """Of one number in the training dtype."""
    if cfg.bf16:
        return 2
    return 4


def shards(cfg, world: int, stage: int) -> int:
    """Into how many pieces ZeRO cuts what it shards from this stage on."""
    if cfg.zero_stage >= stage:
        return world
    return 1


def on_card(cfg) -> bool:
    """Are the optimizer's states on the card?"""
    return cfg.offload != "optimizer"


def has_sums(cfg) -> bool:
    """Are fp32 gradient sums on the card from a backward to its step?

    ZeRO-3 has them there for ever, or with --offload in CPU memory. ZeRO-2 keeps those of bf16
    weights on the card with --offload too, and moves them once, before its step.
    """
    if cfg.zero_stage == 3:
        return False
    return on_card(cfg) or cfg.zero_stage < 2 or cfg.bf16


# ---- the trainer -----------------------------------------------------------------------------


def resident_bytes(cfg, sizes: Sizes, world: int) -> dict[str, float]:
    """What stays on the card from the first optimizer step on."""
    trained = [sizes.learnt]
    held = sizes.policy + sizes.adapters
    if ppo.ESTIMATORS[cfg.estimator].needs_critic:
        trained.append(sizes.critic)
        held += sizes.critic
    if cfg.log_kl:
        # The reference has weights only.
        held += sizes.policy
    items = {"weights": held * number_bytes(cfg) / shards(cfg, world, stage=3)}
    if on_card(cfg):
        states = 12
        if cfg.zero_stage == 0:
            # The fp32 weights are their own masters.
            states = 8
        items["masters and moments"] = states * sum(trained) / shards(cfg, world, stage=1)
    if cfg.zero_stage == 3:
        # They are never let go. At the other stages they live from a backward to its step.
        if on_card(cfg):
            items["gradients"] = 4 * sum(trained) / world
        items["buckets"] = 4 * BUCKET * len(trained)
    items["CUDA and NCCL"] = CONTEXT
    return items


def training_bytes(
    cfg, sizes: Sizes, world: int, model: int, learnt: int, has_head: bool
) -> dict[str, float]:
    """Of an update of one model: the highest of three points.

    They are in a layer's backward, in the head's, and in the optimizer step. Of the model's
    parameters so many are learnt: all, or the adapters.
    """
    common = {"sampler asleep": ASLEEP}
    if has_sums(cfg):
        common["gradients"] = 4 * learnt / shards(cfg, world, stage=2)
    kept = {"activations": kept_bytes(cfg, sizes)}
    if cfg.zero_stage == 3:
        kept["gathered"] = number_bytes(cfg) * min(model, max(LIVE, sizes.embedding))
    reduction = reduction_bytes(cfg, min(sizes.embedding, learnt))
    layer = {"layer": layer_bytes(cfg, sizes), "reduction": reduction}
    points = [common | kept | layer, common | {"step": step_bytes(cfg, sizes, world, learnt)}]
    if has_head:
        points.append(common | kept | {"head": head_bytes(sizes)})
    return max(points, key=total)


def row_bytes(cfg) -> int:
    """Of one number for each token of a micro-batch."""
    return cfg.micro_train_batch_size * cfg.packing_max_len * number_bytes(cfg)


def kept_bytes(cfg, sizes: Sizes) -> int:
    """What the backward of a micro-batch finds: of each layer all, or its input alone.

    A norm keeps a copy of its input in fp32, its result before the weight, and its result: four
    times the hidden size, the last norm too.
    """
    of_layer = 10 * sizes.hidden + 2 * sizes.keys + 4 * sizes.intermediate
    if cfg.gradient_checkpointing:
        of_layer = sizes.hidden
    return row_bytes(cfg) * (sizes.layers * of_layer + 4 * sizes.hidden)


def layer_bytes(cfg, sizes: Sizes) -> int:
    """At the highest point of one layer's backward, in its MLP, beside what was kept."""
    beside = 2 * sizes.intermediate
    if cfg.gradient_checkpointing:
        # The layer has been computed again.
        beside = 11 * sizes.hidden + 2 * sizes.keys + 6 * sizes.intermediate
    return row_bytes(cfg) * max(beside, 8 * sizes.hidden)


def head_bytes(sizes: Sizes) -> int:
    """lib/head.py: a gradient in fp32, one in bf16, and chunks of logits in some forms."""
    chunks = 4 * sizes.embedding + 4 * CHUNK
    products = 6 * sizes.embedding + 2 * CHUNK
    return max(chunks, products)


def reduction_bytes(cfg, largest: int) -> int:
    """What leaves a backward for the other ranks, and its copies in fp32.

    largest: elements of the largest parameter that is learnt, at most.
    """
    width = number_bytes(cfg)
    # ZeRO-3 joins a bucket's gradients; ZeRO-2 has two buckets in bf16, and a copy of one.
    copies = 4 * BUCKET
    if cfg.zero_stage < 3:
        copies += 2 * width * BUCKET
    if largest > BUCKET:
        # It does not fit into a bucket and is reduced by itself.
        copies += (width + 4) * largest
    return copies


def step_bytes(cfg, sizes: Sizes, world: int, learnt: int) -> float:
    """Of an optimizer step, when the activations have gone."""
    if not on_card(cfg):
        return 0
    if cfg.zero_stage == 3:
        # The gradients of a group of parameters are flattened once more.
        return 4 * min(learnt / world, SUBGROUP)
    # The norm is taken in float64, parameter by parameter.
    return 8 * min(sizes.embedding, learnt / shards(cfg, world, stage=2))


# ---- the sampler -----------------------------------------------------------------------------


def sampler_bytes(cfg, sizes: Sizes, card: float) -> float:
    """Of the sampler while it is awake: its share of the card, or what a given cache makes it."""
    if cfg.kv_cache_gb is None:
        return cfg.gpu_memory_utilization * card
    beside = sampler_weights(cfg, sizes) + sampler_work(cfg, sizes, card)
    return cfg.kv_cache_gb * GIB + beside


def sync_bytes(cfg, sizes: Sizes, card: float) -> float:
    """The weights come first, with ZeRO-3 beside gathered ones, and then the cache."""
    weights = sampler_weights(cfg, sizes) + ASLEEP
    if cfg.zero_stage == 3:
        # The largest one is gathered, and vLLM makes a copy of it.
        weights += 2 * number_bytes(cfg) * sizes.embedding
    return max(weights, sampler_bytes(cfg, sizes, card))


def sampler_weights(cfg, sizes: Sizes) -> float:
    """On one card. Quantized ones are bytes, apart from embedding and head."""
    width = number_bytes(cfg)
    weights = sizes.policy * width
    if cfg.rollout_quantization:
        weights -= (sizes.policy - sizes.embeddings) * (width - 1)
    return weights / cfg.tensor_parallel


def sampler_work(cfg, sizes: Sizes, card: float) -> float:
    """What vLLM sets aside for its own work: graphs, a prefill, and the logits of a decoding."""
    # Its defaults for a prefill on large and on other cards.
    tokens = 8192
    if card > 70 * GIB:
        tokens = 16384
    tokens = min(tokens, cfg.micro_rollout_batch_size * cfg.max_len)
    of_token = 4 * sizes.hidden + 3 * sizes.intermediate / cfg.tensor_parallel
    logits = 4 * 4 * cfg.micro_rollout_batch_size * sizes.vocab
    work = number_bytes(cfg) * tokens * of_token + logits
    if not cfg.enforce_eager:
        work += GRAPHS
    return work


def count_kv_tokens(cfg, sizes: Sizes, card: float) -> int:
    """What the sampler's share holds beside its weights and its own work."""
    room = sampler_bytes(cfg, sizes, card)
    room -= sampler_weights(cfg, sizes) + sampler_work(cfg, sizes, card)
    return int(max(0, room) * cfg.tensor_parallel / kv_bytes(cfg, sizes))


def kv_bytes(cfg, sizes: Sizes) -> int:
    """Of the keys and values of one token."""
    return 2 * sizes.layers * sizes.keys * number_bytes(cfg)
