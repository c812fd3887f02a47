"""The arithmetic of a run before it starts: batches, tokens, optimizer steps, memory per GPU. Needs no GPU, no weights.

    bash runs/orz_7b_4x8.sh --dry_run        a recipe: its flags checked, its numbers printed
    python tools/plan.py --machines 4 --gpus 8 --card_gb 80 --model Qwen/Qwen2.5-7B --data x.json ...

Memory is estimated from the config alone, per rank, in GiB: what stays (weights, masters, moments, gradient sums of
both models), and two peaks above it in turn: training (activations, the chunked head) and sampling (vLLM's share).
"""
import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoConfig, Qwen2Config

from tools import check

GIB = 2**30
SHAPES = {  # hidden, layers, heads, key-value heads, intermediate, vocabulary, tied: plans without network
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False)}


def model_config(name: str):
    """The config of a shape known here, of a folder or of a hub model. Raises OSError or ValueError."""
    if name not in SHAPES:
        return AutoConfig.from_pretrained(name)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size", "tie_word_embeddings")
    return Qwen2Config(**dict(zip(names, SHAPES[name])), max_position_embeddings=131072)


@dataclass
class Memory:
    """GiB on one rank."""
    weights: float  # of all models, in the training dtype
    optimizer: float  # fp32 masters and two moments
    gradients: float  # fp32 sums
    activations: float  # one micro-batch, and what checkpointing recomputes
    head: float  # one chunk of logits forward and backward, and the head's fp32 gradient
    sampler: float  # vLLM's share while awake: its weights and the KV cache
    kv_tokens: int  # that the cache holds
    card: float

    def __post_init__(self):
        stays = self.weights + self.optimizer + self.gradients
        self.training, self.sampling = stays + self.activations + self.head, stays + self.sampler


def estimate(cfg, config, world: int, card_bytes: float) -> Memory:
    """The memory plan of one rank on a card of that size."""
    size, layers = check.parameters(config), config.num_hidden_layers
    hidden, vocab = config.hidden_size, config.vocab_size
    models, width = 1 + (cfg.estimator == "gae"), 2 if cfg.bf16 else 4
    awake = 1 if cfg.offload == "idle" else models  # whose masters and moments are on the card
    shards = [world if cfg.zero_stage >= needed else 1 for needed in (1, 2, 3)]  # of optimizer, gradients, weights
    gathered = width * vocab * hidden if cfg.zero_stage == 3 else 0  # the largest parameter, whole for a moment
    tokens = cfg.micro_train_batch_size * cfg.packing_max_len
    inside = tokens * width * (8 * hidden + 4 * getattr(config, "intermediate_size", 4 * hidden))  # of one layer
    kept = tokens * width * hidden * layers if cfg.gradient_checkpointing else inside * layers
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    kv_bytes = 2 * layers * getattr(config, "num_key_value_heads", config.num_attention_heads) * head * width
    sampler = cfg.gpu_memory_utilization * card_bytes
    sampler_weights = size * (1 if cfg.rollout_quantization else width) / cfg.tensor_parallel
    return Memory(
        weights=(models * size * width / shards[2] + gathered) / GIB,
        optimizer=awake * size * (12 if cfg.bf16 or cfg.zero_stage else 8) / shards[0] / GIB,
        gradients=models * size * 4 / shards[1] / GIB, activations=(kept + inside) / GIB,
        head=(3 * 2**29 + 4 * vocab * hidden) / GIB, sampler=sampler / GIB,
        kv_tokens=int(max(0, sampler - sampler_weights - 2 * GIB) * cfg.tensor_parallel / kv_bytes),
        card=card_bytes / GIB)


def advice(memory: Memory, cfg) -> list[str]:
    """What to change where the plan does not fit; nothing where it does."""
    room, lines = 0.95 * memory.card, []
    if memory.training > room:
        lines.append(f"training needs {memory.training:.1f} of {memory.card:.0f} GiB: use more GPUs, --zero_stage 3, "
                     "--gradient_checkpointing, or lower --packing_max_len (and --max_len)")
    if memory.sampling > room:
        lines.append(f"sampling needs {memory.sampling:.1f} of {memory.card:.0f} GiB: lower --gpu_memory_utilization "
                     f"{cfg.gpu_memory_utilization}, or use more GPUs")
    if memory.kv_tokens < cfg.max_len:
        lines.append(f"the KV cache holds {memory.kv_tokens} tokens, less than a sequence of --max_len {cfg.max_len}: "
                     "raise --gpu_memory_utilization or --tensor_parallel")
    return lines


def arithmetic(cfg, machines: int, gpus: int) -> list[str]:
    """The batch arithmetic of one step, in lines."""
    world, samples = machines * gpus, cfg.rollout_batch_size * cfg.n_samples_per_prompt
    engines = world // cfg.tensor_parallel
    most = samples * min(cfg.generate_max_len, cfg.max_len)
    rows = -(-samples // world // max(1, cfg.packing_max_len // cfg.max_len))
    return [
        f"{machines} machine(s) x {gpus} GPU(s) = {world} rank(s); {engines} sampler(s) of {cfg.tensor_parallel}",
        f"a step: {cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples = {samples} samples, "
        f"{samples // engines} per engine, {cfg.micro_rollout_batch_size} in flight",
        f"at most {most:,} response tokens a step; per rank at most {rows} rows of {cfg.packing_max_len} tokens, "
        f"{-(-rows // cfg.micro_train_batch_size)} micro-batches",
        f"optimizer steps: {cfg.policy_update_steps} policy"
        + (f", {cfg.critic_update_steps} critic" if cfg.estimator == "gae" else "") + f"; ZeRO {cfg.zero_stage}, "
        + ("bf16 with fp32 masters and sums" if cfg.bf16 else "fp32")]


def show(memory: Memory) -> str:
    return (f"memory per rank, GiB: weights {memory.weights:.1f} + optimizer {memory.optimizer:.1f} + gradients "
            f"{memory.gradients:.1f} + activations {memory.activations:.1f} + head {memory.head:.1f} = "
            f"{memory.training:.1f} training; with the sampler's {memory.sampler:.1f} instead of the latter two "
            f"{memory.sampling:.1f} sampling; of {memory.card:.0f}; KV cache {memory.kv_tokens:,} tokens")


def check_memory(cfg, world: int, card_bytes: float) -> str:
    """The plan as a line, with advice where it does not fit: an estimate, so that it warns and does not refuse."""
    memory = estimate(cfg, model_config(cfg.model), world, card_bytes)
    return "\n".join([show(memory), *(f"WARNING: {line}" for line in advice(memory, cfg))])


def main(argv: list[str]) -> None:
    import train  # here: train.py imports this file

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("--machines", 1), ("--gpus", 1), ("--card_gb", 80)):
        own.add_argument(name, type=int, default=default)
    args, argv = own.parse_known_args(argv)
    cfg = train.parse_flags([flag for flag in argv if flag != "--dry_run"])
    check.check_config(cfg, args.machines * args.gpus)
    print("\n".join(arithmetic(cfg, args.machines, args.gpus)))
    try:
        config = model_config(cfg.model) if cfg.model else None
    except (OSError, ValueError) as error:
        print(f"memory: unknown until --model {cfg.model} can be read ({str(error).splitlines()[0]})")
        return
    if config:
        memory = estimate(cfg, config, args.machines * args.gpus, args.card_gb * GIB)
        print("\n".join([show(memory), *advice(memory, cfg)]))
        if advice(memory, cfg):
            raise check.ConfigError("the plan does not fit, see above")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except check.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
