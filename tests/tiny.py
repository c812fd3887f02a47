"""Makes tiny random Qwen2 folders for tests, in about 0.1 s: model, config and a real tokenizer."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

import reward
from tools import base_model

EOS = "<eos>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"]


def char_tokenizer() -> Qwen2Tokenizer:
    """56 tokens: <eos>, a token for each character of arithmetic and lower-case words, and tags."""
    # Ġ and Ċ are the byte-level forms of space and newline.
    chars = "0123456789+-=*/.,?:()}ĠĊabcdefghijklmnopqrstuvwxyz"
    return base_model.make_tokenizer(chars, TAGS, end=EOS)


def make_text_tokenizer(size: int) -> Qwen2Tokenizer:
    """At most `size` tokens of byte-level BPE: any text at all goes in and comes back unchanged.

    It is trained on ORZ's long template, which becomes short.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": [EOS], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, **options)
    bpe.train_from_iterator([reward.TEMPLATES["orz"]], trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return Qwen2Tokenizer(model["vocab"], merges, unk_token=EOS, eos_token=EOS, pad_token=EOS)


def make_model(
    folder, tied=True, vocab=None, text_tokenizer=False, hidden=64, layers=2, seed=0, **shape
) -> Path:
    """Writes a random Qwen2 (heads of 32, grouped keys) with its tokenizer; returns the folder.

    `vocab` is the number of embedding rows, at least the tokenizer's: 64 for characters, 512 for
    text. Weights are large (std 0.1), so that distributions are far from uniform and attention
    matters: a leak between samples shows.
    """
    folder, vocab = Path(folder), vocab or (512 if text_tokenizer else 64)
    tokenizer = make_text_tokenizer(vocab) if text_tokenizer else char_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {"max_position_embeddings": 256} | shape
    shape |= {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    shape |= {"num_hidden_layers": layers, "num_attention_heads": max(1, hidden // 32)}
    shape |= {"num_key_value_heads": 1, "tie_word_embeddings": tied, "initializer_range": 0.1}
    model = base_model.make_model(tokenizer, seed, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                # Qwen2 makes biases as zeros, which test nothing.
                torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder)
    return folder
