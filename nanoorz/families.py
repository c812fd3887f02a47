"""Which models can be trained, and what differs between their families.

A family is the model_type of a config of transformers. docs/run.md lists the families
that were tried. A model that reads images, too, is trained by its text part (text_part.py).
"""

import inspect
import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from nanoorz.flags import require
from nanoorz.head import ChunkedHead
from nanoorz.ranks import UserError, one_line

# The samples of a packed row do not see each other in these families. tests/test_families.py proves
# it for each name of the list. Most users train one of the first five: they have no special layers
# and no special logits. In all other families each sample has a row of its own. There samples might
# see each other, and no error would tell. The reasons:
# - Recurrent and convolution layers carry a state from one sample to the next.
# - Some learned positions, and ALiBi, count the tokens of the row.
# - A few families do not use the positions for their attention mask.
# - --attention varlen does not reach the attention of a few families.
# A config alone does not show whether a family has such a reason. So add the name and run the test:
# pytest -m slow tests/test_families.py -k apart
PACKED = """
llama mistral phi3 qwen2 qwen3

apertus arcee bitnet cohere cohere2 cwm diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe laguna minimax_m2 ministral
ministral3 mixtral nanochat olmo olmo2 olmo3 olmoe persimmon qwen3_moe seed_oss smollm3
solar_open starcoder2 vaultgemma
"""
# The logits of these families are more than a linear head, a scale and a cap, which is what head.py
# computes. No error would tell.
OTHER_LOGITS = """
chameleon falcon_h1 hyperclovax inkling_text muse_glimmer recurrent_gemma xlstm
"""
# transformers does not find the body of llama4_text. phimoe draws experts at random while it is
# trained.
REFUSED = OTHER_LOGITS + "llama4_text phimoe"


# ---- before any weight is loaded -----------------------------------------------------------------


def load_config(source, flag="--model"):
    """The config of a model's text part. Raises UserError if the model cannot be trained.

    source: a folder, or a name on the hub. flag: the one that names it.
    """
    for path in Path(source).glob("*.safetensors"):
        # This reads the header of the file. It fails if a copy was interrupted.
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{flag} {path}: {one_line(error)}") from error
    try:
        whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config = read_config(source)
    except (OSError, ValueError, StrictDataclassError) as error:
        why = one_line(error)
        if not Path(source).is_dir():
            why = f"there is no such folder, and the hub lacks it: {why}"
        raise UserError(f"{flag} {source}: {why}") from error
    for one in (whole, config):
        is_quantized = getattr(one, "quantization_config", None)
        require(not is_quantized, f"{flag} {source}: its weights are quantized")
    can_train = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    can_train = can_train and config.model_type not in REFUSED.split()
    head = skeleton(config).get_output_embeddings() if can_train else None
    told = f"{flag} {source}: models of the family {config.model_type} cannot be trained"
    # The head in chunks is linear and has no bias.
    is_linear = isinstance(head, nn.Linear) and head.bias is None
    require(is_linear, f"{told} (docs/run.md)")
    return config


def read_config(source):
    """The config of a model's text part. Most models have no other part."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if has_other_parts(config):
        from nanoorz import text_part

        return text_part.config_of(config, folder_of)
    return config


def has_other_parts(config) -> bool:
    """Does the model have a part for images or sound?"""
    return config.get_text_config() is not config


def skeleton(config):
    """The causal LM of a config, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_parameters(config):
    return sum(p.numel() for p in skeleton(config).parameters())


