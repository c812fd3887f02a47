"""The arithmetic of a run before it starts: batches, tokens, memory per GPU, time and money.

It needs neither a GPU nor weights. Each of these checks the flags and prints the numbers:

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --card H100 --price 2.5 --model Qwen/Qwen2.5-7B \
        --data x.json

Memory is estimated for one rank, in GiB, from the model's config alone, by tools/memory.py.
Weights, masters, moments and ZeRO's buffers stay; above them each phase of a step has a peak of its
own. If a peak does not fit into the card, the exit code is 2, and the last line names the phase.
--card_gb is a card's size as it is sold: one of 80 GB shows 79.1 GiB, and 95 % of it are used.

--card names one of the cards in tools/cost.py. Then the seconds of a step and the hours of the run
are estimated from its data sheet, and with --price, in dollars for an hour of one GPU, the money.
An average response has --length_share of the longest allowed. --steps says how many steps there
are, where neither --max_steps nor data that lie here do. None of it was measured on a card.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ppo
import train
from lib import check
from lib.common import UserError
from tools import cost
from tools.memory import USABLE, Memory, estimate, model_config, total


def arithmetic(cfg, machines: int, gpus: int) -> list[str]:
    """The batch arithmetic of one step, in lines."""
    world = machines * gpus
    samplers = world // cfg.tensor_parallel
    lines = [f"{machines} machine(s) x {gpus} GPU(s) = {world} rank(s)"]
    lines[0] += f"; {samplers} sampler(s) of {cfg.tensor_parallel}"

    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    batch = f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples"
    in_flight = f"{samples // samplers} per sampler, {cfg.micro_rollout_batch_size} in flight"
    lines.append(f"a step: {batch} = {samples} samples, {in_flight}")

    tokens = samples * min(cfg.generate_max_len, cfg.max_len)
    samples_per_row = max(1, cfg.packing_max_len // cfg.max_len)
    # Both quotients are rounded up.
    rows = -(-samples // world // samples_per_row)
    micro_batches = -(-rows // cfg.micro_train_batch_size)
    packed = f"{rows} rows of {cfg.packing_max_len} tokens, {micro_batches} micro-batches"
    lines.append(f"at most {tokens:,} response tokens a step; per rank at most {packed}")

    steps = "1 policy"
    if ppo.ESTIMATORS[cfg.estimator].needs_critic:
        steps += f", {cfg.critic_updates} critic"
    if cfg.critic_only_steps:
        steps += f" (the first {cfg.critic_only_steps} steps critic alone)"
    numbers = "fp32"
    if cfg.bf16:
        numbers = "bf16 with fp32 masters and sums"
    lines.append(f"updates a step: {steps}; ZeRO {cfg.zero_stage}, {numbers}")
    return lines


def show(memory: Memory, cfg) -> list[str]:
    """The memory of one rank item by item, and what the sampler's cache holds, in lines."""
    always = f"{listed(memory.always)} = {total(memory.always):.1f}"
    lines = [
        f"memory per rank, GiB of the {memory.card:.1f} that the card shows",
        f"always: {always}",
    ]
    for phase, items in memory.phases.items():
        lines.append(f"{phase}: + {listed(items)} = {memory.peak(phase):.1f}")
    lines.append(f"peaks: {peaks(memory)}")
    whole = memory.kv_tokens // cfg.max_len
    cache = f"KV cache: {memory.kv_tokens:,} tokens, {whole} sequences of --max_len {cfg.max_len}"
    lines.append(f"{cache}, {cfg.micro_rollout_batch_size} in flight")
    return lines


def listed(items: dict[str, float], between: str = " + ") -> str:
    return between.join(f"{name} {size:.1f}" for name, size in items.items())


def peaks(memory: Memory) -> str:
    """As the recipes say it."""
    each = ", ".join(f"{phase} {memory.peak(phase):.0f}" for phase in memory.phases)
    return f"{each} of {memory.card:.0f} GiB"


def check_memory(memory: Memory, cfg) -> None:
    """Raises UserError with the phase that does not fit, and what to change."""
    too_large = memory.too_large()
    advice = ["use more GPUs"]
    if cfg.offload == "none":
        advice.append("--offload optimizer")
    if not too_large.keys().isdisjoint(("critic", "policy")):
        advice.append("--zero_stage 3, --gradient_checkpointing true, a lower --packing_max_len")
    if not too_large.keys().isdisjoint(("rollout", "sync")):
        advice.append(f"lower --gpu_memory_utilization {cfg.gpu_memory_utilization}")
    usable = f"{USABLE * memory.card:.1f} GiB, {USABLE:.0%} of what the card shows"
    needs = f"phase {listed(too_large, ', ')} of {usable}"
    check.require(not too_large, f"the plan does not fit: {needs}: {'; '.join(advice)}")
    cache = f"the KV cache holds {memory.kv_tokens} tokens"
    check.require(
        memory.kv_tokens >= cfg.max_len,
        f"phase rollout: {cache}, less than a sequence of --max_len {cfg.max_len}: raise "
        "--gpu_memory_utilization or --tensor_parallel",
    )


