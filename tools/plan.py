"""Does a run fit on the cards that you have? It prints the memory of a GPU in each phase of a step.

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --card_gb 80 --model Qwen/Qwen2.5-7B

All flags but the three of this program are train.py's. The plan needs no GPU, no weights and no
data: the model's config is enough. It ends with a sentence: the run fits, or which flag helps. It
counts what docs/run.md explains, in bf16 with varlen attention. It was compared with runs of
0.5B on one card, and one of them needed 8 % more.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import pandas as pd
from torch import nn
from transformers import Qwen2Config, Qwen3_5TextConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo
import train
from nanoorz import families
from nanoorz.models import BUCKET
from nanoorz.ranks import UserError, one_line

GIB = 2**30
VISIBLE = 0.989  # A card of 80 GB shows 79.1 GiB.
USABLE = 0.95  # The rest is left for what the plan does not see.
CUDA = 0.7 * GIB
NCCL = 0.5 * GIB  # its buffers, if there are several GPUs
ASLEEP = GIB  # CUDA graphs and buffers, which vLLM keeps while it sleeps
CUDA_GRAPHS = GIB
SUBGROUP = 10**9  # elements that ZeRO-3's optimizer handles at once: DeepSpeed's default
CHUNK = 2**29  # bytes of a chunk of fp32 logits in nanoorz/head.py

# The configs of the models of runs/, which need no network.
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FIELDS += ("intermediate_size", "vocab_size", "tie_word_embeddings")
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    "Qwen/Qwen3.5-0.8B": (1024, 24, 8, 2, 3584, 248320, True),
}


def model_config(name: str):
    """The config of the text part of a model. name: of SHAPES, of the hub, or a folder."""
    if name not in SHAPES:
        return families.read_config(name)
    fields = dict(zip(FIELDS, SHAPES[name])) | {"max_position_embeddings": 131072}
    if "Qwen3.5" in name:
        return Qwen3_5TextConfig(**fields, linear_num_value_heads=16)
    return Qwen2Config(**fields)


class Plan:
    """The memory of one GPU, in bytes.

    phases: {phase: {what is in memory: bytes}}, for the phases rollout, critic, policy and sync
    kv_tokens: the tokens that the sampler's cache holds
    """

    def __init__(self, cfg, config, world: int, card: float):
        """card: the bytes that the card shows. world: the number of GPUs."""
        self.cfg, self.config, self.world, self.card = cfg, config, world, card
        self.width = 2 if cfg.bf16 else 4  # bytes of a number in the training dtype
        self.has_critic = cfg.estimators[cfg.estimator].needs_critic
        self.count_parameters()
        always = self.always()
        self.phases = {"rollout": always | {"sampler": self.sampler()}}
        if self.has_critic:
            self.phases["critic"] = always | self.update(self.critic, has_head=False)
        self.phases["policy"] = always | self.update(self.learnt, has_head=True)
        # While weights are copied, ZeRO-3 gathers the largest one, and vLLM makes a copy of it.
        early = self.sampler_weights + ASLEEP
        if cfg.zero_stage == 3:
            early += 2 * self.width * self.embedding
        self.phases["sync"] = always | {"sampler": max(early, self.sampler())}

    def peaks(self) -> dict[str, float]:
        """{phase: GiB}"""
        return {phase: sum(items.values()) / GIB for phase, items in self.phases.items()}

    def spare(self) -> float:
        """The GiB that the fullest phase leaves. It is negative if the run does not fit."""
        return USABLE * self.card / GIB - max(self.peaks().values())

    def fits(self) -> bool:
        return self.spare() >= 0 and self.kv_tokens >= self.cfg.max_len

    def with_flags(self, flags: dict) -> "Plan":
        cfg = dataclasses.replace(self.cfg, **flags)
        return Plan(cfg, self.config, self.world, self.card)

    def count_parameters(self) -> None:
        """embedding, policy, critic, and learnt: those of the policy that are trained."""
        config = self.config
        model = families.skeleton(config)
        self.policy = self.learnt = sum(p.numel() for p in model.parameters())
        self.embedding = config.vocab_size * config.hidden_size
        # The critic has one number in place of the head. A tied head is the embedding.
        self.critic = self.policy + config.hidden_size
        self.critic -= 0 if config.tie_word_embeddings else self.embedding
        self.adapters = 0
        if rank := getattr(self.cfg, "lora_rank", 0):
            layers = [x for x in model.base_model.modules() if isinstance(x, nn.Linear)]
            self.adapters = rank * sum(x.in_features + x.out_features for x in layers)
            self.learnt = self.adapters

    def shards(self, stage: int) -> int:
        """The number of pieces that ZeRO makes of what it divides from this stage on."""
        return self.world if self.cfg.zero_stage >= stage else 1

    def always(self) -> dict[str, float]:
        """What stays from the first update on."""
        cfg = self.cfg
        weights = self.policy + self.adapters
        trained = self.learnt
        if self.has_critic:
            weights += self.critic
            trained += self.critic
        items = {"weights": weights * self.width / self.shards(3)}
        if cfg.offload == "none":
            # fp32 weights, and two moments of AdamW. Without ZeRO the weights are fp32 already.
            size = 12 if cfg.zero_stage else 8
            items["optimizer: exact weights, two averages"] = size * trained / self.shards(1)
        if cfg.zero_stage == 3:
            # ZeRO-3 keeps the sums of gradients, and a bucket for each model.
            sums = 0 if cfg.offload == "optimizer" else 4 * trained / self.world
            items["gradients"] = sums + 4 * BUCKET * (1 + self.has_critic)
        items["CUDA"] = CUDA + (NCCL if self.world > 1 else 0)
        return items

    def sampler(self) -> float:
        """The sampler that is awake: its weights, its cache, and its work space."""
        cfg, config = self.cfg, self.config
        self.sampler_weights = self.policy * self.width / cfg.tensor_parallel
        # vLLM sets memory aside for prompts (it computes more at once on a large card), for the
        # logits of a decode, and for CUDA graphs.
        prompts = 16384 if self.card > 70 * GIB else 8192
        tokens = min(prompts, cfg.micro_rollout_batch_size * cfg.max_len)
        of_token = 4 * config.hidden_size + 3 * config.intermediate_size / cfg.tensor_parallel
        work = self.width * tokens * of_token
        work += 5 * 4 * cfg.micro_rollout_batch_size * config.vocab_size
        work += 0 if cfg.enforce_eager else CUDA_GRAPHS
        size = cfg.gpu_memory_utilization * self.card
        if cfg.kv_cache_gb is not None:
            size = cfg.kv_cache_gb * GIB + self.sampler_weights + work
        cache = max(0, size - self.sampler_weights - work)
        # The keys and values of one token. Recurrent layers have none.
        kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
        layers = sum("linear" not in kind for kind in kinds)
        of_token = 2 * layers * self.key_size() * self.width
        self.kv_tokens = int(cache * cfg.tensor_parallel / of_token)
        return size

    def key_size(self) -> int:
        """The keys of one token in one layer. The values have the same size."""
        config = self.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return size * (getattr(config, "num_key_value_heads", None) or heads)

    def update(self, learnt: int, has_head: bool) -> dict[str, float]:
        """What the update of a model adds. It is highest in a layer's backward pass, in that of the
        head, or in the optimizer. learnt: the parameters that are updated."""
        cfg, config = self.cfg, self.config
        row = cfg.micro_train_batch_size * cfg.packing_max_len * self.width  # tokens of one pass
        hidden, wide, keys = config.hidden_size, config.intermediate_size, self.key_size()
        # With checkpointing a layer keeps its input alone, and its backward computes it again.
        kept = hidden
        layer = max(11 * hidden + 2 * keys + 6 * wide, 8 * hidden)
        if not cfg.gradient_checkpointing:
            kept = 10 * hidden + 2 * keys + 4 * wide
            layer = max(2 * wide, 8 * hidden)
        # torch's allocator leaves gaps of about 2.5 tensors of an MLP.
        activations = row * (config.num_hidden_layers * kept + 2.5 * wide)
        gathered = self.gathered()
        layer = row * layer + gathered + self.reduction(min(self.embedding, learnt))
        points = [{"intermediate results": activations, "work space of a layer": layer}]
        if has_head:
            # A gradient in fp32 and one in bf16, and copies of a chunk of logits.
            head = max(4 * self.embedding + 2 * CHUNK, 6 * self.embedding + 1.5 * CHUNK)
            name = f"logits, {CHUNK // 2**20} MiB at a time"
            points.append(
                {"intermediate results": activations, name: head + 4 * row * hidden + gathered}
            )
        if cfg.offload == "none":
            step = 8 * min(self.embedding, learnt / self.shards(2))
            if cfg.zero_stage == 3:
                step = 4 * min(learnt / self.world, SUBGROUP)
            points.append({"the optimizer's work": step})
        items = max(points, key=lambda items: sum(items.values()))
        if cfg.zero_stage < 3 and (cfg.bf16 or cfg.offload == "none"):
            items["gradients"] = 4 * learnt / self.shards(2)
        return items | {"sampler": ASLEEP}

    def gathered(self) -> float:
        """The weights that ZeRO-3 gathers for a layer: its own, the next one's, its gradients."""
        if self.cfg.zero_stage < 3:
            return 0
        layers = self.config.num_hidden_layers
        body = self.policy - self.embedding * (1 if self.config.tie_word_embeddings else 2)
        # Without checkpointing each product keeps a view of its weight.
        kept = 0 if self.cfg.gradient_checkpointing else body
        return self.width * (kept + 3 * body / layers)

    def reduction(self, largest: int) -> float:
        """Gradients on their way to other GPUs. largest: elements of the largest parameter."""
        if self.cfg.zero_stage == 2:
            buckets = 2 if self.world > 1 else 1
            return (4 + buckets * self.width) * max(BUCKET, largest)
        copies = 4 * BUCKET
        if self.cfg.zero_stage < 2:
            copies += 2 * self.width * BUCKET
        if largest > BUCKET:
            copies += (self.width + 4) * largest
        return copies

    def host(self) -> float:
        """The GiB of CPU memory that --offload takes for this GPU."""
        if self.cfg.offload == "none":
            return 0
        total = 0
        for count in [self.learnt, self.critic] if self.has_critic else [self.learnt]:
            share = count / self.shards(1)
            # Weights and gradients are in pinned memory, which takes a power of two.
            pinned = [4 * share, 4 * share, self.width * share]
            total += 8 * share + sum(2 ** math.ceil(math.log2(size)) for size in pinned)
        return total / GIB


