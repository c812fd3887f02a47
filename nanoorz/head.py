"""The LM head computes log-probs and entropies in chunks, with a backward pass of its own.

The logits of a chunk of tokens take at most 512 MB on a GPU, and 32 MB on a CPU. A few copies of
them exist at the same time. ORZ held four copies of all logits. This file needs torch alone.

Shapes: M response tokens, V vocabulary, H hidden; chunk: the tokens of a chunk.
"""

import torch
from torch import Tensor, nn

KEPT = 2**26  # floats, which take 256 MB


class ChunkedLogprob(torch.autograd.Function):
    """log p(token) and entropy from hidden states, chunk by chunk.

    The backward pass needs log p of all V tokens. If these numbers take at most 256 MB, they are
    kept. If not, the backward pass computes them again: of 8k tokens and a vocabulary of 152k they
    would take 5 GB. With a cap of the logits, as in Gemma 2, the backward pass needs the tanh of
    the logits, too. It has the same size.
    """

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, chunk, cap=None, wants_entropy=True):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)  # (M,)
        entropy = torch.empty_like(logprobs) if wants_entropy else None  # (M,)
        keep_log_p = len(hidden) * len(weight) <= KEPT
        ctx.kept = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p, tanh = chunk_log_softmax(hidden[part], weight, temperature, cap)  # (chunk, V)
            logprobs[part] = log_p.gather(1, token_ids[part, None])[:, 0]
            if wants_entropy:
                # -sum(p log p). An einsum would be shorter, but its sums over V are ten times less
                # exact in fp32.
                entropy[part] = log_p.exp().mul_(log_p).sum(-1).neg()
            if keep_log_p:
                ctx.kept.append((log_p, tanh))
            # Free both if they are not kept. Without this line they would stay in memory until the
            # next chunk is computed.
            del log_p, tanh
        ctx.save_for_backward(hidden, weight, token_ids, entropy)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.cap = cap
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
        by the temperature first. With a cap d z / d logits also has the factor 1 - tanh^2.
        """
        hidden, weight, token_ids, entropy = ctx.saved_tensors
        temperature = ctx.temperature
        # The loss may use the entropy and no log-prob.
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)  # (M, H)
        # The gradient of the weight is a sum of many small terms, so the sum is in fp32.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, H)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if ctx.kept:
                log_p, tanh = ctx.kept.pop(0)  # (chunk, V)
            else:
                log_p, tanh = chunk_log_softmax(hidden[part], weight, temperature, ctx.cap)
            on_token = grad_logprobs[part, None] / temperature  # (chunk, 1)
            on_all = on_token  # (chunk, 1)
            if grad_entropy is not None:
                on_entropy = grad_entropy[part, None] / temperature  # (chunk, 1)
                on_all = on_token + on_entropy * (log_p + entropy[part, None])  # (chunk, V)
            # From here on the memory of log_p holds p, and then the gradient.
            grad_logits = log_p.exp_().mul_(-on_all)  # (chunk, V)
            grad_logits.scatter_add_(1, token_ids[part, None], on_token)
            if ctx.cap:
                grad_logits *= 1 - tanh**2
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            add_product_(grad_weight, grad_logits.T, hidden[part])
            del log_p, tanh, grad_logits, on_all
        # `forward` has five more arguments, which have no gradient.
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def chunk_log_softmax(hidden: Tensor, weight: Tensor, temperature, cap):
    """log p of all V tokens, (chunk, V), and tanh(logits / cap), (chunk, V), or None."""
    logits = nn.functional.linear(hidden, weight).float()  # (chunk, V)
    tanh = None
    if cap:
        tanh = torch.tanh(logits / cap)  # (chunk, V)
        logits = cap * tanh
    if temperature != 1:
        logits /= temperature
    # log_softmax is one kernel. A logsumexp is slower, and its entropy is less exact.
    return logits.log_softmax(-1), tanh


def add_product_(total: Tensor, a: Tensor, b: Tensor):
    """total += a @ b. total: (V, H)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        # The product of two bf16 matrices is added in fp32.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        # On a CPU the product is a second tensor (V, H), in bf16.
        total.add_(a @ b)


class ChunkedHead(nn.Module):
    """An LM head without bias that computes log-probs and entropies, chunk by chunk.

    Call it once for each micro-batch. Under ZeRO-3 a call gathers the weight, so all ranks must
    make the same number of calls.
    """

    def __init__(self, weight: nn.Parameter, scale=1.0, cap=None):
        """weight: (V, H), which may be the embedding's too.

        The logits are scale * hidden @ weight.T, and with a cap cap * tanh(those / cap).
        """
        super().__init__()
        self.weight = weight
        self.scale = scale
        self.cap = cap
        # Log-probs are those of the ids below this number (models.Frozen). None: all ids.
        self.id_limit = None

    def forward(self, hidden: Tensor, token_ids: Tensor | None = None, temperature=1.0):
        """Log-probs and entropies of M tokens, (M,) each.

        hidden: (M, H). token_ids: (M,). temperature: a number. Under torch.no_grad() the entropies
        are None, because only updates log them. The model's own code in transformers calls its head
        with `hidden` alone. It gets logits, (..., V), without scale and cap.
        """
        if token_ids is None:
            return nn.functional.linear(hidden, self.weight)
        floats = 2**27 if hidden.is_cuda else 2**23  # 512 MB, or 32 MB
        chunk = max(16, floats // len(self.weight))
        # With x = hidden @ weight.T, c = cap / scale and t = temperature / scale:
        # cap * tanh(scale * x / cap) / temperature = c * tanh(x / c) / t.
        cap = self.cap / self.scale if self.cap else None
        temperature = temperature / self.scale
        weight = self.weight if self.id_limit is None else self.weight[: self.id_limit]
        learns = torch.is_grad_enabled()
        return ChunkedLogprob.apply(hidden, weight, token_ids, temperature, chunk, cap, learns)
