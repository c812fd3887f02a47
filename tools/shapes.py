"""A library of plan.py and bench.py: the configs of the recipes' models, which need no network."""

from transformers import Qwen2Config, Qwen3_5TextConfig

from nanoorz import families

FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FIELDS += ("intermediate_size", "vocab_size", "tie_word_embeddings")
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Open-Reasoner-Zero/Open-Reasoner-Zero-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
}


# The text part of Qwen3.5-0.8B. Three of four layers are recurrent.
QWEN_3_5 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}


def model_config(name: str):
    """Returns the config of the text part of a model. Raises OSError or ValueError.

    name: a key of SHAPES, a folder, or a name on the hub.
    """
    if name == "Qwen/Qwen3.5-0.8B":
        return Qwen3_5TextConfig(**QWEN_3_5)
    if name not in SHAPES:
        return families.read_config(name)
    shape = dict(zip(FIELDS, SHAPES[name])) | {"max_position_embeddings": 131072}
    return Qwen2Config(**shape)
