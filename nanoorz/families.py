"""Which models can be trained, and what is special in some families of models.

A family is the model_type of a config of transformers. The other files ask one object about a
model: a `Plain` if nothing is special in its family, else a `Special`. This object knows how the
model is loaded, what its logits are, and how its weights in memory differ from those in the files.
docs/models.md has a table of the families that were tried.

Some models read images, too. Only their text part is trained: the language model in them. Trainer
and sampler build only the text part, so the other parts cost no memory. In the files the names of
the text part's weights have a prefix, such as model.language_model. An export has all parts: the
trained weights, and the other weights and files of the base model, which are copied.
"""

import inspect
import json
import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import get_safetensors_metadata, save_torch_state_dict, snapshot_download
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
from nanoorz.head import CappedHead, ChunkedHead
from nanoorz.ranks import UserError, one_line

# Nothing is special in these families: all layers have full attention or sliding windows, and the
# logits are a linear head without bias.
PLAIN = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# In these families the samples of a packed row do not see each other. tests/test_families.py proves
# it for each of them. In all other families each sample has a row of its own. There samples might
# see each other, and no error would tell. The reasons:
# - Recurrent and convolution layers carry a state from one sample to the next.
# - Learned positions and ALiBi count the tokens of the row.
# - A few families do not use the positions for their attention mask.
# A config alone does not show whether a family has such a reason. So test it before you add it.
PACKED = """
apertus arcee bitnet cohere cohere2 cwm diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe laguna llama minimax_m2
ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi3 qwen2
qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
# The logits of these families are more than a linear head, a scale and a cap, so head.py cannot
# compute them.
OTHER_LOGITS = """
chameleon falcon_h1 hyperclovax inkling_text muse_glimmer recurrent_gemma xlstm
"""
# In training mode this family draws experts at random.
DRAWS_EXPERTS = "phimoe"


# ---- refusals: before any weight is loaded -------------------------------------------------------


def load_config(source, flag="--model"):
    """The config of a model's text part. Raises UserError if it is absent or cannot be trained.

    source: a folder, or a name on the hub. flag: the one that names it.
    """
    path = Path(source)
    # Without this file the folder may be incomplete.
    if not (path / "model.safetensors").exists():
        check_folder(source, flag)
    try:
        for file in sorted(path.glob("*.safetensors")):
            check_header(file)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantized; use the model that it was made from")
        if config.model_type not in PLAIN:
            config = check_family(config)
    # transformers raises errors of many kinds for a wrong config.
    except Exception as error:
        why = "cannot be used" if path.is_dir() else "is no folder here, and the hub lacks it"
        raise UserError(f"{flag} {source} {why}: {one_line(error)}") from error
    return config


def check_folder(source, flag):
    """Raises UserError for a folder that is no model, or that lacks a file of its weights."""
    folder = Path(source)
    if not folder.is_dir():
        # A name on the hub has at most one slash.
        if source.startswith(("/", ".")) or source.count("/") > 1:
            raise UserError(f"{flag} {source}: there is no such folder")
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
        raise UserError(f"{flag} {source} cannot be used: {why}")


def check_index(index):
    """What is wrong with the file that names the files of the weights, or None."""
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its file {index.name} is damaged; copy the file again"
    lacking = sorted(name for name in files if not (index.parent / name).exists())
    if lacking:
        return f"its file {lacking[0]} is absent; copy all files of the model"


def check_header(file):
    """Raises ValueError for a file of weights that is cut short. Only its header is read."""
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged ({error}); copy the file again") from error


def check_family(config):
    """Returns the config of the text part. Raises ValueError for a model that cannot be trained."""
    if config.is_encoder_decoder:
        raise ValueError("it has an encoder and a decoder; use a model with a decoder alone")
    text = text_part(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model of the kind {text.model_type}")
    head = skeleton(text).get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError("its head has a bias or is not linear; head.py needs a linear head")
    if text.model_type in OTHER_LOGITS.split():
        raise ValueError(f"head.py does not compute the logits of {text.model_type}")
    if text.model_type == DRAWS_EXPERTS:
        raise ValueError(f"{text.model_type} draws experts at random while it is trained")
    if getattr(text, "quantization_config", None):
        raise ValueError("its weights are quantized; use the model that it was made from")
    if text is not config and not hasattr(config, "text_config"):
        raise ValueError(f"its text part has another name than text_config: {text.model_type}")
    return text


def skeleton(config):
    """The causal LM of a config, without memory for its weights. Raises ValueError."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_parameters(config):
    return sum(p.numel() for p in skeleton(config).parameters())


