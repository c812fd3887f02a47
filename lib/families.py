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
from lib.head import ChunkedHead

# The samples of a packed row do not see each other in these families. tests/test_families.py proves
# it for each of them. In other families they may see each other without an error: recurrent and
# convolution layers carry a state on, learned positions and ALiBi count the row's tokens, and some
# code does not tell transformers' masks the positions. There each sample has a row.
PACKED = """
apertus arcee bitnet cohere cohere2 cwm diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe laguna llama minimax_m2
ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi3 phimoe
qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
# Their logits are more than a linear head, a scale and a soft cap.
OTHER_LOGITS = """
chameleon falcon_h1 hyperclovax inkling_text muse_glimmer recurrent_gemma xlstm
"""


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
    return text


def fill_in(cfg, models):
    """Replaces `auto` in --packing and --attention where these models need another value than plain
    ones. models: policy and critic, a folder or a name on the hub each. Raises UserError."""
    configs = [parts.read_text_part(model) for model in models]
    packed = all(config.model_type in PACKED.split() for config in configs)
    if cfg.packing == "auto" and not packed:
        cfg.packing = "alone"
    # transformers computes a soft cap of attention scores in its plain code alone.
    capped = any(getattr(config, "attn_logit_softcapping", None) for config in configs)
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] for config in configs]
    if cfg.attention == "auto" and (capped or not all(x._supports_sdpa for x in classes)):
        cfg.attention = "eager"
    asked = f"--attention {cfg.attention}: {cfg.model}"
    if cfg.attention in ("sdpa", "varlen") and capped:
        raise UserError(f"{asked} has a soft cap of attention, which this leaves out; use eager")
    if cfg.attention == "varlen" and cfg.packing == "alone":
        raise UserError(f"{asked} needs --packing alone, and this needs packed rows; use sdpa")


# ---- loading -------------------------------------------------------------------------------------


def load(auto_class, source, **settings):
    """auto_class.from_pretrained for a model that is not plain. It loads the text part alone."""
    whole = AutoConfig.from_pretrained(source)
    config = parts.text_part(whole)
    undo_vllm(config)
    model, report = auto_class.from_pretrained(
        source, config=config, key_mapping=parts.TEXT_NAMES, **settings
    )
    # Otherwise a saved text part would get the names of a model with more parts.
    model._weight_conversions = None
    if auto_class is AutoModelForCausalLM:
        adapt_head(model)
        model.in_files = functools.partial(in_files, model)
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


def check_names(source, model):
    """Raises UserError if an export could not write a weight under its name in the files."""
    names = {name for name, _, _ in parts.weights_of(source)}
    for name, _ in model.named_parameters():
        if name not in names:
            raise UserError(
                f"--model {source}: its files have {name} in another form, which an export cannot "
                "write; use a checkpoint of the text part alone"
            )


def in_files(model, weights: dict) -> dict:
    """Weights as the files of a model have them, and as vLLM reads them. {name: tensor} both."""
    if not parts.has_tied_head(model.config) and model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
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
    head.scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
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
        outputs = []
        for chunk in zip(hidden.split(size), token_ids.split(size)):
            outputs.append(checkpoint(self.of_chunk, *chunk, temperature, use_reentrant=False))
        logprobs, entropy = (torch.cat(column) for column in zip(*outputs))
        return logprobs, entropy if torch.is_grad_enabled() else None

    def of_chunk(self, hidden, token_ids, temperature):
        logits = nn.functional.linear(hidden, self.weight).float()  # (chunk, V)
        logits = self.cap * torch.tanh(self.scale * logits / self.cap) / temperature
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
