"""The memory of one rank in each phase of a step, computed from the model's config alone.

Memory that stays on the card (weights, masters and moments, gradient sums, ZeRO's buckets) is
counted once. Memory that a phase needs is added to it. All numbers are bytes, and Memory is in GiB.
docs/scaling.md computes the same sums by hand. The sums assume bf16 attention with varlen kernels,
and DeepSpeed's defaults except for the settings of lib/models.py.
"""

from dataclasses import dataclass

from torch import nn
from transformers import AutoConfig, Qwen2Config

import ppo
from lib import check

GIB = 2**30
# A card of 80 GB shows 79.1 GiB.
VISIBLE = 0.989
# The plan uses no larger share of the card, because the allocator cannot use every gap.
USABLE = 0.95
# CUDA's own context, and NCCL's buffers for the world and for DeepSpeed's copy of the world.
CONTEXT = 1.5 * GIB
# CUDA graphs and the runner's buffers. vLLM keeps both while it sleeps.
ASLEEP = 1.5 * GIB
GRAPHS = GIB
# Elements of DeepSpeed's reduce bucket, as lib/models.py sets it.
BUCKET = 10**8
# Elements that ZeRO-3 may keep gathered, and elements that its optimizer handles at once: defaults.
LIVE = 10**9
SUBGROUP = 10**9
# Bytes of a chunk of fp32 logits in lib/head.py.
CHUNK = 2**29

# The models of the recipes. Their plans and random weights need no network.
SHAPE_FIELDS = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
]
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
}


def model_config(name: str, **changes):
    """Returns the config of SHAPES, of a folder, or of the hub. Raises OSError or ValueError."""
    if name not in SHAPES:
        return AutoConfig.from_pretrained(name, **changes)
    shape = dict(zip(SHAPE_FIELDS, SHAPES[name]))
    return Qwen2Config(**shape | {"max_position_embeddings": 131072} | changes)