def find_help(plan: Plan) -> dict:
    """The flags that make the run fit: one that suffices, or several. Without any: {}."""
    cfg = plan.cfg
    values = {
        "gradient_checkpointing": True,
        "micro_train_batch_size": 1,
        "packing_max_len": cfg.max_len,
        "zero_stage": 3 if plan.world > 1 else cfg.zero_stage,
        "offload": "optimizer" if cfg.zero_stage else "none",
    }
    changes = {name: value for name, value in values.items() if value != getattr(cfg, name)}
    for flags in [sampler_share(plan), *({name: value} for name, value in changes.items())]:
        if plan.with_flags(flags).fits():
            return flags
    changes |= sampler_share(plan.with_flags(changes))
    if not plan.with_flags(changes).fits():
        return {}
    for name in list(changes):
        fewer = {key: value for key, value in changes.items() if key != name}
        if plan.with_flags(fewer).fits():
            changes = fewer
    return changes


def sampler_share(plan: Plan) -> dict[str, float]:
    """The flag that gives the sampler what is free on the card."""
    room = USABLE * plan.card - sum(plan.always().values())
    kv_cache_gb = plan.cfg.kv_cache_gb
    if kv_cache_gb is not None:
        beside = plan.sampler() - kv_cache_gb * GIB
        cache = math.floor((room - beside) / GIB)
        return {"kv_cache_gb": cache} if cache > 0 else {}
    share = math.floor(20 * room / plan.card) / 20
    return {"gpu_memory_utilization": share} if share > 0 else {}


