"""Log-probs of given tokens from hidden states, without the logits of a whole batch ever existing at once.

    logprob_m = z_m[target_m] - logsumexp(z_m),    z_m = W h_m / temperature

The vocabulary projection runs in chunks of predictions. Its logits are kept for the backward pass only while
all of them together are small (`KEEP_BYTES`); beyond that they are computed again, so memory does not grow
with vocabulary x predictions. The softmax is taken in float32 (float64 for a float64 model).
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
    """d logprob / d z = (onehot - softmax(z)) / temperature, then two matrix products.

    The softmax's maximum and sum are kept apart: their logarithmic sum would lose digits of large logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        chunk = max(CHUNK_ELEMENTS // weight.shape[0], 1)
        keep = len(hidden) * weight.shape[0] * weight.element_size() <= KEEP_BYTES
        keep = keep and any(ctx.needs_input_grad)
        result = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        largest, total = torch.empty_like(result), torch.empty_like(result)
        kept: list[Tensor] = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            scaled = _scaled(logits, temperature, result.dtype)
            torch.amax(scaled, dim=1, out=largest[part])
            scaled.sub_(largest[part, None])
            torch.gather(scaled, 1, targets[part, None], out=result[part, None])
            torch.sum(scaled.exp_(), dim=1, out=total[part])
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, largest, total, *kept)
        ctx.chunk, ctx.temperature = chunk, temperature
        return result.sub_(total.log())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        hidden, weight, targets, largest, total, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        chunk, single = ctx.chunk, len(hidden) <= ctx.chunk
        scale = grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        for i, start in enumerate(range(0, len(hidden), chunk)):
            part = slice(start, start + chunk)
            logits = kept[i] if kept else hidden[part] @ weight.t()
            probabilities = _scaled(logits, ctx.temperature, total.dtype).sub_(largest[part, None]).exp_()
            grad_logits = probabilities.mul_((-scale[part] / total[part])[:, None])
            grad_logits.scatter_add_(1, targets[part, None], scale[part, None])
            grad_logits = grad_logits.to(logits.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if wants_weight:
                share = grad_logits.t() @ hidden[part]
                if grad_weight is None:
                    grad_weight = share if single else share.to(total.dtype)  # several are added in float32
                else:
                    grad_weight.add_(share)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """A copy of the logits in `dtype`, divided by the temperature."""
    scaled = logits.to(dtype, copy=True)
    return scaled if temperature == 1.0 else scaled.div_(temperature)


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
