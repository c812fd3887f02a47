"""Models with more parts than text, such as images: the text part is trained.

Trainer and sampler build only the text part, so the other parts cost no memory. In the files the
names of the text part's weights have a prefix, such as model.language_model. An export has all
parts: the trained weights, and the base model's other weights and files unchanged.

Only a run of a model that is not plain (lib/check.py) loads this file.
"""

import json
import re
import shutil
from pathlib import Path

from huggingface_hub import get_safetensors_metadata, save_torch_state_dict, snapshot_download
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

# Makes the name of a weight in the text part of its name in the files.
TEXT_NAMES = {
    r"^language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
# Their classes in vLLM use the embedding as the head, and refuse a weight with the head's name.
HEADLESS = ("gemma", "gemma2")
# Some folders also have consolidated.safetensors, which has the same weights again.
WEIGHTS = "model*.safetensors"
# An export has a copy of these files of the base model.
COPIED = {".json", ".jinja", ".txt", ".model"}


def text_part(config):
    """The config of a model's text part. Most models have no other part."""
    text = config.get_text_config()
    if text is config:
        return config
    # If the two configs differ, one of them has only a default. Then the names in the files decide.
    flags = [getattr(x, "tie_word_embeddings", False) for x in (config, text)]
    text.tie_word_embeddings = flags[0]
    if flags[0] != flags[1]:
        heads = [name for name in names_in(config.name_or_path) if name.endswith("lm_head.weight")]
        text.tie_word_embeddings = not heads
    return text


def names_in(source):
    """The names of all weights. Of a model on the hub only the headers of its files are read."""
    if not Path(source).is_dir():
        return get_safetensors_metadata(source).weight_map
    return [key for _, key, _ in weights_of(source)]


def read_text_part(source):
    return text_part(AutoConfig.from_pretrained(source))


def folder_of(source) -> Path:
    """The folder of a model that is a folder or a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    patterns = [WEIGHTS, *(f"*{suffix}" for suffix in COPIED)]
    return Path(snapshot_download(source, allow_patterns=patterns))


def weights_of(source):
    """Yields (name in the text part, name in the file, file) of all weights of all parts."""
    for path in sorted(folder_of(source).glob(WEIGHTS)):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key
                for pattern, text in TEXT_NAMES.items():
                    name = re.sub(pattern, text, name)
                yield name, key, file


def sampler_settings(source) -> dict:
    """Arguments of vLLM's LLM: it makes the text part, and reads no weights."""
    text = read_text_part(source)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    return {"hf_overrides": lambda config: text, "load_format": "dummy"}


def fill_sampler(llm, source):
    """Gives vLLM the text part of the files."""
    config = read_text_part(source)

    def text_weights():
        for name, key, file in weights_of(source):
            if name != key or name == "lm_head.weight":
                tensor = file.get_tensor(key)
                yield name, tensor
                if name == "model.embed_tokens.weight" and has_tied_head(config):
                    yield "lm_head.weight", tensor

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": text_weights()})


def has_tied_head(config):
    """Does vLLM need the embedding a second time, under the name of the head?"""
    return config.tie_word_embeddings and config.model_type not in HEADLESS


def write(source, out: Path, state_dict: dict):
    """Writes an export with all parts. state_dict: {name in the text part: trained tensor}."""
    out.mkdir(parents=True, exist_ok=True)
    for file in folder_of(source).iterdir():
        if file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copy(file, out / file.name)
    dtype = str(next(iter(state_dict.values())).dtype).removeprefix("torch.")
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for name, key, file in weights_of(source):
        # The names of other parts are not in state_dict.
        trained = state_dict.pop(name, None)
        # A trained tensor may be a part of a larger one, which cannot be saved.
        tensors[key] = file.get_tensor(key) if trained is None else trained.clone()
    if state_dict:
        raise ValueError(f"{source} has no {next(iter(state_dict))}")
    save_torch_state_dict(tensors, out)
