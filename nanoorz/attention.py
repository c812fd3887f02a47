"""--attention varlen: attention within each sample of a row, by PyTorch's own FlashAttention."""

import functools
import inspect

from transformers import AttentionInterface

from lib.common import UserError


def register():
    # transformers makes masks for its own kinds of attention alone. varlen needs no mask.
    AttentionInterface.register("varlen", packed_attention)


def check_model(model, source):
    if not model._supports_attention_backend:
        raise UserError(f"--model {source} has attention code of its own: add --attention sdpa")


@functools.cache
def arguments_of(function):
    return set(inspect.signature(function).parameters)


def packed_attention(module, query, key, value, mask, **options):
    """Causal attention within each sample, in the form that transformers calls. PyTorch 2.11 or
    newer has the kernel.

    query: (R, heads, L, D). key and value may have fewer heads. `mask` is not used. Returns
    (R, L, heads, D) and None.
    """
    # Older versions of PyTorch do not have varlen_attn.
    from torch.nn.attention.varlen import varlen_attn

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * L, heads, D)
    borders = options["cu_seq_lens_q"]  # (parts + 1,)
    longest = options["max_length_q"]  # tokens
    # The window of a token: all tokens before it (-1), and no token after it (0). A sliding window
    # of w tokens includes the token itself.
    window = options.get("sliding_window") or 0
    settings = {"window_size": (window - 1, 0), "scale": options["scaling"]}
    # The query may have more heads than the key. varlen_attn of PyTorch 2.11 needs no argument for
    # that (seen on an H200).
    if "enable_gqa" in arguments_of(varlen_attn):
        settings["enable_gqa"] = True
    out = varlen_attn(*flat, borders, borders, longest, longest, **settings)  # (R * L, heads, D)
    return out.unflatten(0, (len(query), -1)), None
