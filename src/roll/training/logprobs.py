"""Log-probs of given tokens from hidden states, without the logits of a whole batch ever existing at once.

    logprob_m = z_m[target_m] - logsumexp(z_m),    z_m = W h_m / temperature

The vocabulary projection runs in chunks of predictions. Its logits are kept for the backward pass only while
all of them together are small (`KEEP_BYTES`); beyond that they are computed again, so memory does not grow
with vocabulary x predictions. The logsumexp is taken in float32 (float64 for a float64 model).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "KEEP_BYTES", "token_logprobs"]

CHUNK_ELEMENTS = 2**25
"""Logits that exist at once in float32: 128 MiB. At a vocabulary of 49,152 that is 682 predictions."""

KEEP_BYTES = 128 * 2**20
"""Logits of a micro-batch, in the model's dtype, are kept up to this size and computed again beyond."""


class _TokenLogprobs(torch.autograd.Function):
    """Gradients: d logprob / d z = (onehot - softmax(z)) / temperature, then two matrix products."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        chunk = max(CHUNK_ELEMENTS // weight.shape[0], 1)
        keep = len(hidden) * weight.shape[0] * weight.element_size() <= KEEP_BYTES and any(ctx.needs_input_grad)
        high = torch.promote_types(hidden.dtype, torch.float32)
        logsumexp = torch.empty(len(hidden), dtype=high, device=hidden.device)
        chosen = torch.empty_like(logsumexp)
        kept: list[Tensor] = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            chosen[part] = logits.gather(1, targets[part, None])[:, 0].to(high) / temperature
            logsumexp[part] = _logsumexp(logits, temperature, high)
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, *kept)
        ctx.chunk, ctx.temperature = chunk, temperature
        return chosen - logsumexp

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        hidden, weight, targets, logsumexp, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        chunk, single = ctx.chunk, len(hidden) <= ctx.chunk
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        total: Tensor | None = None
        for i, start in enumerate(range(0, len(hidden), chunk)):
            part = slice(start, start + chunk)
            logits = kept[i] if kept else hidden[part] @ weight.t()
            grad_logits = _grad_logits(logits, targets[part], logsumexp[part], grad[part], ctx.temperature)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if wants_weight:
                share = grad_logits.t() @ hidden[part]
                if total is None:
                    total = share if single else share.to(logsumexp.dtype)  # a sum of several in float32
                else:
                    total.add_(share)
        return grad_hidden, None if total is None else total.to(weight.dtype), None, None


def _logsumexp(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """[M] of logits [M, V] / temperature; one float copy of the chunk, changed in place."""
    scaled = logits.to(dtype, copy=True)
    if temperature != 1.0:
        scaled.div_(temperature)
    largest = scaled.max(dim=1, keepdim=True).values
    return scaled.sub_(largest).exp_().sum(dim=1).log_().add_(largest[:, 0])


def _grad_logits(logits: Tensor, targets: Tensor, logsumexp: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Gradient of sum(grad * logprob) in the logits [M, V], in their dtype."""
    scale = grad.to(logsumexp.dtype) / temperature
    result = logits.to(logsumexp.dtype, copy=True)
    if temperature != 1.0:
        result.div_(temperature)
    result.sub_(logsumexp[:, None]).exp_().mul_(-scale[:, None])
    result.scatter_add_(1, targets[:, None], scale[:, None])
    return result.to(logits.dtype)


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-prob of each target under softmax(W h / temperature).

    Args:
        hidden: [M, H] hidden states at the predicting positions.
        weight: [V, H] of the vocabulary projection.
        targets: [M] int64.
        temperature: above 0.

    Returns:
        [M] float32 (float64 for a float64 model); differentiable in `hidden` and `weight`.
    """
    result = _TokenLogprobs.apply(hidden, weight, targets, temperature)
    assert isinstance(result, Tensor)
    return result
