"""The arithmetic of a run before it starts: batches, tokens, and memory per GPU.

A plan needs no GPU and no weights. Each of these commands checks the flags and prints the numbers:

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --model Qwen/Qwen2.5-7B --data x.json

All flags but those below are train.py's, and `python train.py --help` explains them. Wrong flags
are refused with exit code 2. If the peak of a phase does not fit, the last line is a warning that
names the phase: no number of the plan was measured on a card.
"""

import argparse
import dataclasses
import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ppo
import train
from nanoorz import families, memory
from nanoorz.flags import require
from nanoorz.memory import USABLE, VISIBLE, Memory, total
from nanoorz.ranks import UserError, one_line
from tools.shapes import model_config

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
    is_packed = config.model_type in families.PACKED.split()
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
        plan = memory.estimate(cfg, config, world, card)
    # A config of another kind lacks fields, or has 0 in them.
    except (OSError, ValueError, AttributeError, ZeroDivisionError) as error:
        named = " or ".join(f"--{name} {x}" for name, x in families.models_of(cfg).items())
        told = f"{named} cannot be planned ({one_line(error).partition('. ')[0]})"
        raise UserError(f"{told}; give a causal LM: a folder, or a name of the hub") from None
    print_batches(cfg, config, world)
    print_memory(plan, cfg)
    if type(cfg).policy_model is not ppo.Recipe.policy_model:
        # A variant may make a reference or a teacher, too.
        size = 1e9 * (2 if cfg.bf16 else 4) / memory.GIB
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