# ---- what `auto` means ---------------------------------------------------------------------------


def models_of(cfg) -> dict[str, str]:
    """{flag: the model that it names}."""
    named = {"model": cfg.model, "critic": cfg.critic}
    return {name: source for name, source in named.items() if source}


def replace_auto(cfg):
    """Replaces `auto` in --packing and --attention by what the models need. Raises UserError."""
    models = list(models_of(cfg).values())
    if not all(map(is_plain, models)):
        replace_auto_of_special(cfg, models)
    if cfg.packing == "auto":
        cfg.packing = "packed"
    # PyTorch's kernel needs a GPU, bf16 and packed rows.
    can_use_varlen = cfg.bf16 and torch.cuda.is_available() and cfg.packing == "packed"
    if cfg.attention == "auto":
        cfg.attention = "varlen" if can_use_varlen else "sdpa"
    told = "--attention varlen needs a GPU, --bf16 true and packed rows; choose sdpa"
    require(cfg.attention != "varlen" or can_use_varlen, told)


def is_plain(source):
    return AutoConfig.from_pretrained(source).model_type in PLAIN


def replace_auto_of_special(cfg, models):
    """Replaces `auto` where a model needs another value than plain models do. Raises UserError.

    models: of the run, a folder or a name on the hub each.
    """
    configs = [read_text_part(model) for model in models]
    packed = all(config.model_type in PACKED.split() for config in configs)
    if cfg.packing == "auto" and not packed:
        cfg.packing = "alone"
    kinds = {kind for config in configs for kind in getattr(config, "layer_types", None) or []}
    # Layers of other kinds carry a state from one sample of a row to the next.
    recurrent_kinds = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if cfg.packing == "packed" and recurrent_kinds:
        kind = recurrent_kinds.pop()
        raise UserError(
            f"--packing packed: {' or '.join(models)} has layers of the kind {kind}, in which the "
            "samples of a row see each other; use alone"
        )
    # Some families cap the scores of attention. Only the plain code of transformers does that.
    capped = any(getattr(config, "attn_logit_softcapping", None) for config in configs)
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] for config in configs]
    if cfg.attention == "auto" and (capped or not all(x._supports_sdpa for x in classes)):
        cfg.attention = "eager"
    # dict.fromkeys leaves out the second of two equal names.
    place = f"--attention {cfg.attention}: {' or '.join(dict.fromkeys(models))}"
    if cfg.attention in ("sdpa", "varlen") and capped:
        raise UserError(
            f"{place} has a soft cap of attention, which sdpa and varlen lack; use eager"
        )


# ---- the special things of a family --------------------------------------------------------------


def find_family(source):
    """The Plain or the Special of a model. source: a folder, or a name on the hub."""
    return Plain(source) if is_plain(source) else Special(source)


class Plain:
    """The models of plain families. Nothing is special."""

    has_other_parts = False  # Has the model a part for images, say?

    def __init__(self, source):
        self.source = source

    def load(self, auto_class, **settings):
        """auto_class.from_pretrained. Returns the model, and a report of the missing weights."""
        return auto_class.from_pretrained(self.source, output_loading_info=True, **settings)

    def body(self, model):
        """A causal LM without its head."""
        return model.base_model

    def make_head(self, model) -> ChunkedHead:
        """A head in chunks, with the weight of the model's own head."""
        return ChunkedHead(model.get_output_embeddings().weight)

    def saved_buffers(self, model) -> list:
        """(name, tensor) of the tensors that the files have, but that are no parameters."""
        return []

    def to_files(self, model, weights: dict) -> dict:
        """Changes weights from their form in memory to their form in the files, which vLLM reads.

        Gets {name: tensor}, and returns {name: tensor}.
        """
        return weights

    def save(self, model, folder, weights: dict):
        """Writes a model with these weights as a folder that transformers and vLLM load."""
        # transformers reads generation configs that it refuses to write, such as one with a
        # temperature and without do_sample. BaseFiles copies the file of the base model.
        if model.can_generate():
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            ids = {name: getattr(model.generation_config, name) for name in names}
            model.generation_config = GenerationConfig(**ids)
        model.save_pretrained(folder, state_dict=weights)


