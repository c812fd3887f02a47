"""Loops in the place of the kernels for packed rows, which need a GPU.

Each loop has those of its kernel's arguments that a caller gives or looks for. The loops of
varlen_attn are of three versions of PyTorch.
"""

import itertools
import sys

import torch
from torch.nn import functional as F


def attend_in_parts(query, key, value, borders, causal, scale):
    """Of rows laid end to end, (tokens, heads, D): each part alone, on any device."""
    parts = []
    for start, end in itertools.pairwise(borders.tolist()):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        options = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        parts.append(F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1))
    return torch.cat(parts)


def check_borders(q, borders, longest) -> None:
    """What the kernels rely on, and cannot check."""
    assert borders.dtype == torch.int32 and borders.is_contiguous()
    assert borders[0] == 0 and borders[-1] == len(q)
    assert type(longest) is int and longest == borders.diff().max() > 0


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("it has no argument for the scale, so nobody may call it")


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    check_borders(query, cu_seq_q, max_q)
    assert cu_seq_q is cu_seq_k and max_q == max_k
    assert window_size in ((-1, -1), (-1, 0))
    return attend_in_parts(query, key, value, cu_seq_q, window_size[1] == 0, scale)


def varlen_2_13(
    query, key, value, *borders_and_longest, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa or query.shape == key.shape
    return varlen_2_11(
        query, key, value, *borders_and_longest, scale=scale, window_size=window_size
    )


# {version: (its varlen_attn, can packed_attention use it?)}
VARLEN = {
    "2.9": (None, False),
    "2.10": (varlen_2_10, False),
    "2.11": (varlen_2_11, True),
    "2.13": (varlen_2_13, True),
}


def use_varlen(monkeypatch, version: str) -> None:
    """From here on PyTorch has that version's varlen_attn."""
    function, _ = VARLEN[version]
    if function is None:
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    else:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)


def flash_attn(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """The package flash-attn's flash_attn_varlen_func."""
    check_borders(q, cu_seqlens_q, max_seqlen_q)
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    assert dropout_p == 0 and window_size == (-1, -1)
    return attend_in_parts(q, k, v, cu_seqlens_q, causal, softmax_scale)