def max_positions(config):
    """The most tokens of a sample, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # If one sample is longer than this, transformers changes all samples of the micro-batch.
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)


def may_be_packed(config) -> bool:
    return config.model_type in PACKED.split()


def needs_eager(config) -> bool:
    """Some families have only the plain code of attention. Others cap the scores of attention, and
    only this code does that."""
    has_sdpa = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    return not has_sdpa or bool(getattr(config, "attn_logit_softcapping", None))


def replace_auto(cfg):
    """Replaces `auto` in --packing and --attention by what the models need. Raises UserError."""
    configs = [read_config(source) for source in (cfg.model, cfg.critic) if source]
    can_pack = all(map(may_be_packed, configs))
    eager = any(map(needs_eager, configs))
    if cfg.packing == "auto":
        cfg.packing = "packed" if can_pack else "alone"
    told = "--packing packed: the samples of a row might see each other in this model; use alone"
    require(can_pack or cfg.packing == "alone", told)
    # PyTorch's kernel needs a GPU, bf16 and packed rows.
    has_varlen = cfg.bf16 and torch.cuda.is_available() and cfg.packing == "packed"
    if cfg.attention == "auto" and eager:
        cfg.attention = "eager"
    elif cfg.attention == "auto":
        cfg.attention = "varlen" if has_varlen else "sdpa"
    told = f"--attention {cfg.attention}: this model needs the plain code of attention; use eager"
    require(not eager or cfg.attention == "eager", told)
    told = "--attention varlen: needs a GPU, --bf16 true and packed rows; use sdpa"
    require(has_varlen or cfg.attention != "varlen", told)


# ---- from the files to the trainer ---------------------------------------------------------------


def load(source, auto_class, **settings):
    """auto_class.from_pretrained of a model's text part, without dropout. Returns the model, and a
    report of the missing weights."""
    config = read_config(source)
    turn_noise_off(config)
    is_part = has_other_parts(AutoConfig.from_pretrained(source))
    if is_part:
        from nanoorz import text_part

        settings["key_mapping"] = text_part.NAMES
    unwrap_class(config)
    model, report = auto_class.from_pretrained(
        source, config=config, output_loading_info=True, **settings
    )
    if is_part:
        # transformers notes here how it has renamed the weights of the files. A sync and an export
        # have the names of the text part.
        model._weight_conversions = []
        if auto_class is AutoModelForCausalLM:
            text_part.check_names(model, folder_of(source))
    return model, report


def turn_noise_off(config):
    """With dropout, or noise in the choice of experts, trainer and sampler would differ. A layer
    that is computed again in the backward pass would also draw other noise."""
    for name, value in config.to_dict().items():
        if is_noise(name) and isinstance(value, float):
            setattr(config, name, 0.0)


def is_noise(name) -> bool:
    """Is this the name of a field like attention_dropout, resid_pdrop or router_jitter_noise?"""
    return "drop" in name or "jitter" in name


def unwrap_class(config):
    """Makes a class of transformers usable for the trainer again, after vLLM has wrapped it.

    vLLM runs families that it has no code for, such as OLMo 2, with the class of transformers. For
    that it replaces __init__ and __call__ of the class, in the whole process.
    """
    body_class = MODEL_MAPPING[type(config)]
    wrapper = body_class.__init__
    if wrapper.__module__.startswith("vllm."):
        # The wrapper of vLLM 0.32 is a function inside of a function. It calls the __init__ of
        # transformers by the name old_init.
        body_class.__init__ = inspect.getclosurevars(wrapper).nonlocals["old_init"]
        # Without this method of its own the class has that of nn.Module again.
        del body_class.__call__


def make_head(model) -> ChunkedHead:
    """A head in chunks, with the weight of the model's own head."""
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return ChunkedHead(model.get_output_embeddings().weight, scale, cap)


# ---- from the trainer to the sampler and to an export --------------------------------------------


def to_files(model, weights: dict) -> dict:
    """Changes weights from their form in memory to their form in the files, which vLLM reads.

    Gets {name: tensor}, and returns {name: tensor}.
    """
    # The other classes of vLLM need the weight of a tied head. The classes of these families use
    # the embedding as the head, and refuse a weight with the name of the head.
    if model.config.model_type in ("gemma", "gemma2") and model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    # In memory all experts of a layer share one weight. In the files each expert has its own.
    return revert_weight_conversion(model, weights) if model._weight_conversions else weights


# The files of a tokenizer, and the generation config.
TEXT_FILES = """
tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken
tekken* chat_template* additional_chat_templates/* generation_config.json
"""


def save(model, source, folder, weights: dict):
    """Writes a folder that transformers and vLLM load: these weights, and the tokenizer, the
    generation config and the config of the base model.

    source: the base model. weights: {name in the files: tensor}.
    """
    # transformers refuses to write some generation configs that it reads, such as one with a
    # temperature and without do_sample. So it writes this one, and the base model's file replaces
    # it.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, state_dict=weights)
    base = folder_of(source)
    for pattern in TEXT_FILES.split():
        for path in filter(Path.is_file, base.glob(pattern)):
            copy = folder / path.relative_to(base)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    # transformers 5 has written a config that older versions misread: they do not find rope_theta
    # in it, and take its default. So the base model's replaces it, if both mean the same.
    if meaning_of(base) != meaning_of(folder):
        return
    new = json.loads((folder / "config.json").read_text())
    config = json.loads((base / "config.json").read_text())
    # torch_dtype is the old name, which all versions read.
    config.pop("dtype", None)
    config["torch_dtype"] = new["dtype"]
    # The critic has a body alone.
    config["architectures"] = new["architectures"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def folder_of(source) -> Path:
    """The folder of a model that is a folder or a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    patterns = ["model*.safetensors", *TEXT_FILES.split(), "*.json"]
    return Path(snapshot_download(source, allow_patterns=patterns))


def meaning_of(folder) -> dict:
    """What transformers reads in a folder's config, without what an export changes."""
    config = AutoConfig.from_pretrained(folder).to_dict()
    changed = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
    return {name: x for name, x in config.items() if name not in changed and not is_noise(name)}
