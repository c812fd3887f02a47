"""The arithmetic of a run before it starts: batches, tokens, optimizer steps, memory per GPU.

It needs neither a GPU nor weights. Each of these checks the flags and prints the numbers:

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --card_gb 80 --model Qwen/Qwen2.5-7B --data x.json

Memory is estimated for one rank, in GiB, from the model's config alone. Weights, masters, moments
and gradient sums of both models stay. Above them there are two peaks in turn, training
(activations and the chunked head) and sampling (vLLM's share). If a card is too small for them, the
exit code is 2.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoConfig, Qwen2Config

import ppo
import train
from lib import check
from lib.common import UserError

GIB = 2**30
# The models of the recipes can be planned without a network.
SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
}


def model_config(name: str):
    """Of a shape known here, a folder or a model of the hub. Raises OSError or ValueError."""
    if name not in SHAPES:
        return AutoConfig.from_pretrained(name)
    shape = dict(zip(SHAPE_FIELDS, SHAPES[name]))
    return Qwen2Config(**shape, max_position_embeddings=131072)


# ---- memory ----------------------------------------------------------------------------------


@dataclass
class Memory:
    """GiB on one rank."""

    weights: float  # of all models, in the training dtype
    optimizer: float  # fp32 masters and two moments
    gradients: float  # fp32 sums
    activations: float  # of a micro-batch, and of one layer again
    head: float  # a chunk of logits, the head's gradient
    sampler: float  # vLLM's share while it is awake
    card: float
    kv_tokens: int  # tokens that the cache holds

    def __post_init__(self):
        stays = self.weights + self.optimizer + self.gradients
        self.training = stays + self.activations + self.head
        self.sampling = stays + self.sampler


def estimate(cfg, config, world: int, card_bytes: float, critic=None) -> Memory:
    """The memory plan of one rank on a card of that size. config: the model's; critic: that of the
    critic, if it is another."""
    parameters = check.count_parameters(config)
    trained = parameters
    if cfg.estimator == "gae":
        trained += check.count_parameters(critic or config)
    weights = weight_bytes(cfg, config, trained, world)
    optimizer = optimizer_bytes(cfg, trained, world)
    gradients = 4 * trained / shards(cfg, world, stage=2)
    activations = activation_bytes(cfg, config)
    # Three times a chunk of 512 MB, and the head's gradient in fp32.
    head = 3 * 2**29 + 4 * config.vocab_size * config.hidden_size
    sampler = cfg.gpu_memory_utilization * card_bytes
    kv_tokens = count_kv_tokens(cfg, config, parameters, sampler)
    parts = [weights, optimizer, gradients, activations, head, sampler, card_bytes]
    return Memory(*[part / GIB for part in parts], kv_tokens)


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


def weight_bytes(cfg, config, trained: int, world: int) -> float:
    width = number_bytes(cfg)
    held = trained * width / shards(cfg, world, stage=3)
    if cfg.zero_stage == 3:
        # The largest parameter, the embedding, is gathered whole for a moment.
        held += width * config.vocab_size * config.hidden_size
    return held


def optimizer_bytes(cfg, trained: int, world: int) -> float:
    if cfg.offload == "optimizer":
        # They are in CPU memory.
        return 0.0
    per_parameter = 12
    if cfg.zero_stage == 0:
        # The fp32 weights are their own masters.
        per_parameter = 8
    return trained * per_parameter / shards(cfg, world, stage=1)


def activation_bytes(cfg, config) -> int:
    """Of one micro-batch. With checkpointing a layer keeps its input, and one is computed again."""
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", 4 * hidden)
    tokens = cfg.micro_train_batch_size * cfg.packing_max_len
    token_bytes = tokens * number_bytes(cfg)
    inside_layer = token_bytes * (8 * hidden + 4 * intermediate)
    kept_per_layer = inside_layer
    if cfg.gradient_checkpointing:
        kept_per_layer = token_bytes * hidden
    return config.num_hidden_layers * kept_per_layer + inside_layer


def count_kv_tokens(cfg, config, parameters: int, sampler: float) -> int:
    """What vLLM's share, in bytes, holds beside its weights and 2 GiB for its own work."""
    width = number_bytes(cfg)
    weight_width = width
    if cfg.rollout_quantization:
        weight_width = 1
    room = sampler - parameters * weight_width / cfg.tensor_parallel - 2 * GIB
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    # Keys and values of one token in all layers.
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_size * width
    return int(max(0, room) * cfg.tensor_parallel / token_bytes)


