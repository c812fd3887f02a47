"""The arithmetic of a run before it starts: batches, tokens, memory per GPU, time and money.

It needs no GPU and no weights. Each of these commands checks the flags and prints the numbers:

    bash runs/orz_7b_4x8.sh --dry_run
    python tools/plan.py --machines 4 --gpus 8 --card H100 --price 2.5 --model Qwen/Qwen2.5-7B \
        --data x.json

tools/memory.py estimates the memory of one rank, in GiB, from the model's config alone. Weights,
masters, moments and ZeRO's buckets stay on the card. Each phase of a step adds a peak of its own.
If a peak does not fit, the exit code is 2, and the last line names the phase. --card_gb is the
card's size as it is sold: a card of 80 GB shows 79.1 GiB, and the plan uses 95 % of them.

--card is the name of a card in tools/cost.py. The plan then estimates the seconds of a step and the
hours of the run. --price, in dollars for an hour of one GPU, adds the money. --length_share is the
length of an average response as a share of the limit. --steps is the number of steps, for a run
whose data are not here and that has no --max_steps. No number was measured on a card.
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


def print_batches(cfg, machines: int, gpus: int) -> None:
    """The samples, tokens and updates of one step."""
    world = machines * gpus
    samplers = world // cfg.tensor_parallel
    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    tokens = samples * min(cfg.generate_max_len, cfg.max_len)
    samples_per_row = max(1, cfg.packing_max_len // cfg.max_len)
    # Both quotients are rounded up.
    rows = -(-samples // world // samples_per_row)
    micro_batches = -(-rows // cfg.micro_train_batch_size)
    updates = "1 policy"
    if ppo.ESTIMATORS[cfg.estimator].needs_critic:
        updates += f", {cfg.critic_updates} critic"
    # The variant critic_first adds this flag.
    if getattr(cfg, "critic_only_steps", 0):
        updates += f" (the first {cfg.critic_only_steps} steps critic alone)"
    numbers = "bf16 with fp32 masters and sums" if cfg.bf16 else "fp32"
    print(
        f"{machines} machine(s) x {gpus} GPU(s) = {world} rank(s); "
        f"{samplers} sampler(s) of {cfg.tensor_parallel}\n"
        f"a step: {cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples = "
        f"{samples} samples, {samples // samplers} per sampler, "
        f"{cfg.micro_rollout_batch_size} in flight\n"
        f"at most {tokens:,} response tokens a step; per rank at most {rows} rows of "
        f"{cfg.packing_max_len} tokens, {micro_batches} micro-batches\n"
        f"updates a step: {updates}; ZeRO {cfg.zero_stage}, {numbers}"
    )


def print_memory(memory: Memory, cfg) -> None:
    """The memory of one rank item by item, and what the sampler's cache holds."""
    print(f"memory per rank, GiB of the {memory.card:.1f} that the card shows")
    print(f"always: {listed(memory.always)} = {total(memory.always):.1f}")
    for phase, items in memory.phases.items():
        print(f"{phase}: + {listed(items)} = {memory.peak(phase):.1f}")
    # The recipes in runs/ quote this line.
    peaks = ", ".join(f"{phase} {memory.peak(phase):.0f}" for phase in memory.phases)
    print(f"peaks: {peaks} of {memory.card:.0f} GiB")
    samples = f"{memory.kv_tokens // cfg.max_len} sequences of --max_len {cfg.max_len}"
    in_flight = f"{cfg.micro_rollout_batch_size} in flight"
    print(f"KV cache: {memory.kv_tokens:,} tokens, {samples}, {in_flight}")
    if cfg.critic:
        print("memory: the critic is counted like the model, whatever --critic holds")


def listed(items: dict[str, float], between: str = " + ") -> str:
    return between.join(f"{name} {size:.1f}" for name, size in items.items())


def check_memory(memory: Memory, cfg) -> None:
    """Raises UserError with the phases that do not fit, and what to change."""
    too_large = memory.too_large()
    advice = ["use more GPUs"]
    if cfg.offload == "none":
        advice.append("--offload optimizer")
    if "critic" in too_large or "policy" in too_large:
        advice.append("--zero_stage 3, --gradient_checkpointing true, a lower --packing_max_len")
    if "rollout" in too_large or "sync" in too_large:
        advice.append(f"lower --gpu_memory_utilization {cfg.gpu_memory_utilization}")
    usable = f"{USABLE * memory.card:.1f} GiB, {USABLE:.0%} of what the card shows"
    needs = f"phase {listed(too_large, ', ')} of {usable}"
    check.require(not too_large, f"the plan does not fit: {needs}: {'; '.join(advice)}")
    check.require(
        memory.kv_tokens >= cfg.max_len,
        f"phase rollout: the KV cache holds {memory.kv_tokens} tokens, less than a sequence of "
        f"--max_len {cfg.max_len}: raise --gpu_memory_utilization or --tensor_parallel",
    )


