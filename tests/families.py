"""A tiny random model of each family that the suite trains, as its authors publish it."""

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
UNTIED = {"tie_word_embeddings": False}
# The window is shorter than a sample.
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = WINDOW | {"query_pre_attn_scalar": 32}
# Three of four layers of Qwen3.5 are recurrent. vLLM's kernel on a CPU needs heads of 64 or 128.
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 64}
DELTA_NET |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
DELTA_NET |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# name: (class of the config, what it has beside SIZES)
FAMILIES = {
    "Qwen2": ("Qwen2Config", UNTIED),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | UNTIED),
    "Llama 3": ("LlamaConfig", {}),
    "Gemma 2": ("Gemma2Config", GEMMA),
    "Gemma 3": ("Gemma3Config", GEMMA),
    "OLMo 3": ("Olmo3Config", WINDOW | UNTIED),
    # As where a published text config lacks the field.
    "Qwen3.5": ("Qwen3_5Config", DELTA_NET | UNTIED),
}
# The parts for images.
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
IMAGES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_IMAGES |= {"out_hidden_size": 64}
PARTS = {
    "Gemma 3": {"vision_config": IMAGES, "mm_tokens_per_image": 4, "image_token_index": 60}
    | {"boi_token_index": 61, "eoi_token_index": 62},
    "Qwen3.5": {"vision_config": QWEN_IMAGES, "image_token_id": 60, "video_token_id": 61}
    | {"vision_start_token_id": 62, "vision_end_token_id": 63, "tie_word_embeddings": True},
}


def auto_class_of(name):
    return AutoModelForImageTextToText if name in PARTS else AutoModelForCausalLM


def make_model(name, folder) -> Path:
    """Writes the model with the tokenizer of tiny.py; returns the folder."""
    class_name, more = FAMILIES[name]
    fields = SIZES | NO_IDS | more
    if name in PARTS:
        fields = PARTS[name] | {"text_config": fields}
    config = getattr(transformers, class_name)(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_class_of(name).from_config(config)
        for parameter_name, parameter in model.named_parameters():
            # Zeros and ones test nothing. A_log and dt_bias have values of their own.
            if parameter.dim() == 1 and "A_log" not in parameter_name:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    folder = Path(folder)
    model.save_pretrained(folder)
    tiny.char_tokenizer().save_pretrained(folder)
    return folder