def as_words(flags: dict) -> str:
    return " ".join(f"--{name} {str(value).lower()}" for name, value in flags.items())


# ---- what is printed -----------------------------------------------------------------------------

PHASES = {
    "rollout": "answers are drawn",
    "critic": "the critic learns",
    "policy": "the model learns",
    "sync": "new weights are copied",
}


def print_plan(plan: Plan, name: str, card_gb: float) -> None:
    cfg = plan.cfg
    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    size = f"{plan.policy / 1e9:.2f} billion parameters"
    print(f"{name}: {size}, on {plan.world} GPU(s) of {card_gb:g} GB")
    print(f"A step draws {samples} samples of at most {cfg.generate_max_len} tokens.")
    at_once = min(plan.kv_tokens // cfg.max_len, cfg.micro_rollout_batch_size)
    told = f"its cache holds {plan.kv_tokens:,} tokens"
    print(f"A sampler draws {at_once} samples of --max_len {cfg.max_len} at a time: {told}.")
    usable = f"{USABLE * plan.card / GIB:.1f} of its {plan.card / GIB:.1f} GiB"
    print(f"\nGiB of each GPU while ... ({usable} may be used)")
    table = pd.DataFrame(plan.phases) / GIB
    table = table.reindex(dict.fromkeys(x for items in plan.phases.values() for x in items))
    table.loc["sum"] = table.sum()
    table.loc["left"] = USABLE * plan.card / GIB - table.loc["sum"]
    print(table.rename(columns=PHASES).to_string(float_format="%.1f", na_rep="-"))
    print()
    if cfg.offload == "optimizer":
        print(f"--offload takes {plan.host():.0f} GiB of CPU memory for each GPU.")
    if cfg.critic:
        print("The critic is counted like the model, whatever --critic holds.")
    if type(cfg).policy_model is not ppo.Recipe.policy_model:
        size = plan.policy * plan.width / plan.shards(3) / GIB
        told = "The models that a variant adds are not counted"
        print(f"{told}: one of the policy's size takes {size:.1f} GiB of each GPU.")
    print(conclusion(plan))


def conclusion(plan: Plan) -> str:
    """The sentence at the end."""
    if plan.fits():
        return f"It fits, with {plan.spare():.1f} GiB of each GPU to spare."
    peaks = plan.peaks()
    phase = max(peaks, key=peaks.get)
    told = (
        f"It does not fit: while {PHASES[phase]}, {-plan.spare():.1f} GiB of each GPU are missing."
    )
    if plan.spare() >= 0:
        told = "It does not fit: the cache of a sampler is too small for one sample of --max_len."
    flags = find_help(plan)
    if flags:
        spare = plan.with_flags(flags).spare()
        return f"{told} With {as_words(flags)} it fits, with {spare:.1f} GiB to spare."
    return f"{told} No flag changes this: take larger cards, more cards, or a smaller model."


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--machines", type=int, default=1, help="the number of machines (1)")
    parser.add_argument("--gpus", type=int, default=1, help="the GPUs of each machine (1)")
    parser.add_argument("--card_gb", type=float, default=80, help="the GB of a card (80)")
    args, words = parser.parse_known_args()
    world = args.machines * args.gpus
    try:
        cfg = train.parse_flags(["--data", "-", *words])
        if cfg.model is None:
            parser.error("give --model; without it train.py is the demo, which needs no GPU")
        # The flag --compile_layers asks for a GPU on this machine.
        train.check_flags(dataclasses.replace(cfg, compile_layers=False), world)
        plan = Plan(cfg, model_config(cfg.model), world, args.card_gb * VISIBLE * GIB)
    except (UserError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    print_plan(plan, cfg.model, args.card_gb)


if __name__ == "__main__":
    main()
