"""Which models train, and what is special in their families. Only for models that are not plain.

A family is the model_type of a text config. lib/check.py has the plain families, and loads this
file for all others. docs/models.md has a table of what was tried.
"""

import functools
import inspect

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from lib import parts
from lib.common import UserError
from lib.head import ChunkedHead, cut

# The samples of a packed row do not see each other in these families. tests/test_families.py proves
# it for each of them. In other families samples may see each other without an error: recurrent and
# convolution layers carry a state on, and learned positions and ALiBi count the row's tokens. The
# code of a few families does not give the positions to transformers' masks. In families outside
# this list each sample has a row of its own.
PACKED = """
apertus arcee bitnet cohere cohere2 cwm diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe laguna llama minimax_m2
ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi3 qwen2
qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
# lib/head.py cannot compute the logits of these families.
OTHER_LOGITS = """
chameleon falcon_h1 hyperclovax inkling_text muse_glimmer recurrent_gemma xlstm
"""
# In training mode these families draw experts at random.
RANDOM = "phimoe"


# ---- checks, before anything is loaded -----------------------------------------------------------


def check(config, skeleton):
    """Returns the config of the text part. Raises ValueError for a model that cannot be trained.

    skeleton: the function of lib/check.py.
    """
    if config.is_encoder_decoder:
        raise ValueError("it has an encoder and a decoder; use a model with a decoder alone")
    text = parts.text_part(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model of the kind {text.model_type}")
    head = skeleton(text).get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError("its head has a bias or is not linear; lib/head.py needs a linear head")
    if text.model_type in OTHER_LOGITS.split():
        raise ValueError(f"lib/head.py does not compute the logits of {text.model_type}")
    if text.model_type in RANDOM.split():
        raise ValueError(f"{text.model_type} draws experts at random while it is trained")
    if getattr(text, "quantization_config", None):
        raise ValueError("its weights are quantized; use the model that it was made from")
    if text is not config and not hasattr(config, "text_config"):
        raise ValueError(f"its text part has another name than text_config: {text.model_type}")
    return text


def fill_in(cfg, models):
    """Replaces `auto` in --packing and --attention if these models need another value than plain
    models do. models: policy and critic, a folder or a name on the hub each. Raises UserError."""
    configs = [parts.read_text_part(model) for model in models]
    packed = all(config.model_type in PACKED.split() for config in configs)
    if cfg.packing == "auto" and not packed:
        cfg.packing = "alone"
    kinds = {kind for config in configs for kind in getattr(config, "layer_types", None) or []}
    # Layers of other kinds carry a state from one sample of a row to the next.
    carrying = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if cfg.packing == "packed" and carrying:
        kind = carrying.pop()
        raise UserError(
            f"--packing packed: {cfg.model} has layers of the kind {kind}, in which the samples "
            "of a row see each other; use alone"
        )
    # transformers computes a soft cap of attention scores in its plain code alone.
    capped = any(getattr(config, "attn_logit_softcapping", None) for config in configs)
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] for config in configs]
    if cfg.attention == "auto" and (capped or not all(x._supports_sdpa for x in classes)):
        cfg.attention = "eager"
    asked = f"--attention {cfg.attention}: {' or '.join(dict.fromkeys(models))}"
    if cfg.attention in ("sdpa", "varlen") and capped:
        raise UserError(
            f"{asked} has a soft cap of attention, which sdpa and varlen lack; use eager"
        )
    if cfg.attention == "varlen" and cfg.packing == "alone":
        raise UserError(f"{asked} needs --packing alone, and varlen needs packed rows; use sdpa")


# ---- loading -------------------------------------------------------------------------------------


def load(auto_class, source, **settings):
    """auto_class.from_pretrained for a model that is not plain. It loads the text part alone."""
    whole = AutoConfig.from_pretrained(source)
    config = parts.text_part(whole)
    # Noise in the choice of experts would break ratio = 1, as dropout would.
    if hasattr(config, "router_jitter_noise"):
        config.router_jitter_noise = 0.0
    undo_vllm(config)
    model, report = auto_class.from_pretrained(
        source, config=config, key_mapping=parts.TEXT_NAMES, **settings
    )
    # With these conversions save_pretrained would give the text part the names of the whole model.
    model._weight_conversions = None
    model.saved_buffers = functools.partial(saved_buffers, model)
    if auto_class is AutoModelForCausalLM:
        adapt_head(model)
        model.in_files = functools.partial(in_files, model, has_parts=config is not whole)
        if config is not whole:
            check_names(source, model)
            model.save_pretrained = functools.partial(parts.write, source)
    return model, report


def undo_vllm(config):
    """Takes vLLM's wrappers off a class of transformers, so that the trainer can use the class.

    vLLM runs families that it has no code for, such as OLMo 2, with the class of transformers. It
    wraps the methods of that class for itself, in the whole process.
    """
    body_class = MODEL_MAPPING[type(config)]
    wrapper = body_class.__init__
    if wrapper.__module__.startswith("vllm."):
        body_class.__init__ = inspect.getclosurevars(wrapper).nonlocals["old_init"]
        del body_class.__call__


def saved_buffers(model) -> list:
    """(name, tensor) of the buffers that files have. The names are those of lib/models.py."""
    saved = model.state_dict().keys()
    return [(f"model.{name}", x) for name, x in model.named_buffers() if name in saved]


def check_names(source, model):
    """Raises UserError if an export could not write a weight under its name in the files."""
    names = {name for name, _, _ in parts.weights_of(source)}
    for name, _ in model.named_parameters():
        if name not in names:
            raise UserError(
                f"--model {source}: its files have {name} in another form, which an export cannot "
                "write; use a checkpoint of the text part alone"
            )


def in_files(model, weights: dict, has_parts) -> dict:
    """Weights as the files of a model have them, and as vLLM reads them. {name: tensor} both."""
    if not parts.has_tied_head(model.config) and model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    # check_names has found the names of a model with more parts in its files.
    if has_parts:
        return weights
    # In memory all experts of a layer share one weight. In the files each expert has its own.
    return revert_weight_conversion(model, weights)


# ---- heads ---------------------------------------------------------------------------------------


def adapt_head(model):
    """Makes the head of a causal LM a ChunkedHead, with what is special in the model's family."""
    config = model.config
    head = model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)
    head.__class__ = CappedHead if cap else ChunkedHead
    head.cap = cap
    # Cohere multiplies the logits by the first number, Granite divides by the second.
    multiplier = getattr(config, "logit_scale", None) or 1.0
    head.scale = multiplier / (getattr(config, "logits_scaling", None) or 1.0)
    # transformers 5.19 does not find the body of Llama 4.
    if model.base_model is model:
        model.base_model_prefix = "model"


class CappedHead(ChunkedHead):
    """Its logits are capped: cap * tanh(logits / cap), as in Gemma 2.

    It keeps no logits. The backward pass computes them again, chunk by chunk.
    """

    def forward(self, hidden, token_ids, temperature):
        """Log-probs and entropies of M tokens, (M,) each. Without gradients the latter are None."""
        size = self.chunk_size(hidden)
        # The gradient of the weight is a sum over chunks, so the sum is in fp32.
        weight = self.weight.float()
        outputs = []
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            inputs = (hidden[part], weight, token_ids[part], cut(temperature, part))
            outputs.append(checkpoint(self.of_chunk, *inputs, use_reentrant=False))
        logprobs, entropy = (torch.cat(column) for column in zip(*outputs))
        return logprobs, entropy if torch.is_grad_enabled() else None

    def of_chunk(self, hidden, weight, token_ids, temperature):
        logits = nn.functional.linear(hidden, weight.to(hidden.dtype)).float()  # (chunk, V)
        logits = self.cap * torch.tanh(self.scale * logits / self.cap) / temperature
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