def advice(memory: Memory, cfg) -> list[str]:
    """What to change where the plan does not fit; nothing where it does."""
    lines = []
    room = 0.95 * memory.card
    card = f"{memory.card:.0f} GiB"
    if memory.training > room:
        lines.append(
            f"training needs {memory.training:.1f} of {card}: use more GPUs, --zero_stage 3, "
            "--gradient_checkpointing, or lower --packing_max_len (and --max_len)"
        )
    if memory.sampling > room:
        lines.append(
            f"sampling needs {memory.sampling:.1f} of {card}: lower --gpu_memory_utilization "
            f"{cfg.gpu_memory_utilization}, or use more GPUs"
        )
    if memory.kv_tokens < cfg.max_len:
        lines.append(
            f"the KV cache holds {memory.kv_tokens} tokens, less than a sequence of --max_len "
            f"{cfg.max_len}: raise --gpu_memory_utilization or --tensor_parallel"
        )
    return lines


# ---- what is printed -------------------------------------------------------------------------


def arithmetic(cfg, machines: int, gpus: int) -> list[str]:
    """The batch arithmetic of one step, in lines."""
    world = machines * gpus
    engines = world // cfg.tensor_parallel
    lines = [f"{machines} machine(s) x {gpus} GPU(s) = {world} rank(s)"]
    lines[0] += f"; {engines} sampler(s) of {cfg.tensor_parallel}"

    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    batch = f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples"
    in_flight = f"{samples // engines} per engine, {cfg.micro_rollout_batch_size} in flight"
    lines.append(f"a step: {batch} = {samples} samples, {in_flight}")

    tokens = samples * min(cfg.generate_max_len, cfg.max_len)
    samples_per_row = max(1, cfg.packing_max_len // cfg.max_len)
    # Both quotients are rounded up.
    rows = -(-samples // world // samples_per_row)
    micro_batches = -(-rows // cfg.micro_train_batch_size)
    packed = f"{rows} rows of {cfg.packing_max_len} tokens, {micro_batches} micro-batches"
    lines.append(f"at most {tokens:,} response tokens a step; per rank at most {packed}")

    steps = "1 policy"
    if cfg.estimator == "gae":
        steps += f", {cfg.critic_update_steps} critic"
    if cfg.critic_warmup_steps:
        steps += f" (the first {cfg.critic_warmup_steps} steps critic alone)"
    numbers = "fp32"
    if cfg.bf16:
        numbers = "bf16 with fp32 masters and sums"
    lines.append(f"optimizer steps: {steps}; ZeRO {cfg.zero_stage}, {numbers}")
    return lines


def show(memory: Memory) -> str:
    stays = f"weights {memory.weights:.1f} + optimizer {memory.optimizer:.1f}"
    stays += f" + gradients {memory.gradients:.1f}"
    peak = f"activations {memory.activations:.1f} + head {memory.head:.1f}"
    training = f"{stays} + {peak} = {memory.training:.1f} training"
    sampling = f"with the sampler's {memory.sampler:.1f} instead of the latter two "
    sampling += f"{memory.sampling:.1f} sampling"
    cache = f"of {memory.card:.0f}; KV cache {memory.kv_tokens:,} tokens"
    return f"memory per rank, GiB: {training}; {sampling}; {cache}"


def main(argv: list[str]) -> None:
    """Prints the plan. Raises UserError for flags that cannot work, and for a card too small."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--card_gb", type=int, default=80)
    # It is for runs/launch.sh.
    parser.add_argument("--dry_run", action="store_true")
    args, others = parser.parse_known_args(argv)
    cfg = train.parse_flags(others)
    if cfg.model is None:
        print("no --model: this is the demo; tools/demo.py makes its model and its other flags")
        return
    world = args.machines * args.gpus
    check.check_config(cfg, world, {"estimator": ppo.ESTIMATORS})
    print("\n".join(arithmetic(cfg, args.machines, args.gpus)))
    try:
        config = model_config(cfg.model)
        critic = model_config(cfg.critic or cfg.model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        names = " and ".join(filter(None, (cfg.model, cfg.critic)))
        print(f"memory: unknown until --model {names} can be read ({reason})")
        return
    memory = estimate(cfg, config, world, args.card_gb * GIB, critic)
    changes = advice(memory, cfg)
    print("\n".join([show(memory), *changes]))
    check.require(not changes, "the plan does not fit, see above")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