def count_steps(cfg) -> int | None:
    """Returns the run's steps, or None if they depend on data that are not here."""
    paths = [train.parse_path(path) for path in cfg.data]
    if not all(os.path.isfile(path) for path, _ in paths):
        return cfg.max_steps
    task = train.find_task(cfg)
    problems = 0
    for path, options in paths:
        options = {"split": "train"} | options
        problems += len(task.load_problems(path, cfg.template, **options))
    return train.count_steps(cfg, problems)


def print_time(args, cfg, seconds: dict[str, float]) -> None:
    """The seconds of a step, the hours of the run, and the price."""
    world = args.machines * args.gpus
    cards = f"{world} x {args.card.name}"
    step = total(seconds)
    print(f"seconds a step on {cards}: {listed(seconds)} = {step:.1f}")
    steps = args.steps or count_steps(cfg)
    remark = ""
    if steps is None:
        steps = 100
        remark = "; --max_steps or --steps sets the number of steps"
    hours = step * steps / 3600
    print(f"time: {step:.1f} s a step, {hours:.1f} h for {steps} steps on {cards}{remark}")
    if args.price is not None:
        dollars = hours * world * args.price
        print(f"money: {hours * world:.1f} GPU-hours x ${args.price:.2f} = ${dollars:,.2f}")
    print(
        "The seconds are an estimate from a data sheet. They were not measured on a card. The "
        f"average response is taken to have {args.length_share:.0%} of the limit's length. "
        'docs/scaling.md lists the other assumptions, under "The time of a step".'
    )


def read_flags(argv: list[str]):
    """Returns the tool's own flags, and the others. Raises UserError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = train.refuse_flag
    numbers = {"machines": (int, 1), "gpus": (int, 1), "card_gb": (float, None)}
    numbers |= {"price": (float, None), "length_share": (float, 0.5), "steps": (int, None)}
    for name, (kind, default) in numbers.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--card", type=str)
    # runs/launch.sh reads this flag.
    parser.add_argument("--dry_run", action="store_true")
    args, others = parser.parse_known_args(argv)
    for name in numbers:
        value = getattr(args, name)
        works = value is None or 0 < value < 2**63
        check.require(works, f"--{name} {value}: must be a number above 0")
    check.require(args.length_share <= 1, f"--length_share {args.length_share}: at most 1")
    if args.card:
        args.card = cost.find_card(args.card)
    check.require(args.card or args.price is None, "--price: also give a --card for the time")
    return args, others


def main(argv: list[str]) -> None:
    """Prints the plan. Raises UserError for flags that cannot work, and for a card too small."""
    args, others = read_flags(argv)
    cfg = train.parse_flags(others)
    if cfg.model is None:
        print("no --model: this is the demo; tools/base_model.py makes its model and its flags")
        return
    with cfg.variants.installed(train.stages()):
        print_plan(args, cfg)


def print_plan(args, cfg) -> None:
    world = args.machines * args.gpus
    # The checks of these flags look for a GPU of this machine, and the plan is for others.
    elsewhere = cfg
    if cfg.attention in ("varlen", "flash_attention_2"):
        elsewhere = dataclasses.replace(cfg, attention="sdpa")
    check.check_config(elsewhere, world, ppo.ESTIMATORS)
    print_batches(cfg, args.machines, args.gpus)
    try:
        config = model_config(cfg.model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        print(f"memory: unknown until --model {cfg.model} can be read ({reason})")
        return
    default_gb = args.card.gb if args.card else 80
    memory = estimate(cfg, config, world, args.card_gb or default_gb)
    print_memory(memory, cfg)
    check_memory(memory, cfg)
    if args.card and not cfg.bf16:
        print("time: not estimated with --bf16 false, since the table of cards is of bf16")
    elif args.card:
        times = cost.Times(cfg, config, world, args.card, args.length_share)
        print_time(args, cfg, times.of_step(memory.kv_tokens))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
