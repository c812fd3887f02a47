"""Makes tiny random Qwen2 folders for tests, in about 0.1 s: model, config and a real tokenizer."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from tools import base_model

EOS = "<eos>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"]
PHRASES = [  # merges worth having in the text tokenizer: they shorten ORZ's long template
    "A conversation between User and Assistant. The User asks a question, and the Assistant "
    "solves it. The Assistant first thinks about the reasoning process in the mind and then "
    "provides the User with the answer. The reasoning process is enclosed within <think> </think> "
    "and answer is enclosed within <answer> </answer> tags, respectively.",
    "User: You must put your answer inside <answer> </answer> tags. And your final answer will be "
    "extracted automatically by the \\boxed{} tag.\nThis is the problem:\nAssistant: <think>",
]


def char_tokenizer() -> Qwen2Tokenizer:
    """56 tokens: <eos>, a token for each character of arithmetic and lower-case words, and tags."""
    # Ġ and Ċ are the byte-level forms of space and newline.
    chars = "0123456789+-=*/.,?:()}ĠĊabcdefghijklmnopqrstuvwxyz"
    return base_model.make_tokenizer(chars, TAGS, end=EOS)


def make_text_tokenizer(size: int) -> Qwen2Tokenizer:
    """At most `size` tokens of byte-level BPE: any text at all goes in and comes back unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        PHRASES,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return Qwen2Tokenizer(model["vocab"], merges, unk_token=EOS, eos_token=EOS, pad_token=EOS)


def make_model(
    folder,
    tied: bool = True,
    vocab: int | None = None,
    text_tokenizer: bool = False,
    max_position_embeddings: int = 256,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
) -> Path:
    """Writes a random Qwen2 (heads of 32, grouped keys) with its tokenizer; returns the folder.

    `vocab` is the number of embedding rows, at least the tokenizer's: 64 for characters, 512 for
    text. Weights are large (std 0.1), so that distributions are far from uniform and attention
    matters: a leak between samples shows.
    """
    folder, vocab = Path(folder), vocab or (512 if text_tokenizer else 64)
    tokenizer = make_text_tokenizer(vocab) if text_tokenizer else char_tokenizer()
    tokenizer.save_pretrained(folder)
    model = base_model.make_model(
        tokenizer,
        seed,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                # Qwen2 makes biases as zeros, which test nothing.
                torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder)
    return folder
