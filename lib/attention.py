"""Attention within each sample of packed rows, by varlen_attn, PyTorch's own FlashAttention."""

import functools
import inspect

# The arguments that packed_attention needs. The varlen_attn of PyTorch 2.10 has neither.
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
    """Causal attention within each sample. It needs no mask, and no package besides PyTorch.

    query: (R, heads, L, D); key and value may have fewer heads. Returns (R, L, heads, D), None.
    """
    # A run with --attention sdpa must also work where PyTorch has no varlen_attn.
    from torch.nn.attention.varlen import varlen_attn

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * L, heads, D)
    borders = options["cu_seq_lens_q"]  # (parts + 1,)
    longest = options["max_length_q"]  # tokens
    # A window without end to the left and of 0 tokens to the right: a token sees no later one.
    settings = {"window_size": (-1, 0), "scale": options["scaling"]}
    # The queries may have more heads than the keys. PyTorch 2.11 has no argument to say so, and its
    # source does not ask for one. No GPU has shown yet that this works.
    if "enable_gqa" in arguments_of(varlen_attn):
        settings["enable_gqa"] = True
    out = varlen_attn(*flat, borders, borders, longest, longest, **settings)  # (R * L, heads, D)
    return out.unflatten(0, (len(query), -1)), None
