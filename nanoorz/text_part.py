"""Models that read images, too. Only their text part is trained: the language model in them.

Trainer and sampler build only the text part, so the other parts cost no memory. In the files the
names of the text part's weights have a prefix, such as model.language_model. An export has all
parts: the trained weights, and the other weights and files of the base model, which are copied.
This file is imported for such a model alone.
"""

import json
import re
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

# {pattern of the beginning of a name in the files: the same beginning in the text part}
NAMES = {
    r"^language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
# An export has a copy of these files of the base model.
COPIED = {".json", ".jinja", ".txt", ".model"}


def config_of(whole, folder_of):
    """The config of the text part.

    whole: the config of the model. folder_of: of families.py. It may download the model.
    """
    text = whole.get_text_config()
    # Is the head tied to the embedding? Both configs say so. If they differ, one of them has only a
    # default. Then the files decide: only a head that is not tied has a weight there.
    is_tied = getattr(whole, "tie_word_embeddings", False)
    if is_tied != getattr(text, "tie_word_embeddings", False):
        base = folder_of(whole.name_or_path)
        is_tied = all(name != "lm_head.weight" for name, _, _ in weights_of(base))
    text.tie_word_embeddings = is_tied
    return text


def weights_of(base: Path):
    """Yields (name in the text part, name in the file, file) of all weights of all parts.

    The two names of a weight of another part are equal. The file is open until the next iteration.
    """
    # Some folders also have consolidated.safetensors, which has the same weights once more.
    for path in sorted(base.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key
                for pattern, text in NAMES.items():
                    name = re.sub(pattern, text, name)
                yield name, key, file


def check_names(model, base: Path):
    """Raises ValueError if an export could not write a weight of the trainer under its name in the
    files. Some families have experts in another form there."""
    names = {name for name, _, _ in weights_of(base)}
    missing = [name for name, _ in model.named_parameters() if name not in names]
    if missing:
        raise ValueError(f"its files have {missing[0]} in another form, which no export can write")


def sampler_settings(config) -> dict:
    """Arguments of vLLM's LLM, which make it build the text part and read no weights.

    config: of the text part.
    """
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]

    def replace_config(whole):
        return config

    return {"hf_overrides": replace_config, "load_format": "dummy"}


def fill_sampler(llm, config, base: Path):
    """Gives vLLM the weights of the text part."""

    def text_weights():
        for name, key, file in weights_of(base):
            # The two names of a weight of the text part differ, except perhaps for the head.
            if name != key or name == "lm_head.weight":
                tensor = file.get_tensor(key)
                yield name, tensor
                # vLLM needs the weight of a tied head, too.
                if name == "model.embed_tokens.weight" and config.tie_word_embeddings:
                    yield "lm_head.weight", tensor

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": text_weights()})


def save(base: Path, out: Path, trained: dict):
    """Writes an export with all parts. trained: {name in the text part: tensor}."""
    out.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix in COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    dtype = str(next(iter(trained.values())).dtype).removeprefix("torch.")
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for name, key, file in weights_of(base):
        # The weights of other parts were not trained.
        tensor = trained.pop(name, None)
        # A trained tensor may be a view of a larger one, which cannot be saved. A clone can.
        tensors[key] = file.get_tensor(key) if tensor is None else tensor.clone()
    # Few files have a tied head.
    trained.pop("lm_head.weight", None)
    assert not trained, f"{base} has no {list(trained)}"
    save_torch_state_dict(tensors, out)
