"""The arithmetic of a run before it starts: batches, tokens, and memory per GPU.

A plan needs no GPU and no weights. Each of these commands checks the flags and prints the numbers:

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --model Qwen/Qwen2.5-7B --data x.json

All flags but those below are train.py's, and `python train.py --help` explains them. Wrong flags
are refused with exit code 2. If the peak of a phase does not fit, the last line is a warning that
names the phase: no number of the plan was measured on a card.

The model's config is enough. What a phase needs is added to what stays on the card. Rank computes
bytes, and Memory has GiB. docs/scaling.md explains the largest parts. The sums assume bf16
attention with varlen kernels, and DeepSpeed's defaults except for those that nanoorz/models.py
sets.
"""

import argparse
import dataclasses
import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import ppo
import train
from nanoorz import families
from nanoorz.flags import require
from nanoorz.models import BUCKET
from nanoorz.ranks import UserError, one_line
from tools.shapes import model_config

GIB = 2**30
VISIBLE = 0.989  # A card of 80 GB shows 79.1 GiB.
USABLE = 0.95  # The plan uses no larger share. It does not see the memory that kernels take.
CONTEXT = 0.7 * GIB  # of CUDA
NCCL = 0.5 * GIB  # NCCL's buffers of the world and of DeepSpeed's copy of it
ASLEEP = GIB  # CUDA graphs and the runner's buffers. vLLM keeps both while it sleeps.
CUDA_GRAPHS = GIB  # of the sampler that is awake
SUBGROUP = 10**9  # elements that ZeRO-3's optimizer handles at once: DeepSpeed's default
CHUNK = 2**29  # bytes of a chunk of fp32 logits in nanoorz/head.py


