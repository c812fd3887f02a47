"""Loops in the place of the kernels for packed rows, which need a GPU.

Each loop has those of its kernel's arguments that a caller gives or looks for. The loops of
varlen_attn are of two versions of PyTorch.
"""

import itertools

import torch
from torch.nn import functional as F


def attend_in_parts(query, key, value, borders, window, scale):
    """Of rows laid end to end, (tokens, heads, D): each part alone, on any device.

    window: how many tokens before and after its own a token sees; -1 means all of them.
    """
    before, after = window
    parts = []
    for start, end in itertools.pairwise(borders.tolist()):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        mask = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device)
        mask = mask if after < 0 else mask.tril(after)
        mask = mask if before < 0 else mask.triu(-before)
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        parts.append(F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1))
    return torch.cat(parts)


def check_borders(q, borders, longest) -> None:
    """What the kernels rely on, and cannot check."""
    assert borders.dtype == torch.int32 and borders.is_contiguous()
    assert borders[0] == 0 and borders[-1] == len(q)
    assert type(longest) is int and longest == borders.diff().max() > 0


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    check_borders(query, cu_seq_q, max_q)
    assert cu_seq_q is cu_seq_k and max_q == max_k
    assert window_size[1] in (-1, 0)
    return attend_in_parts(query, key, value, cu_seq_q, window_size, scale)


def varlen_2_13(
    query, key, value, *borders_and_longest, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa or query.shape == key.shape
    return varlen_2_11(
        query, key, value, *borders_and_longest, scale=scale, window_size=window_size
    )


# {version: its varlen_attn}
VARLEN = {"2.11": varlen_2_11, "2.13": varlen_2_13}


def use_varlen(monkeypatch, version: str) -> None:
    """From here on PyTorch has that version's varlen_attn."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", VARLEN[version])