class Special(Plain):
    """The models of all other families."""

    def __init__(self, source):
        super().__init__(source)
        whole = AutoConfig.from_pretrained(source)
        self.config = text_part(whole)
        self.has_other_parts = self.config is not whole

    def load(self, auto_class, **settings):
        """Loads the text part alone. Raises UserError if an export of it would fail."""
        # With noise in the choice of experts trainer and sampler would differ, as with dropout.
        if hasattr(self.config, "router_jitter_noise"):
            self.config.router_jitter_noise = 0.0
        unwrap_class(self.config)
        model, report = super().load(
            auto_class, config=self.config, key_mapping=TEXT_NAMES, **settings
        )
        # transformers notes here how it has renamed the weights of the files. Its save_pretrained
        # would rename them back, but an export of the text part alone needs the new names.
        model._weight_conversions = None
        if auto_class is AutoModelForCausalLM and self.has_other_parts:
            self.check_names(model)
        return model, report

    def check_names(self, model):
        """Raises UserError if an export could not write a weight under its name in the files."""
        names = {name for name, _, _ in weights_of(self.source)}
        for name, _ in model.named_parameters():
            if name not in names:
                raise UserError(
                    f"--model {self.source}: its files have {name} in another form, which an "
                    "export cannot write; use a checkpoint of the text part alone"
                )

    def body(self, model):
        # transformers 5.19 does not find the body of Llama 4, and returns the whole model.
        return model.model if model.base_model is model else model.base_model

    def make_head(self, model):
        config = model.config
        multiplier = getattr(config, "logit_scale", None) or 1.0  # Cohere
        divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
        scale = multiplier / divisor
        weight = model.get_output_embeddings().weight
        cap = getattr(config, "final_logit_softcapping", None)
        return CappedHead(weight, scale, cap) if cap else ChunkedHead(weight, scale)

    def saved_buffers(self, model):
        saved = model.state_dict().keys()
        return [(name, x) for name, x in model.named_buffers() if name in saved]

    def to_files(self, model, weights):
        if model.config.tie_word_embeddings and model.config.model_type in NO_TIED_HEAD:
            weights.pop("lm_head.weight", None)
        # Here the names are those of the files already: check_names has found each of them there.
        if self.has_other_parts:
            return weights
        # In memory all experts of a layer share one weight. In the files each expert has its own.
        return revert_weight_conversion(model, weights)

    def save(self, model, folder, weights):
        if self.has_other_parts:
            write_all_parts(self.source, folder, weights)
        else:
            super().save(model, folder, weights)


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


# ---- the small files of an export ----------------------------------------------------------------

# The files of a tokenizer, and the generation config.
TEXT_FILES = """
tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken
chat_template* generation_config.json
"""


