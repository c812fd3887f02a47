"""The LM head computes log-probs and entropies in chunks, with a backward pass of its own.

The logits of a chunk of tokens take at most 512 MB on a GPU, and 32 MB on a CPU. ORZ held four
copies of all logits. This file needs torch alone.

Shapes: M response tokens, V vocabulary, H hidden; chunk: the tokens of a chunk.
"""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

KEPT = 2**26  # floats, which take 256 MB


class ChunkedLogprob(torch.autograd.Function):
    """log p(token) and entropy from hidden states, chunk by chunk.

    The backward pass needs log p of all V tokens. If these numbers take at most 256 MB, they are
    kept. If not, the backward pass computes them again: of 8k tokens and a vocabulary of 152k they
    would take 5 GB.
    """

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, chunk, wants_entropy=True):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)  # (M,)
        entropy = torch.empty_like(logprobs) if wants_entropy else None  # (M,)
        keep_log_p = len(hidden) * len(weight) <= KEPT
        ctx.kept = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p = chunk_log_softmax(hidden[part], weight, cut(temperature, part))  # (chunk, V)
            logprobs[part] = log_p.gather(1, token_ids[part, None])[:, 0]
            if wants_entropy:
                # -sum(p log p). An einsum would be shorter, but its sums over V are ten times less
                # exact in fp32.
                entropy[part] = log_p.exp().mul_(log_p).sum(-1).neg()
            if keep_log_p:
                ctx.kept.append(log_p)
            # Free log_p if it is not kept. Without this line it would stay in memory until the next
            # chunk is computed.
            del log_p
        ctx.save_for_backward(hidden, weight, token_ids, entropy)
        ctx.temperature = temperature
        ctx.chunk = chunk
        # If the loss does not use the entropy, `backward` gets None instead of zeros.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        """With z the scaled logits, p the probabilities, y the token and S the entropy:

        d log p_y / dz = 1[y] - p        d S / dz = -p (log p + S)

        With g_y and g_S the incoming gradients of log p_y and S, the gradient of z is
        g_y 1[y] - p (g_y + g_S (log p + S)). The code computes the bracket (on_all), then the
        product with p, and then adds the term of the token y (on_token). z is the logits divided by
        the temperature, so the gradient of the logits has the same factor: g_y and g_S are divided
        by the temperature first.
        """
        hidden, weight, token_ids, entropy = ctx.saved_tensors
        # The loss may use the entropy and no log-prob.
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)  # (M, H)
        # The gradient of the weight is a sum of many small terms, so the sum is in fp32.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, H)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            temperature = cut(ctx.temperature, part)
            if ctx.kept:
                log_p = ctx.kept.pop(0)  # (chunk, V)
            else:
                log_p = chunk_log_softmax(hidden[part], weight, temperature)  # (chunk, V)
            on_token = grad_logprobs[part, None] / temperature  # (chunk, 1)
            on_all = on_token
            if grad_entropy is not None:
                on_entropy = grad_entropy[part, None] / temperature  # (chunk, 1)
                on_all = on_token + on_entropy * (log_p + entropy[part, None])  # (chunk, V)
            # From here on the memory of log_p holds p, and then the gradient.
            grad_logits = log_p.exp_().mul_(-on_all)  # (chunk, V)
            grad_logits.scatter_add_(1, token_ids[part, None], on_token)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            add_product_(grad_weight, grad_logits.T, hidden[part])
            del log_p, grad_logits, on_all
        # `forward` has four more arguments, which have no gradient.
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def cut(temperature, part: slice):
    """The temperatures of a chunk: (M,) becomes (chunk, 1), and a number stays."""
    return temperature[part, None] if isinstance(temperature, Tensor) else temperature


def chunk_log_softmax(hidden: Tensor, weight: Tensor, temperature) -> Tensor:
    logits = nn.functional.linear(hidden, weight).float()  # (chunk, V)
    if isinstance(temperature, Tensor) or temperature != 1:
        logits /= temperature
    # log_softmax is one kernel. A logsumexp is slower, and its entropy is less exact.
    return logits.log_softmax(-1)


def add_product_(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b. total: (V, H)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and adds_in_fp32(a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        # This makes a second tensor (V, H) for the product.
        total.add_(a @ b)


@functools.cache
def adds_in_fp32(device) -> bool:
    """Can this GPU add a product of bf16 matrices to an fp32 matrix in one call?

    Old versions of PyTorch lack the call, and some versions refuse an fp32 matrix.
    """
    ones = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
    # Each number of the product is 16, and the matrix adds 1.
    try:
        return bool(torch.addmm(ones.float(), ones, ones, out_dtype=torch.float32)[0, 0] == 17)
    except (RuntimeError, TypeError):
        return False


class ChunkedHead(nn.Module):
    """An LM head without bias that computes log-probs and entropies, chunk by chunk.

    Call it once for each micro-batch. Under ZeRO-3 a call gathers the weight, so all ranks must
    make the same number of calls.
    """

    def __init__(self, weight: nn.Parameter, scale=1.0):
        """weight: (V, H), which may be the embedding's too. scale: a factor of the logits."""
        super().__init__()
        self.weight = weight
        self.scale = scale
        self.id_limit = None  # Log-probs are those of the ids below this number. None: all ids.

    def forward(self, hidden: Tensor, token_ids: Tensor | None = None, temperature=1.0):
        """Log-probs and entropies of M tokens, (M,) each.

        hidden: (M, H). token_ids: (M,). temperature: a number, or (M,). Under torch.no_grad() the
        entropies are None, because only updates log them. The model's own code in transformers
        calls its head with `hidden` alone. It gets logits, (..., V), without scale.
        """
        if token_ids is None:
            return nn.functional.linear(hidden, self.weight)
        return self.of_tokens(hidden, token_ids, temperature)

    def of_tokens(self, hidden, token_ids, temperature):
        chunk = self.chunk_size(hidden)
        learns = torch.is_grad_enabled()
        # To multiply logits by the scale is to divide them by 1 / scale.
        temperature = temperature / self.scale
        weight = self.used_weight()
        return ChunkedLogprob.apply(hidden, weight, token_ids, temperature, chunk, learns)

    def used_weight(self) -> Tensor:
        """The rows of the ids that have log-probs, (V, H) or (id_limit, H)."""
        return self.weight if self.id_limit is None else self.weight[: self.id_limit]

    def chunk_size(self, hidden: Tensor):
        """The number of tokens in a chunk, but at least 16."""
        floats = 2**27 if hidden.is_cuda else 2**23  # 512 MB, or 32 MB
        return max(16, floats // len(self.weight))


class CappedHead(ChunkedHead):
    """Its logits are capped: cap * tanh(logits / cap), as in Gemma 2.

    It keeps no logits. The backward pass computes them again, chunk by chunk.
    """

    def __init__(self, weight, scale, cap):
        super().__init__(weight, scale)
        self.cap = cap

    def of_tokens(self, hidden, token_ids, temperature):
        size = self.chunk_size(hidden)
        # The gradient of the weight is a sum over chunks. It has the dtype of this tensor, fp32.
        weight = self.used_weight().float()
        outputs = []
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            inputs = (hidden[part], weight, token_ids[part], cut(temperature, part))
            outputs.append(checkpoint(self.of_chunk, *inputs, use_reentrant=False))
        logprobs, entropy = (torch.cat(column) for column in zip(*outputs))
        return logprobs, entropy if torch.is_grad_enabled() else None

    def of_chunk(self, hidden, weight, token_ids, temperature):
        logits = nn.functional.linear(hidden, weight.to(hidden.dtype)).float()  # (chunk, V)
        logits = self.cap * torch.tanh(self.scale * logits / self.cap) / temperature
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
