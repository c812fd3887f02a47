"""Attention within each sample of packed rows, by varlen_attn, PyTorch's own FlashAttention."""

import functools
import inspect

# PyTorch 2.10 has a varlen_attn without these arguments. It cannot scale as a model asks.
NEEDED = {"scale", "window_size"}


@functools.cache
def arguments_of(function):
    return set(inspect.signature(function).parameters)


def has_varlen():
    """Can this PyTorch compute packed_attention? PyTorch 2.10 and older versions cannot."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return arguments_of(varlen_attn) >= NEEDED


def packed_attention(module, query, key, value, mask, **options):
    """Causal attention within each sample. It needs no mask, and no package beside PyTorch.

    query: (R, heads, L, D); key and value may have fewer heads. Returns (R, L, heads, D), None.
    """
    # A run with --attention sdpa must also work where PyTorch has no varlen_attn.
    from torch.nn.attention.varlen import varlen_attn

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * L, heads, D)
    borders = options["cu_seq_lens_q"]  # (parts + 1,)
    longest = options["max_length_q"]  # tokens
    causal = {"window_size": (-1, 0), "scale": options["scaling"]}
    # PyTorch 2.11 has no such argument. By its source, its kernel takes fewer heads of keys than of
    # queries without being told; no card has shown that yet.
    if "enable_gqa" in arguments_of(varlen_attn):
        causal["enable_gqa"] = True
    out = varlen_attn(*flat, borders, borders, longest, longest, **causal)  # (R * L, heads, D)
    return out.unflatten(0, (len(query), -1)), None
