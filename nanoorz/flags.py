"""Flags: how a field becomes one, their help, and the values that are refused.

A flag is a field of a dataclass, made by `flag`. train.Config has all of them. A wrong value is
refused in one line, before any model is read. families.py refuses models.
"""

import argparse
import dataclasses
import difflib
import re
from importlib.util import find_spec
from pathlib import Path

import torch

from nanoorz.ranks import UserError, print0

VARIANTS = Path(__file__).resolve().parent.parent / "variants"

# The values of flags that have few.
CHOICES = {
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer"),
    "attention": ("auto", "sdpa", "eager", "varlen"),
    "packing": ("auto", "packed", "alone"),
    "log_with": ("tensorboard", "wandb", "none"),
}
# These flags also take `auto`, for which the plan of memory.py chooses a value.
CHOSEN_BY_PLAN = ("gradient_checkpointing", "packing_max_len")
# These numbers must be at least 1, all others at least 0. check_core has more rules for some.
AT_LEAST_1 = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "eval_n",
    "num_episodes",
    "generate_max_len",
    "prompt_max_len",
    "micro_train_batch_size",
    "micro_rollout_batch_size",
    "warmup_updates",
    "critic_updates",
    "tensor_parallel",
    "max_turns",
)


def flag(default, help):
    """A field of a dataclass that becomes a flag of train.py. help: what --help prints."""
    # The parser of the command line would take a % for a format.
    metadata = {"help": help.replace("%", "%%")}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(cfg) -> dict:
    """{flag: its value}. `vars(cfg)` also has other attributes, which variants have set."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}


def as_words(cfg, names) -> str:
    """Flags as words of a command line."""
    return " ".join(f"--{name} {getattr(cfg, name)}".lower() for name in names)


def require(holds, message):
    """Raises UserError with this message if a condition does not hold."""
    if not holds:
        raise UserError(message)


def require_all(cfg, table):
    """table: {flag: (is its value right, what to do if not)}. Raises UserError."""
    for name, (holds, advice) in table.items():
        require(holds, f"--{name} {getattr(cfg, name)}: {advice}")


# ---- what a command line may look like -----------------------------------------------------------


def finish_help(parser, choices):
    """Makes the help of an HfArgumentParser shorter. choices: {flag: its values}."""
    parser.usage = "python train.py --model MODEL --data FILE ... [--FLAG VALUE ...]"
    for action in parser._actions:
        if action.dest in choices:
            action.help = f"{action.help or ''} Choose {', '.join(map(str, choices[action.dest]))}."
        # The help leaves out other spellings: --max-len for --max_len, --no_bf16 for --bf16 false.
        # The parser still accepts them.
        action.option_strings = [x for x in action.option_strings if "-" not in x[2:]]
        if action.dest != "help":
            action.metavar = "VALUE"
        if action.option_strings[0].startswith("--no_"):
            action.help = argparse.SUPPRESS


def allow_auto(parser):
    """Lets an HfArgumentParser take `auto` for the flags of CHOSEN_BY_PLAN."""
    for action in parser._actions:
        if action.dest in CHOSEN_BY_PLAN and action.type:
            action.type = or_auto(action.type)


def or_auto(read):
    def read_or_keep(word):
        return word if word == "auto" else read(word)

    # The parser names the function in an error.
    read_or_keep.__name__ = f"{read.__name__} or auto"
    return read_or_keep


def explain_unknown(word, known) -> str:
    """What is wrong with a word that the parser did not take.

    word: `--FLAG`, `--FLAG=VALUE`, or a word behind no flag. known: the names of the flags.
    """
    if not word.startswith("-"):
        return f"the word {word} belongs to no flag; write it behind a flag, or leave it out"
    name = word.lstrip("-").partition("=")[0]
    owners = []
    for path in sorted(VARIANTS.glob("*.py")):
        if re.search(rf"^    {re.escape(name)}: ", path.read_text(), re.MULTILINE):
            owners.append(path.stem)
    if owners:
        return f"--{name} is a flag of --variant {' or '.join(owners)}; name the variant"
    if name == "dry_run":
        return "--dry_run belongs to the scripts of runs/; give the same flags to tools/plan.py"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if nearest:
        return f"unknown flag {word}: did you mean --{nearest[0]}?"
    return f"unknown flag {word}; `python train.py --help` has all flags"


def is_chat(template):
    """Is it `chat`, or `chat?SWITCH=VALUE`? A user's own template has {question} in braces."""
    return template.partition("?")[0] == "chat" and "{" not in template


# ---- values that are refused ---------------------------------------------------------------------


def check_core(cfg, world, names):
    """Raises UserError for the first wrong flag of the core.

    world: the number of ranks. names: the flags of the core. A variant refuses wrong values of its
    own flags in its method `check`.
    """
    for name, allowed in {**CHOICES, "estimator": cfg.estimators}.items():
        advice = f"choose {' or '.join(map(str, allowed))}"
        require_all(cfg, {name: (getattr(cfg, name) in allowed, advice)})
    for name in names:
        value = getattr(cfg, name)
        least = 1 if name in AT_LEAST_1 else 0
        if type(value) in (int, float):
            # NaN is refused, because each comparison with NaN is false.
            advice = f"must be a number, at least {least}"
            require_all(cfg, {name: (least <= value < 2**63, advice)})
    is_right = cfg.max_steps != 0
    require(is_right, "--max_steps 0: a run needs a step; tools/evaluate.py evaluates a model")
    check_batch(cfg, world)
    check_estimator(cfg)
    check_sampling(cfg)
    check_hardware(cfg, world)


