"""Attention within each sample of packed rows, by PyTorch's own FlashAttention (varlen_attn)."""

import inspect

# PyTorch 2.10 has a varlen_attn without these, which cannot do what the models ask for.
NEEDED = {"scale", "window_size"}


def varlen_arguments():
    """Returns the names of the arguments that this PyTorch's varlen_attn takes."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        # PyTorch 2.9 and older versions have no such function.
        return set()
    return set(inspect.signature(varlen_attn).parameters)


def has_varlen():
    """Can packed_attention work with this PyTorch? If not, --attention sdpa can."""
    return varlen_arguments() >= NEEDED


def packed_attention(module, query, key, value, mask, **options):
    """Causal attention within each sample. It needs no mask, and no package beside PyTorch.

    query: (R, heads, L, D); key and value may have fewer heads. Returns (R, L, heads, D), None.
    """
    # Older versions of PyTorch lack it, and a run with sdpa does not need it.
    from torch.nn.attention.varlen import varlen_attn

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * L, heads, D)
    borders = options["cu_seq_lens_q"]  # (parts + 1,)
    longest = options["max_length_q"]  # tokens
    causal = {"window_size": (-1, 0), "scale": options["scaling"]}
    # PyTorch 2.11 has no such argument: its kernel takes fewer keys than queries unasked.
    if "enable_gqa" in varlen_arguments():
        causal["enable_gqa"] = True
    out = varlen_attn(*flat, borders, borders, longest, longest, **causal)  # (R * L, heads, D)
    return out.unflatten(0, (len(query), -1)), None
