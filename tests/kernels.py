"""A CPU kernel for the op of varlen_attn. PyTorch's own kernels for this op need a GPU.

Import this file, and varlen_attn runs on a CPU. PyTorch's own code handles the arguments, the saved
tensors and the gradients, as on a GPU.
"""

import itertools

import torch
from torch.nn.attention import varlen


def parts_of(query, key, value, borders, window, scale):
    """Cuts rows laid end to end, (tokens, heads, D), into parts of n tokens, on any device.

    Yields for each part the slice of its tokens, its query, key and value, (query heads, n, D)
    each, and its scores, (query heads, n, n). window: how many tokens before and after its own a
    token sees; -1 means all of them.
    """
    before, after = window
    for start, end in itertools.pairwise(borders.tolist()):
        part = slice(start, end)
        q, k, v = (x[part].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device)
        seen = seen if after < 0 else seen.tril(after)
        seen = seen if before < 0 else seen.triu(-before)
        yield part, q, k, v, (scale * q @ k.mT).masked_fill(~seen, -torch.inf)


def attend_in_parts(*inputs):
    """The attention within each part, (tokens, heads, D). inputs: of parts_of."""
    parts = [scores.softmax(-1) @ v for *_, v, scores in parts_of(*inputs)]
    return torch.cat(parts, 1).transpose(0, 1).contiguous()


def check(query, key, borders, key_borders, longest, longest_key, is_causal, window) -> None:
    """What the kernels of a GPU rely on, and cannot check."""
    assert borders.dtype == torch.int32 and borders.is_contiguous()
    assert borders[0] == 0 and borders[-1] == len(query) == len(key)
    assert longest == borders.diff().max() and borders.diff().min() > 0
    assert torch.equal(borders, key_borders) and longest == longest_key
    assert window[0] >= -1 and window[1] == 0 and is_causal == (window[0] == -1)


@varlen._varlen_attn.register_kernel("cpu")
def forward(query, key, value, borders, *options):
    *checked, is_causal, scale, window = options[:6]
    check(query, key, borders, *checked, is_causal, window)
    inputs = (query, key, value, borders, window, scale)
    lse = torch.cat([scores.logsumexp(-1) for *_, scores in parts_of(*inputs)], 1)
    return attend_in_parts(*inputs), lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(upstream, query, key, value, out, lse, borders, *options):
    """The formulas of FlashAttention (arXiv 2205.14135, algorithm 4)."""
    *checked, _, scale, window = options
    check(query, key, borders, *checked, window)
    gradients = tuple(torch.empty_like(x) for x in (query, key, value))
    for part, q, k, v, scores in parts_of(query, key, value, borders, window, scale):
        p = (scores - lse[:, part, None]).exp()  # (query heads, n, n)
        up, o = (x[part].transpose(0, 1) for x in (upstream, out))
        s = scale * p * (up @ v.mT - (up * o).sum(-1, keepdim=True))
        for gradient, x in zip(gradients, (s @ k, s.mT @ q, p.mT @ up)):
            # The gradient of a key is the sum over its query heads.
            gradient[part] = x.unflatten(0, (gradient.shape[1], -1)).sum(1).transpose(0, 1)
    return gradients
