"""The text of --help, and messages that a run seldom needs.

train.py loads this file for --help, and before it prints one of these messages.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import traceback
from pathlib import Path

import torch

from lib.common import UserError, one_line, print0

VARIANTS = Path(__file__).resolve().parent.parent / "variants"


def finish_help(parser, choices):
    """Shortens the help of an HfArgumentParser. choices: {flag: its values}."""
    parser.usage = "python train.py --model MODEL --data FILE ... [--FLAG VALUE ...]"
    for action in parser._actions:
        if action.dest in choices:
            action.help += f" Choose {', '.join(map(str, choices[action.dest]))}."
        # The help leaves out other spellings: --max-len for --max_len, --no_bf16 for --bf16 false.
        # The parser still accepts these spellings.
        action.option_strings = [x for x in action.option_strings if "-" not in x[2:]]
        if action.dest != "help":
            action.metavar = "VALUE"
        if action.option_strings[0].startswith("--no_"):
            action.help = argparse.SUPPRESS


def explain_gap(cfg, policy, weights, find_gap, found) -> str:
    """Why sampler and trainer differ. A collective.

    weights: (name, tensor) pairs. find_gap(policy, cfg): the two means, and are they small enough?
    found: the differences in words.
    """
    for name, weight in weights:
        if not weight.isfinite().all():
            return f"--model {cfg.model}: its weight {name} has NaN or infinity"
    alone = dataclasses.replace(cfg, packing="alone")
    if cfg.attention == "varlen":
        # This attention needs the borders of packed rows. No row has room for a second sample.
        alone = dataclasses.replace(cfg, packing_max_len=0)
    cause = "sampler: vLLM computes other logits than transformers, or has other weights"
    try:
        if cfg.packing == "packed" and find_gap(policy, alone)[1]:
            cause = "packing: the samples of a row see each other; add --packing alone"
        elif find_gap(with_own_logits(policy.module), alone)[1]:
            cause = "head: lib/head.py computes other logits than transformers"
    except torch.OutOfMemoryError:
        cause = "head or the sampler; there is not enough memory to find out which"
    return f"--model {cfg.model}: {found}; the cause is the {cause}"


def with_own_logits(module):
    """A policy that takes the log-probs from the logits of transformers. module: a Policy."""

    def policy(micro, temperature):
        model = module.model
        head = model.get_output_embeddings()
        chunked = type(head)
        head.__class__ = torch.nn.Linear
        try:
            logits = model(**micro.model_inputs()).logits[micro.predict]  # (M, V)
        finally:
            head.__class__ = chunked
        log_p = (logits.float() / temperature).log_softmax(-1)
        return log_p.gather(1, micro.token_ids[:, None])[:, 0], None

    return policy


def tell_idle_flags(cfg):
    """Prints the changed flags that only a critic reads. It is for a run without a critic."""
    for name in ("gamma", "lambd", "critic_updates", "critic_learning_rate", "value_clip"):
        value = getattr(cfg, name)
        if value != getattr(type(cfg), name):
            print0(f"--{name} {value} has no effect: --estimator {cfg.estimator} has no critic")


def check_index(index):
    """What is wrong with the file that names the files of weights, or None."""
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its file {index.name} is damaged; copy the file again"
    lacking = sorted(name for name in files if not (index.parent / name).exists())
    if lacking:
        return f"its file {lacking[0]} is absent; copy all files of the model"


def check_folder(model):
    """Raises UserError for a folder that is no model, or that lacks a file of its weights."""
    folder = Path(model)
    if not folder.is_dir():
        # A name of the hub has at most one slash.
        if model.startswith(("/", ".")) or model.count("/") > 1:
            raise UserError(f"--model, --critic: there is no folder {model}")
        return

    def has(pattern):
        return any(folder.glob(pattern))

    why = None
    index = folder / "model.safetensors.index.json"
    if has("adapter_config.json") and not has("config.json"):
        why = "it has only an adapter; merge the adapter into its base model, and use the result"
    elif has("*.gguf") and not has("*.safetensors"):
        why = "it has GGUF files, which are quantized; use the model that they were made from"
    elif (folder / "policy" / "config.json").exists():
        why = f"it is the folder of a run; name {folder}/policy"
    elif not has("config.json"):
        why = "it has no config.json, so it is no model"
    elif index.exists():
        why = check_index(index)
    elif has("*.bin") or has("*.pth"):
        why = (
            "its weights are not in safetensors files; convert them: python -c 'from transformers "
            f'import AutoModelForCausalLM as A; A.from_pretrained("{folder}").save_pretrained('
            f'"{folder}")\''
        )
    elif not has("*.safetensors"):
        why = "it has no *.safetensors file; copy all files of the model"
    else:
        why = f"it has neither model.safetensors nor {index.name}; copy all files of the model"
    if why:
        raise UserError(f"--model, --critic: {model} cannot be used: {why}")


def print_crash(error):
    """Prints a traceback. If the connection to another rank is lost, it prints a line, and the
    traceback goes to run.log."""
    lost = ("by peer", "Broken pipe", "remote process exited")
    if any(words in str(error) for words in lost) and os.environ.get("WORLD_SIZE", "1") != "1":
        # lib/report.py explains the two streams.
        if sys.stderr is not sys.__stderr__:
            traceback.print_exception(error, file=sys.__stderr__)
        place = f"rank {os.environ['RANK']}: another rank has ended"
        why = "that rank says why, unless the system has killed it"
        print(f"{place} ({one_line(error):.200}); {why}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def no_prompts(prompts) -> str:
    """The text of a refusal. prompts: the token ids of each prompt."""
    lengths = [len(ids) for ids in prompts]
    return (
        f"no prompt of {min(lengths)} to {max(lengths)} tokens is left; raise --prompt_max_len or "
        "change --template"
    )


def no_answers(samples, cfg) -> str:
    """The text of a warning that no sample has an answer. It shows the ends of three samples."""
    ends = [sample.text[-300:] for sample in samples[:3]]
    return (
        f"no response has an answer in the form of --task {cfg.task} and --answer_form "
        f"{cfg.answer_form}; choose another form; these are the ends of three responses: {ends}"
    )


def explain_unknown(word, known) -> str:
    """word: `--FLAG`, `--FLAG=VALUE`, or a word behind no flag. known: the names of the flags."""
    if not word.startswith("-"):
        return f"the word {word} belongs to no flag; write it behind a flag, or leave it out"
    name = word.lstrip("-").partition("=")[0]
    owners = []
    for path in sorted(VARIANTS.glob("*.py")):
        if re.search(rf"^    {re.escape(name)}: ", path.read_text(), re.MULTILINE):
            owners.append(path.stem)
    if owners:
        return f"--{name} is a flag of --variant {' or '.join(owners)}; name the variant"
    if (VARIANTS / f"{name}.py").is_file():
        return f"--{name} is a variant now: --variant {name}"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if nearest:
        return f"unknown flag {word}: did you mean --{nearest[0]}?"
    return f"unknown flag {word}; `python train.py --help` has all flags"