class BaseFiles:
    """The tokenizer, the generation config and the config of a base model, to be written again.

    transformers 5 would write other files. Older versions cannot read some of them, and misread the
    config: they do not find rope_theta in it, and take its default.
    """

    def __init__(self, source):
        """source: a folder, or a name on the hub. All is read now, so the folder may move later."""
        base = folder_of(source)
        paths = [path for pattern in TEXT_FILES.split() for path in base.glob(pattern)]
        self.files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        self.config = json.loads((base / "config.json").read_text())
        self.meaning = meaning_of(base)

    def save_pretrained(self, folder):
        """`folder` has the config.json of the trained model. The base model's replaces it, if both
        mean the same."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        path = folder / "config.json"
        new = json.loads(path.read_text())
        # write_all_parts has copied a config with a text_config already.
        if "text_config" in new or meaning_of(folder) != self.meaning:
            return
        config = self.config.copy()
        # torch_dtype is the old name, which all versions read.
        config.pop("dtype", None)
        config["torch_dtype"] = new["dtype"]
        # The critic has a body alone.
        if "architectures" in new:
            config["architectures"] = new["architectures"]
        path.write_text(json.dumps(config, indent=2) + "\n")


def meaning_of(folder) -> dict:
    """What transformers reads in a folder's config, without what an export changes."""
    config = AutoConfig.from_pretrained(folder).to_dict()
    for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"):
        config.pop(name, None)
    return config


# ---- models with more parts than text ------------------------------------------------------------

# {pattern of the beginning of a name in the files: the same beginning in the text part}
TEXT_NAMES = {
    r"^language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
# The classes of these families in vLLM use the embedding as the head, and refuse a weight with the
# name of the head.
NO_TIED_HEAD = ("gemma", "gemma2")
# The files of the weights. Some folders also have consolidated.safetensors, which has the same
# weights once more.
WEIGHT_FILES = "model*.safetensors"
# An export has a copy of these files of the base model.
COPIED = {".json", ".jinja", ".txt", ".model"}


def text_part(config):
    """The config of a model's text part. Most models have no other part."""
    text = config.get_text_config()
    if text is config:
        return config
    # Is the head tied to the embedding? Both configs say so. If they differ, one of them has only a
    # default. Then the files decide: only a head that is not tied has a weight there.
    is_tied = getattr(config, "tie_word_embeddings", False)
    is_contradicted = is_tied != getattr(text, "tie_word_embeddings", False)
    text.tie_word_embeddings = is_tied
    if is_contradicted:
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
    patterns = [WEIGHT_FILES, *(f"*{suffix}" for suffix in COPIED)]
    return Path(snapshot_download(source, allow_patterns=patterns))


def weights_of(source):
    """Yields (name in the text part, name in the file, file) of all weights of all parts.

    A weight of another part has the same name twice. The file is open until the next iteration.
    """
    for path in sorted(folder_of(source).glob(WEIGHT_FILES)):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key
                for pattern, text in TEXT_NAMES.items():
                    name = re.sub(pattern, text, name)
                yield name, key, file


def text_part_settings(source) -> dict:
    """Arguments of vLLM's LLM, which make it build the text part and read no weights."""
    text = read_text_part(source)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]

    def replace_config(config):
        return text

    return {"hf_overrides": replace_config, "load_format": "dummy"}


def fill_sampler(llm, source):
    """Gives vLLM the weights of the text part."""
    config = read_text_part(source)

    def text_weights():
        for name, key, file in weights_of(source):
            # TEXT_NAMES changes the names of the text part. Only the head may have no prefix.
            if name != key or name == "lm_head.weight":
                tensor = file.get_tensor(key)
                yield name, tensor
                # vLLM needs the weight of a tied head, too.
                is_embedding = name == "model.embed_tokens.weight" and config.tie_word_embeddings
                if is_embedding and config.model_type not in NO_TIED_HEAD:
                    yield "lm_head.weight", tensor

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": text_weights()})


def write_all_parts(source, out: Path, trained: dict):
    """Writes an export with all parts. trained: {name in the text part: tensor}."""
    out.mkdir(parents=True, exist_ok=True)
    for file in folder_of(source).iterdir():
        if file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copy(file, out / file.name)
    dtype = str(next(iter(trained.values())).dtype).removeprefix("torch.")
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for name, key, file in weights_of(source):
        # The weights of other parts were not trained.
        tensor = trained.pop(name, None)
        # A trained tensor may be a view of a larger one, which cannot be saved. A clone can.
        tensors[key] = file.get_tensor(key) if tensor is None else tensor.clone()
    if trained:
        raise ValueError(f"{source} has no {next(iter(trained))}")
    save_torch_state_dict(tensors, out)