def check_batch(cfg, world):
    require(all([*cfg.data, *cfg.eval_data]), "--data, --eval_data: a name is empty")
    require(cfg.data, "--data: name at least one file of training problems")
    table = {
        "rollout_batch_size": (
            cfg.rollout_batch_size % world == 0,
            f"use a multiple of {world}, the number of ranks",
        ),
        "prompt_max_len": (
            cfg.prompt_max_len < cfg.max_len,
            f"leaves no room for a response in --max_len {cfg.max_len}: lower --prompt_max_len or "
            "raise --max_len",
        ),
        "packing_max_len": (
            cfg.packing_max_len == "auto" or cfg.packing_max_len >= cfg.max_len,
            f"a row must hold one sample of --max_len {cfg.max_len} tokens; raise it",
        ),
    }
    require_all(cfg, table)


def check_estimator(cfg):
    check_samples(cfg, "n_samples_per_prompt")
    is_right = not cfg.critic or cfg.estimators[cfg.estimator].needs_critic
    require_all(cfg, {"critic": (is_right, f"--estimator {cfg.estimator} has no critic")})
    for name in ("gamma", "lambd"):
        require_all(cfg, {name: (getattr(cfg, name) <= 1, "choose 0 to 1")})


def check_samples(cfg, name):
    """Has the flag `name`, a number of samples, enough for the estimator? Variants call this too.

    Raises UserError.
    """
    least = cfg.estimators[cfg.estimator].least_samples
    advice = f"--estimator {cfg.estimator} compares samples of a problem: use at least {least}"
    require_all(cfg, {name: (getattr(cfg, name) >= least, advice)})


def check_sampling(cfg):
    limits = "choose 0.01 to 2, the range of vLLM"
    table = {
        "temperature": (0.01 <= cfg.temperature <= 2, limits),
        "eval_temperature": (
            cfg.eval_temperature == 0 or 0.01 <= cfg.eval_temperature <= 2,
            f"{limits}, or 0 for greedy answers",
        ),
        "system": (cfg.system is None or is_chat(cfg.template), "needs --template chat"),
    }
    require_all(cfg, table)
    for name in ("top_p", "eval_top_p", "gpu_memory_utilization"):
        require_all(cfg, {name: (0 < getattr(cfg, name) <= 1, "choose above 0, up to 1")})


def can_use_varlen(cfg):
    """Can --attention be varlen? PyTorch's kernel needs a GPU, bf16 and packed rows."""
    return cfg.bf16 and torch.cuda.is_available() and cfg.packing != "alone"


def check_hardware(cfg, world):
    table = {
        "bf16": (
            not cfg.bf16 or cfg.zero_stage >= 2,
            f"its fp32 gradient sums need stage 2 or 3, not --zero_stage {cfg.zero_stage}; add "
            "--zero_stage 2 or --bf16 false",
        ),
        "attention": (
            cfg.attention != "varlen" or can_use_varlen(cfg),
            "needs a GPU, --bf16 true and packed rows; or choose sdpa",
        ),
        "tensor_parallel": (world % cfg.tensor_parallel == 0, f"does not divide {world} ranks"),
        "offload": (
            cfg.offload == "none" or cfg.zero_stage > 0,
            "offloading is a part of ZeRO; add --zero_stage 1, 2 or 3",
        ),
        "compile_layers": (
            not cfg.compile_layers or torch.cuda.is_available(),
            "needs a GPU: on a CPU vLLM turns torch.compile off, for the trainer too; leave it out",
        ),
        "log_with": (cfg.log_with != "wandb" or find_spec("wandb"), "`pip install wandb` first"),
    }
    require_all(cfg, table)


# ---- values that are allowed, but rarely meant ---------------------------------------------------


def warn(cfg, problems, eval_sets):
    """Prints warnings of such settings. eval_sets: {name: problems}."""
    labels = {problem.question: problem.label for problem in problems}
    # If a question stands twice with two labels, `labels` has the second one.
    doubtful = [x.question for x in problems if x.label != labels[x.question]]
    if doubtful:
        first = f"{len(doubtful)} problems have a second label, such as {doubtful[0]!r:.99}"
        print0(f"WARNING: --data: {first}")
    if cfg.rollout_batch_size > len(problems):
        size = f"--rollout_batch_size {cfg.rollout_batch_size}"
        print0(f"WARNING: {size}: --data has {len(problems)} problems, so each step repeats some")
    for name, held_out in eval_sets.items():
        known = sum(problem.question in labels for problem in held_out)
        if known:
            print0(f"WARNING: {known} of {len(held_out)} problems of {name} are also in --data")
    if not cfg.estimators[cfg.estimator].needs_critic:
        for name in ("gamma", "lambd", "critic_updates", "critic_learning_rate", "value_clip"):
            value = getattr(cfg, name)
            if value != getattr(type(cfg), name):
                print0(f"--{name} {value} has no effect: --estimator {cfg.estimator} has no critic")