class Sizes:
    """The sizes of a model, in elements. rank: of the adapters that --variant lora trains."""

    def __init__(self, config, rank=0):
        self.vocab = config.vocab_size
        self.hidden = config.hidden_size
        self.layers = config.num_hidden_layers
        # Some architectures lack these fields, and some leave them empty.
        self.intermediate = getattr(config, "intermediate_size", None) or 4 * self.hidden
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        # Recurrent layers have a state for each sequence in the place of keys and values.
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.layers
        self.recurrent = sum("attention" not in kind or "linear" in kind for kind in kinds)
        self.state = getattr(config, "linear_num_value_heads", 0) * (
            getattr(config, "linear_key_head_dim", 0) * getattr(config, "linear_value_head_dim", 0)
        )
        # The keys of one token in one layer. The values have the same size.
        self.keys = key_heads * (getattr(config, "head_dim", None) or self.hidden // heads)
        self.embedding = self.embeddings = self.vocab * self.hidden
        self.policy = families.count_parameters(config)
        # A tied head is the embedding, and the critic has an embedding too.
        self.critic = self.policy + self.hidden
        if not config.tie_word_embeddings:
            self.critic -= self.embedding
            self.embeddings += self.embedding
        self.adapters = 0
        if rank:
            modules = families.skeleton(config).base_model.modules()
            linear = [module for module in modules if isinstance(module, nn.Linear)]
            self.adapters = rank * sum(x.in_features + x.out_features for x in linear)
        # The parameters that the policy's optimizer updates.
        self.learnt = self.adapters or self.policy


@dataclass
class Memory:
    """GiB on one rank: what stays, what each phase adds at its peak, and what the card shows."""

    always: dict[str, float]
    phases: dict[str, dict[str, float]]
    card: float
    kv_tokens: int  # the tokens that the sampler's cache holds
    host: float  # memory of the CPU that --offload needs for this rank

    def peak(self, phase: str) -> float:
        return total(self.always) + total(self.phases[phase])


def total(items: dict[str, float]) -> float:
    return sum(items.values())


def estimate(cfg, config, world: int, card: float) -> Memory:
    """Returns the plan of one rank. card: GiB that the card shows.

    config: of the model. The models of variants are not counted.
    """
    rank = Rank(cfg, config, world, card)
    phases = {"always": rank.always(), "rollout": {"sampler awake": rank.sampler}}
    if rank.has_critic:
        phases["critic"] = rank.update(rank.sizes.critic, has_head=False)
    phases["policy"] = rank.update(rank.sizes.learnt, has_head=True)
    if rank.has_critic and rank.has_sums and cfg.zero_stage == 2 and world > 1:
        # With several ranks ZeRO-2 makes its sums on a stream of their own. The sums are free after
        # the critic's update, but the other streams cannot use this memory.
        phases["policy"]["critic's sums"] = 4 * rank.sizes.critic / rank.shards(2)
    phases["sync"] = {"sampler awake": rank.sync}
    for phase, items in phases.items():
        phases[phase] = {name: size / GIB for name, size in items.items() if size > 0}
    always = phases.pop("always")
    return Memory(always, phases, rank.card / GIB, rank.kv_tokens, rank.host() / GIB)


class Rank:
    """One rank of a run, in bytes."""

    def __init__(self, cfg, config, world: int, card: float = 80 * VISIBLE):
        self.cfg = cfg
        # The names of the run's variants. fp8_rollout changes the sums below.
        self.variants = getattr(cfg, "variant_texts", {})
        self.sizes = Sizes(config, getattr(cfg, "lora_rank", 0))
        self.world = world
        self.card = card * GIB
        self.width = 2 if cfg.bf16 else 4  # bytes of a number in the training dtype
        self.has_critic = cfg.estimators[cfg.estimator].needs_critic
        self.on_card = cfg.offload != "optimizer"  # Are the optimizer's states on the card?
        # Do fp32 gradient sums live on the card from a backward to its update? ZeRO-3 has them
        # there always, or with --offload in CPU memory. ZeRO-2 keeps the sums of bf16 weights on
        # the card with --offload too, and moves them once before its update.
        stays = self.on_card or cfg.zero_stage < 2 or cfg.bf16
        self.has_sums = stays and cfg.zero_stage < 3
        # vLLM's default for a prefill depends on the card. The plan counts an A100 as an H100.
        is_large = self.card > 70 * GIB
        self.plan_sampler(16384 if is_large else 8192)

    def shards(self, stage: int) -> int:
        """Returns the number of pieces that ZeRO makes of what it shards from this stage on."""
        return self.world if self.cfg.zero_stage >= stage else 1

    def plan_sampler(self, prefill: int):
        """The sampler: its weights, its cache, and what it takes while it is awake.

        prefill: the most tokens of prompts that vLLM computes at once.
        """
        cfg, sizes = self.cfg, self.sizes
        weights = sizes.policy * self.width
        if "fp8_rollout" in self.variants:
            # Quantization leaves embedding and head as they are.
            weights -= (sizes.policy - sizes.embeddings) * (self.width - 1)
        self.sampler_weights = weights / cfg.tensor_parallel
        # vLLM also sets memory aside for a prefill, for the logits of a decode, and for graphs.
        tokens = min(prefill, cfg.micro_rollout_batch_size * cfg.max_len)
        of_token = 4 * sizes.hidden + 3 * sizes.intermediate / cfg.tensor_parallel
        work = self.width * tokens * of_token
        work += 5 * 4 * cfg.micro_rollout_batch_size * sizes.vocab
        work += 0 if cfg.enforce_eager else CUDA_GRAPHS
        without_cache = self.sampler_weights + work
        self.sampler = cfg.gpu_memory_utilization * self.card
        if cfg.kv_cache_gb is not None:
            self.sampler = cfg.kv_cache_gb * GIB + without_cache
        # The keys and values of one token.
        self.kv_bytes = 2 * (sizes.layers - sizes.recurrent) * sizes.keys * self.width
        room = max(0, self.sampler - without_cache)
        # vLLM holds the states of recurrent layers in fp32.
        room = max(0, room - 4 * cfg.micro_rollout_batch_size * sizes.recurrent * sizes.state)
        self.kv_tokens = int(room * cfg.tensor_parallel / self.kv_bytes)
        # At sync the weights come first, and the cache follows.
        early = self.sampler_weights + ASLEEP
        if cfg.zero_stage == 3:
            # The largest weight is gathered, and vLLM makes a copy of it.
            early += 2 * self.width * sizes.embedding
        self.sync = max(early, self.sampler)

    def always(self) -> dict[str, float]:
        """What stays on the card from the first update on."""
        sizes = self.sizes
        weights = sizes.policy + sizes.adapters
        trained = [sizes.learnt]
        if self.has_critic:
            weights += sizes.critic
            trained.append(sizes.critic)
        items = {"weights": weights * self.width / self.shards(3)}
        if self.on_card:
            # Without ZeRO the fp32 weights are their own masters.
            states = 12 if self.cfg.zero_stage else 8
            items["masters and moments"] = states * sum(trained) / self.shards(1)
        if self.cfg.zero_stage == 3:
            if self.on_card:
                items["gradients"] = 4 * sum(trained) / self.world
            items["buckets"] = 4 * BUCKET * len(trained)
        return items | {"CUDA and NCCL": CONTEXT + (NCCL if self.world > 1 else 0)}

    def host(self) -> float:
        """What --offload needs of the CPU's memory: 18 bytes a parameter, of which 10 are pinned.

        A pinned tensor takes the next power of two. Policy and critic have tensors of their own.
        """
        if self.on_card:
            return 0
        trained = [self.sizes.learnt, self.sizes.critic] if self.has_critic else [self.sizes.learnt]
        bytes_of_all = 0
        for count in trained:
            share = count / self.shards(1)
            # The masters, their gradients and the weights in the training dtype are pinned.
            pinned = [4 * share, 4 * share, self.width * share]
            bytes_of_all += 8 * share + sum(2 ** math.ceil(math.log2(x)) for x in pinned)
        return bytes_of_all

    def update(self, learnt: int, has_head: bool) -> dict[str, float]:
        """What an update of one model needs at its highest point.

        The highest point is in a layer's backward, in the head's backward, or in the optimizer.
        learnt: the parameters that are updated, all or the adapters.
        """
        embedding = self.sizes.embedding
        common = {"sampler asleep": ASLEEP}
        if self.has_sums:
            common["gradients"] = 4 * learnt / self.shards(2)
        kept, norm, layer = self.activations()
        # torch's allocator leaves gaps between tensors. In a simulation of the allocator the gaps
        # were about 2.5 tensors of an MLP.
        gaps = 2.5 * self.width * self.row() * self.sizes.intermediate
        backward = common | {"activations": kept, "gaps": gaps}
        # The norm is computed in float64, parameter by parameter.
        step = 8 * min(embedding, learnt / self.shards(2))
        gathered, of_head = self.gathered()
        if self.cfg.zero_stage == 3:
            # The gradients of a group of parameters are flattened once more.
            step = 4 * min(learnt / self.world, SUBGROUP)
        reduction = self.reduction(min(embedding, learnt))
        points = [backward | {"layer": layer, "reduction": reduction, "gathered": gathered}]
        if not self.cfg.gradient_checkpointing:
            points[0]["activations"] += norm
        if self.on_card:
            points.append(common | {"step": step})
        if has_head:
            # head.py: a gradient in fp32, a gradient in bf16, and copies of a chunk of logits.
            head = max(4 * embedding + 2 * CHUNK, 6 * embedding + 1.5 * CHUNK)
            inputs = {"activations": kept + norm, "gathered": of_head}
            points.append(backward | inputs | {"head": head})
        return max(points, key=total)

    def gathered(self) -> tuple[float, float]:
        """The weights that ZeRO-3 has gathered in a layer's backward, and in that of the head.

        In a layer's backward these are the weights of the layer and of the next one, and the
        gradients of the layer, which are reduced together. Without checkpointing each product keeps
        a view of its weight. So there the weights of all layers are in memory, and DeepSpeed does
        not know of them: it gathers the weights of a layer again for its backward.
        """
        if self.cfg.zero_stage < 3:
            return 0, 0
        sizes = self.sizes
        layer = (sizes.policy - sizes.embeddings) / sizes.layers
        # The last matrix that is gathered ahead may exceed the limit, which is two layers.
        ahead = 2 * layer + sizes.hidden * sizes.intermediate
        kept = 0 if self.cfg.gradient_checkpointing else sizes.layers * layer
        in_head = max(sizes.embedding + layer, ahead)
        return self.width * (kept + 3 * layer), self.width * (kept + in_head)

    def row(self) -> int:
        """The tokens of a micro-batch."""
        return self.cfg.micro_train_batch_size * self.cfg.packing_max_len

    def activations(self) -> tuple[int, int, int]:
        """What the backward of a micro-batch finds: of all layers, and of the last norm. And what
        one layer's backward adds. Checkpointing frees the norm's part before a layer's backward.
        """
        cfg, sizes = self.cfg, self.sizes
        row = self.row() * self.width
        # With checkpointing a layer keeps its input and is computed again.
        kept = sizes.hidden
        beside = 11 * sizes.hidden + 2 * sizes.keys + 6 * sizes.intermediate
        if not cfg.gradient_checkpointing:
            kept = 10 * sizes.hidden + 2 * sizes.keys + 4 * sizes.intermediate
            beside = 2 * sizes.intermediate
            if cfg.compile_layers:
                # What is between the operations of a compiled kernel is not in memory.
                kept -= 4 * sizes.hidden + sizes.intermediate
        # A norm keeps its input in fp32, its result before the weight, and its result: four times
        # the hidden size.
        norm = 4 * sizes.hidden
        return row * sizes.layers * kept, row * norm, row * max(beside, 8 * sizes.hidden)

    def reduction(self, largest: int) -> int:
        """Gradients on their way to other ranks. largest: elements of the largest parameter."""
        if self.cfg.zero_stage == 2:
            # ZeRO-2 has a bucket, with several ranks two, and an fp32 copy. The largest parameter
            # fits into a bucket.
            buckets = 2 if self.world > 1 else 1
            return (4 + buckets * self.width) * max(BUCKET, largest)
        # ZeRO-3 joins the gradients of a bucket in fp32.
        copies = 4 * BUCKET
        if self.cfg.zero_stage < 2:
            copies += 2 * self.width * BUCKET
        if largest > BUCKET:
            # The parameter does not fit into a bucket and is reduced by itself.
            copies += (self.width + 4) * largest
        return copies


# ---- what is printed -----------------------------------------------------------------------------

ADVICE = """use more GPUs or --offload optimizer; critic and policy need less with --zero_stage 3,
    --gradient_checkpointing true or a lower --packing_max_len; rollout and sync need less with a
    lower --gpu_memory_utilization"""


def print_batches(cfg, config, world: int) -> None:
    """The samples, tokens and updates of one step. config: of the model."""
    samplers = world // cfg.tensor_parallel
    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    tokens = samples * min(cfg.generate_max_len, cfg.max_len)
    samples_per_row = max(1, cfg.packing_max_len // cfg.max_len)
    rows = math.ceil(samples / world / samples_per_row)
    micro_batches = math.ceil(rows / cfg.micro_train_batch_size)
    rows = f"{rows} rows of {cfg.packing_max_len}"
    is_packed = families.may_be_packed(config)
    if cfg.packing == "alone" or (cfg.packing == "auto" and not is_packed):
        # The rows of a micro-batch have as many tokens as packed rows, padding included.
        rows = f"{math.ceil(samples / world)} rows of one sample"
    share = f"{samples // samplers} for a sampler"
    print(f"{world} rank(s), {samplers} sampler(s) of {cfg.tensor_parallel}")
    print(f"a step: at most {samples} samples, {share}, {tokens:,} tokens")
    print(f"a rank: at most {rows}, {micro_batches} micro-batches")


def listed(items: dict[str, float], between: str = " + ") -> str:
    return between.join(f"{name} {size:.1f}" for name, size in items.items())


def print_memory(plan: Memory, cfg) -> None:
    """Prints the memory of one rank item by item, and a warning if a phase does not fit."""
    print(f"memory per rank, GiB of the {plan.card:.1f} that the card shows")
    print(f"always: {listed(plan.always)} = {total(plan.always):.1f}")
    peaks = {phase: plan.peak(phase) for phase in plan.phases}
    for phase, items in plan.phases.items():
        print(f"{phase}: + {listed(items)} = {peaks[phase]:.1f}")
    # The recipes in runs/ quote this line.
    rounded = ", ".join(f"{phase} {peak:.0f}" for phase, peak in peaks.items())
    print(f"peaks: {rounded} of {plan.card:.0f} GiB")
    samples = f"{plan.kv_tokens // cfg.max_len} sequences of --max_len {cfg.max_len}"
    in_flight = f"{cfg.micro_rollout_batch_size} in flight"
    print(f"KV cache: {plan.kv_tokens:,} tokens, {samples}, {in_flight}")
    if plan.host:
        print(f"CPU memory: {plan.host:.0f} GiB per rank for --offload, beside that of the run")
    if cfg.critic:
        print("memory: the critic is counted like the model, whatever --critic holds")
    usable = USABLE * plan.card
    too_large = {phase: peak for phase, peak in peaks.items() if peak > usable}
    needs = f"{listed(too_large, ', ')} of {usable:.1f} GiB, {USABLE:.0%} of what the card shows"
    if too_large:
        told = f"WARNING: the plan does not fit: phase {needs}: {one_line(ADVICE)}"
        print(told, file=sys.stderr)
    elif plan.kv_tokens < cfg.max_len:
        told = f"WARNING: phase rollout: the KV cache holds {plan.kv_tokens} tokens, less than a "
        told += f"sequence of --max_len {cfg.max_len}: raise --gpu_memory_utilization or "
        told += "--tensor_parallel"
        print(told, file=sys.stderr)


def read_flags(argv: list[str]):
    """Returns the tool's own flags, and the others. Raises UserError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.error = functools.partial(require, False)
    add = functools.partial(parser.add_argument, metavar="N")
    add("--machines", type=int, default=1, help="the number of machines (1)")
    add("--gpus", type=int, default=1, help="the number of GPUs of each machine (1)")
    add("--card_gb", type=float, default=80, help="the size of a card as it is sold (80)")
    parser.add_argument("--dry_run", action="store_true", help="runs/launch.sh reads this flag")
    args, others = parser.parse_known_args(argv)
    for name in ("machines", "gpus", "card_gb"):
        value = getattr(args, name)
        require(0 < value < 2**63, f"--{name} {value}: must be a number above 0")
    return args, others


def print_plan(args, cfg) -> None:
    world = args.machines * args.gpus
    # The check of --compile_layers would look for a GPU of this machine. The plan is for others.
    train.check_flags(dataclasses.replace(cfg, compile_layers=False), world)
    card = VISIBLE * args.card_gb
    try:
        config = model_config(cfg.model)
        plan = estimate(cfg, config, world, card)
    # A config of another kind lacks fields, or has 0 in them.
    except (OSError, ValueError, AttributeError, ZeroDivisionError) as error:
        told = f"--model {cfg.model} cannot be planned ({one_line(error).partition('. ')[0]})"
        raise UserError(f"{told}; give a causal LM: a folder, or a name of the hub") from None
    print_batches(cfg, config, world)
    print_memory(plan, cfg)
    if type(cfg).policy_model is not ppo.Recipe.policy_model:
        # A variant may make a reference or a teacher, too.
        size = 1e9 * (2 if cfg.bf16 else 4) / GIB
        size /= world if cfg.zero_stage == 3 else 1
        told = f"a billion parameters take {size:.1f} GiB per rank"
        print(f"memory: other models that a variant makes are not counted; {told}")


def main(argv: list[str]) -> None:
    """Prints the plan. Raises UserError for flags that cannot work."""
    args, others = read_flags(argv)
    cfg = train.parse_flags(others)
    if cfg.model is None:
        print("no --model: this is the demo; tools/base_model.py makes its model and its flags")
        return
    print_plan(args, cfg)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
