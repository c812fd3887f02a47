"""A tiny random model of each family that docs/models.md names, as its authors publish it."""

from pathlib import Path

import tiny
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

# vLLM's attention on a CPU needs heads of at least 32. Large weights make a leak visible.
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SIZES |= {"max_position_embeddings": 256, "initializer_range": 0.1, "tie_word_embeddings": True}
NO_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
# Shorter than a sample.
WINDOW = {"sliding_window": 8}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# vLLM's kernel on a CPU needs heads of 64 or 128.
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 64}
DELTA_NET |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
DELTA_NET |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
IMAGES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PIXTRAL = IMAGES | {"model_type": "pixtral", "head_dim": 16}
GEMMA_3 = WINDOW | BOTH | {"query_pre_attn_scalar": 32}
GEMMA_4 = WINDOW | BOTH | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 16}
GEMMA_4 |= {"vocab_size_per_layer_input": 64}
LLAMA_4 = {"intermediate_size_mlp": 128, "num_local_experts": 2, "attention_chunk_size": 128}
LLAMA_4 |= {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 4.0}
# vLLM reads fields that transformers leaves to the file.
LFM_2 = {"layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64}
LFM_2 |= {"block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0}
LFM_2 |= {"block_auto_adjust_ff_dim": False}
QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_IMAGES |= {"out_hidden_size": 64}
QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 61}
QWEN_TOKENS |= {"vision_start_token_id": 62, "vision_end_token_id": 63}

# name: (class of the config, what it has beside SIZES). UNTIED has a head of its own.
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {
    "Qwen2": ("Qwen2Config", UNTIED),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | UNTIED),
    "Llama 3": ("LlamaConfig", {}),
    "Llama 4 text": ("Llama4TextConfig", LLAMA_4 | UNTIED),
    "Mistral": ("MistralConfig", WINDOW | UNTIED),
    "Ministral": ("MinistralConfig", WINDOW | BOTH | UNTIED),
    "Ministral 3": ("Mistral3Config", UNTIED | {"model_type": "ministral3"}),
    "Gemma 2": ("Gemma2Config", WINDOW | BOTH | {"query_pre_attn_scalar": 32}),
    "Gemma 3 text": ("Gemma3TextConfig", GEMMA_3),
    "Gemma 3": ("Gemma3Config", GEMMA_3),
    "Gemma 4": ("Gemma4Config", GEMMA_4),
    "OLMo 2": ("Olmo2Config", UNTIED),
    "OLMo 3": ("Olmo3Config", WINDOW | BOTH | UNTIED),
    "Phi 3": ("Phi3Config", UNTIED),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "Granite": ("GraniteConfig", GRANITE),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA_NET | EXPERTS | UNTIED),
    "Qwen3.5": ("Qwen3_5Config", DELTA_NET),
    "LFM2": ("Lfm2Config", LFM_2),
    "Cohere": ("CohereConfig", {"logit_scale": 0.25}),
}


def make_config(name):
    class_name, more = FAMILIES[name]
    config_class = getattr(transformers, class_name)
    fields = SIZES | NO_IDS | more
    if name == "Gemma 3":
        tokens = {"mm_tokens_per_image": 4, "image_token_index": 60}
        tokens |= {"boi_token_index": 61, "eoi_token_index": 62}
        return config_class(text_config=fields, vision_config=IMAGES, **tokens)
    if name == "Gemma 4":
        return config_class(text_config=fields | {"pad_token_id": 0})
    if name == "Ministral 3":
        return config_class(text_config=fields, vision_config=PIXTRAL, image_token_index=60)
    if name == "Qwen3.5":
        tokens = QWEN_TOKENS | {"tie_word_embeddings": True}
        # As where a published text config lacks the field.
        fields["tie_word_embeddings"] = False
        return config_class(text_config=fields, vision_config=QWEN_IMAGES, **tokens)
    return config_class(**fields)


def is_text(name) -> bool:
    config = make_config(name)
    return config.get_text_config() is config


def make_model(name, folder) -> Path:
    """Writes the model with the tokenizer of tiny.py; returns the folder."""
    config = make_config(name)
    auto_class = AutoModelForCausalLM if is_text(name) else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_class.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            # Zeros and ones test nothing. A_log and dt_bias have values of their own.
            if parameter.dim() == 1 and "A_log" not in parameter_name:
                parameter.data += 0.1 * torch.randn(parameter.shape)
            if name == "Gemma 4" and "q_norm" in parameter_name:
                # Its scores are not scaled. So large ones would make the gradient inexact.
                parameter.data *= 0.2
        for buffer_name, buffer in model.named_buffers():
            # Gemma 4 saves this buffer.
            if "layer_scalar" in buffer_name:
                buffer.fill_(0.7)
    folder = Path(folder)
    model.save_pretrained(folder)
    tiny.char_tokenizer().save_pretrained(folder)
    return folder