class Sizes:
    """The sizes of a model, in elements. rank: of the adapters that --variant lora trains."""

    def __init__(self, config, rank=0):
        def known(name, default):
            # Some architectures lack the field, and some leave it empty.
            return getattr(config, name, None) or default

        self.vocab = config.vocab_size
        self.hidden = config.hidden_size
        self.layers = config.num_hidden_layers
        self.intermediate = known("intermediate_size", 4 * self.hidden)
        heads = config.num_attention_heads
        # The keys of one token in one layer. The values have the same size.
        self.keys = known("head_dim", self.hidden // heads) * known("num_key_value_heads", heads)
        self.embedding = self.embeddings = self.vocab * self.hidden
        self.policy = check.count_parameters(config)
        # A tied head is the embedding, and the critic has an embedding too.
        self.critic = self.policy + self.hidden
        if not config.tie_word_embeddings:
            self.critic -= self.embedding
            self.embeddings += self.embedding
        self.adapters = 0
        if rank:
            modules = check.skeleton(config).base_model.modules()
            linear = [module for module in modules if isinstance(module, nn.Linear)]
            self.adapters = rank * sum(x.in_features + x.out_features for x in linear)
        # The parameters that the policy's optimizer updates.
        self.learnt = self.adapters or self.policy


@dataclass
class Memory:
    """GiB on one rank, item by item."""

    always: dict[str, float]
    # For each phase: what the phase needs in addition, at its highest point.
    phases: dict[str, dict[str, float]]
    card: float  # what the card shows
    kv_tokens: int  # the tokens that the sampler's cache holds

    def peak(self, phase: str) -> float:
        return total(self.always) + total(self.phases[phase])

    def too_large(self) -> dict[str, float]:
        """Returns the peaks that do not fit."""
        peaks = {phase: self.peak(phase) for phase in self.phases}
        return {phase: peak for phase, peak in peaks.items() if peak > USABLE * self.card}


def total(items: dict[str, float]) -> float:
    return sum(items.values())


def estimate(cfg, config, world: int, card_gb: float) -> Memory:
    """Returns the plan of one rank. card_gb: the card's size as it is sold."""
    rank = Rank(cfg, config, world, card_gb)
    sizes = rank.sizes
    phases = {"rollout": {"sampler awake": rank.sampler()}}
    if rank.has_critic:
        phases["critic"] = rank.update(sizes.critic, sizes.critic, has_head=False)
    phases["policy"] = rank.update(sizes.policy, sizes.learnt, has_head=True)
    phases["sync"] = {"sampler awake": rank.sync()}
    in_gib = {}
    for phase, items in {"always": rank.always(), **phases}.items():
        in_gib[phase] = {name: size / GIB for name, size in items.items() if size > 0}
    always = in_gib.pop("always")
    return Memory(always, in_gib, rank.card / GIB, rank.kv_tokens())


class Rank:
    """One rank of a run. Its methods return bytes."""

    def __init__(self, cfg, config, world: int, card_gb: float = 80):
        self.cfg = cfg
        # The names of the run's variants. log_kl and fp8_rollout change the sums below.
        self.variants = getattr(cfg.variants, "modules", {})
        self.sizes = Sizes(config, getattr(cfg, "lora_rank", 0))
        self.world = world
        self.card = VISIBLE * card_gb * GIB
        self.width = 2 if cfg.bf16 else 4  # bytes of a number in the training dtype
        self.has_critic = ppo.ESTIMATORS[cfg.estimator].needs_critic
        # Are the optimizer's states on the card?
        self.on_card = cfg.offload != "optimizer"
        # Do fp32 gradient sums live on the card from a backward to its update? ZeRO-3 has them
        # there always, or with --offload in CPU memory. ZeRO-2 keeps the sums of bf16 weights on
        # the card with --offload too, and moves them once before its update.
        self.has_sums = self.on_card or cfg.zero_stage < 2 or cfg.bf16
        if cfg.zero_stage == 3:
            self.has_sums = False

    def shards(self, stage: int) -> int:
        """Returns the number of pieces that ZeRO makes of what it shards from this stage on."""
        return self.world if self.cfg.zero_stage >= stage else 1

    def always(self) -> dict[str, float]:
        """What stays on the card from the first update on."""
        sizes = self.sizes
        weights = sizes.policy + sizes.adapters
        trained = [sizes.learnt]
        if self.has_critic:
            weights += sizes.critic
            trained.append(sizes.critic)
        if "log_kl" in self.variants:
            # The reference model has weights only.
            weights += sizes.policy
        items = {"weights": weights * self.width / self.shards(3)}
        if self.on_card:
            # Without ZeRO the fp32 weights are their own masters.
            states = 12 if self.cfg.zero_stage else 8
            items["masters and moments"] = states * sum(trained) / self.shards(1)
        if self.cfg.zero_stage == 3:
            if self.on_card:
                items["gradients"] = 4 * sum(trained) / self.world
            items["buckets"] = 4 * BUCKET * len(trained)
        return items | {"CUDA and NCCL": CONTEXT}

    def update(self, model: int, learnt: int, has_head: bool) -> dict[str, float]:
        """What an update of one model needs at its highest point.

        The highest point is in a layer's backward, in the head's backward, or in the optimizer.
        model: its parameters. learnt: the parameters that are updated, all or the adapters.
        """
        embedding = self.sizes.embedding
        common = {"sampler asleep": ASLEEP}
        if self.has_sums:
            common["gradients"] = 4 * learnt / self.shards(2)
        kept, layer = self.activations()
        backward = common | {"activations": kept}
        if self.cfg.zero_stage == 3:
            backward["gathered"] = self.width * min(model, max(LIVE, embedding))
        reduction = self.reduction(min(embedding, learnt))
        points = [backward | {"layer": layer, "reduction": reduction}]
        if self.on_card and self.cfg.zero_stage == 3:
            # The gradients of a group of parameters are flattened once more.
            points.append(common | {"step": 4 * min(learnt / self.world, SUBGROUP)})
        elif self.on_card:
            # The norm is computed in float64, parameter by parameter.
            points.append(common | {"step": 8 * min(embedding, learnt / self.shards(2))})
        if has_head:
            # lib/head.py: a gradient in fp32, a gradient in bf16, and copies of a chunk of logits.
            head = max(4 * embedding + 4 * CHUNK, 6 * embedding + 2 * CHUNK)
            points.append(backward | {"head": head})
        return max(points, key=total)

    def activations(self) -> tuple[int, int]:
        """What the backward of a micro-batch finds, and what one layer's backward needs beside it.

        A norm keeps its input in fp32, its result before the weight, and its result: four times the
        hidden size.
        """
        cfg, sizes = self.cfg, self.sizes
        row = cfg.micro_train_batch_size * cfg.packing_max_len * self.width
        if cfg.gradient_checkpointing:
            # A layer keeps its input and is computed again.
            kept = sizes.hidden
            beside = 11 * sizes.hidden + 2 * sizes.keys + 6 * sizes.intermediate
        else:
            kept = 10 * sizes.hidden + 2 * sizes.keys + 4 * sizes.intermediate
            beside = 2 * sizes.intermediate
        # The last norm keeps four times the hidden size too.
        kept_in_all = row * (sizes.layers * kept + 4 * sizes.hidden)
        return kept_in_all, row * max(beside, 8 * sizes.hidden)

    def reduction(self, largest: int) -> int:
        """Gradients on their way to other ranks, and their fp32 copies.

        largest: elements of the largest parameter that is updated, at most.
        """
        # ZeRO-3 joins the gradients of a bucket. ZeRO-2 has two buckets in bf16, and a copy of one.
        copies = 4 * BUCKET
        if self.cfg.zero_stage < 3:
            copies += 2 * self.width * BUCKET
        if largest > BUCKET:
            # The parameter does not fit into a bucket and is reduced by itself.
            copies += (self.width + 4) * largest
        return copies

    def sampler(self) -> float:
        """What the sampler takes while it is awake."""
        if self.cfg.kv_cache_gb is None:
            return self.cfg.gpu_memory_utilization * self.card
        return self.cfg.kv_cache_gb * GIB + (self.sampler_weights() + self.sampler_work())

    def sync(self) -> float:
        """The weights come first, and the cache follows."""
        weights = self.sampler_weights() + ASLEEP
        if self.cfg.zero_stage == 3:
            # The largest weight is gathered, and vLLM makes a copy of it.
            weights += 2 * self.width * self.sizes.embedding
        return max(weights, self.sampler())

    def sampler_weights(self) -> float:
        """The weights on one card. Quantization leaves embedding and head as they are."""
        weights = self.sizes.policy * self.width
        if "fp8_rollout" in self.variants:
            weights -= (self.sizes.policy - self.sizes.embeddings) * (self.width - 1)
        return weights / self.cfg.tensor_parallel

    def sampler_work(self) -> float:
        """What vLLM sets aside for graphs, for a prefill, and for the logits of a decode."""
        cfg, sizes = self.cfg, self.sizes
        # vLLM's default for a prefill depends on the card.
        tokens = 16384 if self.card > 70 * GIB else 8192
        tokens = min(tokens, cfg.micro_rollout_batch_size * cfg.max_len)
        of_token = 4 * sizes.hidden + 3 * sizes.intermediate / cfg.tensor_parallel
        logits = 4 * 4 * cfg.micro_rollout_batch_size * sizes.vocab
        graphs = 0 if cfg.enforce_eager else GRAPHS
        return self.width * tokens * of_token + logits + graphs

    def kv_bytes(self) -> int:
        """The keys and values of one token."""
        return 2 * self.sizes.layers * self.sizes.keys * self.width

    def kv_tokens(self) -> int:
        """The tokens that fit beside the sampler's weights and work."""
        room = self.sampler() - (self.sampler_weights() + self.sampler_work())
        return int(max(0, room) * self.cfg.tensor_parallel / self.kv_bytes())
