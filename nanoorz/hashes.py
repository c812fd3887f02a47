"""Hashes of the models, the task and the problems of a run. Where the files are does not matter.

A checkpoint keeps these hashes, and a resume compares them (ckpt.py). The ranks compare them, too,
because two machines may have different files under one name.
"""

import hashlib
import json

from transformers import PreTrainedConfig

from nanoorz.families import folder_of, models_of
from nanoorz.ranks import UserError, hash64, one_line, require_same


def hash_inputs(cfg, task_text, tokenizer, problems):
    """{flag: {part: hash}} of models, task and prompts. A collective.

    task_text: the bytes of the task's file. The prompts are those that the model sees: a chat
    template may put a date into them. Raises UserError, also if the hashes of two ranks
    differ.
    """
    hashes = {"task": {"text": hash64(task_text)}}
    hashes["data"] = {"prompts": hash64([problem.prompt_ids for problem in problems])}
    hashes |= {name: hash_model(source) for name, source in models_of(cfg).items()}
    hashes["model"]["tokenizer"] = hash_tokenizer(tokenizer)
    found = {}
    for name, parts in hashes.items():
        for part, number in parts.items():
            found[f"hash of the {part} of --{name} {getattr(cfg, name)}"] = number
    require_same(found)
    return hashes


def hash_problems(problems):
    """The hash depends on prompts, labels and system turns. A label must have the same repr in each
    process."""
    parts = []
    for problem in problems:
        # The Problem of another task may have no field for a system turn.
        system = getattr(problem, "system", "")
        parts.append((problem.prompt, problem.label, *([system] if system else [])))
    return hash64(parts)


def hash_tokenizer(tokenizer):
    """The hash depends on all that makes token ids of a prompt, the chat template included."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    # A tokenizer that is written in Python has no backend.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else ""
    return hash64(vocabulary, rules, tokenizer.chat_template, tokenizer.eos_token_id)


def hash_model(source) -> dict[str, int]:
    """{"config": hash, "weights": hash} of a folder, or of a name on the hub.

    The hash of the weights depends on the first 64 KiB of every tensor, and not on the files that
    the tensors are in. Raises UserError.
    """
    tensors = []
    try:
        config, _ = PreTrainedConfig.get_config_dict(source)
        for path in folder_of(source).glob("*.safetensors"):
            # Some folders have the same weights twice.
            if not path.name.startswith("consolidated"):
                tensors += tensor_starts(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--model, --critic, --teacher: {source} cannot be read: {one_line(error)}"
        ) from error
    facts = json.dumps(without_origin(config), sort_keys=True, default=str)
    return {"config": hash64(facts), "weights": hash64(sorted(tensors))}


# These keys of a config say where a model was, and which version has written it.
ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version")


def without_origin(config):
    """A config, with those inside it, without the keys of ORIGIN."""
    if not isinstance(config, dict):
        return config
    return {key: without_origin(value) for key, value in config.items() if key not in ORIGIN}


def tensor_starts(path):
    """Yields [name, type, shape, hash of the first 64 KiB] of each tensor of a file.

    The file begins with 8 bytes: the length of its header. The header is JSON.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            start = file.read(min(end - begin, 2**16))
            yield [name, entry["dtype"], entry["shape"], hashlib.sha256(start).hexdigest()]