def count_steps(cfg) -> int | None:
    """The run's steps, or None where only data that are not here could tell."""
    paths = [train.parse_path(path) for path in cfg.data]
    if not all(os.path.isfile(path) for path, _ in paths):
        return cfg.max_steps
    task = train.find_task(cfg)
    problems = 0
    for path, options in paths:
        options = {"split": "train"} | options
        problems += len(task.load_problems(path, cfg.template, **options))
    return train.count_steps(cfg, problems)


def time_and_money(args, cfg, seconds: dict[str, float]) -> list[str]:
    """What the phases of a step take, the run, and its price, in lines."""
    world = args.machines * args.gpus
    cards = f"{world} x {args.card.name}"
    step = total(seconds)
    lines = [f"seconds a step on {cards}: {listed(seconds)} = {step:.1f}"]
    steps = args.steps or count_steps(cfg)
    known = ""
    if steps is None:
        steps = 100
        known = "; how many there are, --max_steps or --steps tells"
    hours = step * steps / 3600
    lines.append(f"time: {step:.1f} s a step, {hours:.1f} h for {steps} steps on {cards}{known}")
    if args.price is not None:
        dollars = hours * world * args.price
        lines.append(f"money: {hours * world:.1f} GPU-hours x ${args.price:.2f} = ${dollars:,.2f}")
    lines.append(
        "These seconds are an estimate from a data sheet, and nothing of it was measured on a "
        f"card. Responses are taken to have {args.length_share:.0%} of the longest length allowed; "
        'docs/scaling.md says what else is assumed, under "The time of a step".'
    )
    return lines


def read_flags(argv: list[str]):
    """The tool's own flags, and the others. Raises UserError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = train.refuse_flag
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--card")
    parser.add_argument("--card_gb", type=float)
    parser.add_argument("--price", type=float)
    parser.add_argument("--length_share", type=float, default=0.5)
    parser.add_argument("--steps", type=int)
    # It is for runs/launch.sh.
    parser.add_argument("--dry_run", action="store_true")
    args, others = parser.parse_known_args(argv)
    for name in ("machines", "gpus", "card_gb", "price", "length_share", "steps"):
        value = getattr(args, name)
        works = value is None or 0 < value < 2**63
        check.require(works, f"--{name} {value}: must be a number above 0")
    check.require(args.length_share <= 1, f"--length_share {args.length_share}: at most 1")
    if args.card:
        args.card = cost.find_card(args.card)
    check.require(args.card or args.price is None, "--price: a --card must say how long it takes")
    return args, others


def main(argv: list[str]) -> None:
    """Prints the plan. Raises UserError for flags that cannot work, and for a card too small."""
    args, others = read_flags(argv)
    cfg = train.parse_flags(others)
    if cfg.model is None:
        print("no --model: this is the demo; tools/demo.py makes its model and its other flags")
        return
    with cfg.variants.installed(train.stages()):
        print_plan(args, cfg)


def print_plan(args, cfg) -> None:
    world = args.machines * args.gpus
    # These ask this machine for a GPU, and the plan is for others.
    elsewhere = {"rollout_quantization": None}
    if cfg.attention in ("varlen", "flash_attention_2"):
        elsewhere["attention"] = "sdpa"
    flags = dataclasses.replace(cfg, **elsewhere)
    check.check_config(flags, world, ppo.ESTIMATORS)
    print("\n".join(arithmetic(cfg, args.machines, args.gpus)))
    try:
        config = model_config(cfg.model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        print(f"memory: unknown until --model {cfg.model} can be read ({reason})")
        return
    card_gb = args.card_gb
    if card_gb is None:
        card_gb = args.card.gb if args.card else 80
    memory = estimate(cfg, config, world, card_gb)
    print("\n".join(show(memory, cfg)))
    if cfg.critic:
        print("memory: the critic is counted like the model, whatever --critic holds")
    check_memory(memory, cfg)
    if args.card and not cfg.bf16:
        print("time: not estimated with --bf16 false, since the table of cards is of bf16")
    elif args.card:
        times = cost.Times(cfg, config, world, args.card, args.length_share)
        print("\n".join(time_and_money(args, cfg, times.of_step(memory.kv_tokens))))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
