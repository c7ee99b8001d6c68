"""Log-probs of given tokens from hidden states, without the logits of a whole batch ever existing at once.

    logprob_m = z_m[target_m] - logsumexp(z_m),    z_m = W h_m / temperature

The vocabulary projection runs in chunks of predictions. Its logits are kept for the backward pass only while
all of them together are small (`KEEP_BYTES`); beyond that they are computed again, so memory does not grow
with vocabulary x predictions. The softmax is taken in float32 (float64 for a float64 model).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "KEEP_BYTES", "ProjectionGradient", "blocks_of", "scaled_logits", "token_logprobs"]

CHUNK_ELEMENTS = 2**25
"""Logits that exist at once, in the model's dtype: 64 MiB in bfloat16, 682 predictions of 49,152 words."""

KEEP_BYTES = 128 * 2**20
"""Logits of a micro-batch are kept up to this size and computed again beyond."""

CPU_BLOCK_ELEMENTS = 2**19
"""On a CPU, the softmax goes through a chunk in blocks of this size, which stay in its cache."""


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d z = (onehot - softmax(z)) / temperature, then two matrix products.

    The softmax's maximum and sum are kept apart: their logarithmic sum would lose digits of large logits.
    Kept logits are overwritten with their gradients, so the backward pass runs once.
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
            logits = hidden[start : start + chunk] @ weight.t()
            for rows, block in blocks_of(logits, start):
                scaled = scaled_logits(block, temperature, result.dtype)
                torch.amax(scaled, dim=1, out=largest[rows])
                scaled.sub_(largest[rows, None])
                torch.gather(scaled, 1, targets[rows, None], out=result[rows, None])
                torch.sum(scaled.exp_(), dim=1, out=total[rows])
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, largest, total, *kept)
        ctx.chunk, ctx.temperature = chunk, temperature
        return result.sub_(total.log())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, largest, total, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        scale = (grads[0] / ctx.temperature)[:, None]
        factor = -scale / total[:, None]
        projection = ProjectionGradient(hidden, weight, ctx.chunk, wants_hidden, wants_weight, total.dtype)
        for i, start in enumerate(range(0, len(hidden), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logits = kept[i] if kept else hidden[part] @ weight.t()
            for rows, block in blocks_of(logits, start):  # becomes the gradient of the logits
                exponentials = scaled_logits(block, ctx.temperature, total.dtype).sub_(largest[rows, None]).exp_()
                gradient = exponentials.mul_(factor[rows])
                block.copy_(gradient.scatter_add_(1, targets[rows, None], scale[rows]))
            projection.add(part, logits)
        return *projection.result(), None, None


class ProjectionGradient:
    """From the gradients of the logits, chunk by chunk, to those of hidden states and vocabulary projection.

    Args:
        hidden: [M, H]
        weight: [V, H]
        chunk: predictions of a chunk.
        wants_hidden: whether the hidden states' is wanted.
        wants_weight: whether the projection's is wanted.
        high: dtype in which several chunks' shares are added up.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, chunk: int, wants_hidden: bool, wants_weight: bool, high: torch.dtype
    ) -> None:
        self._hidden, self._weight, self._wants_weight = hidden, weight, wants_weight
        self._sum_dtype = hidden.dtype if len(hidden) <= chunk else high
        self._grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        self._grad_weight: Tensor | None = None

    def add(self, part: slice, grad_logits: Tensor) -> None:
        """Take in a chunk's gradients [n, V], of the predictions in `part`."""
        if self._grad_hidden is not None:
            torch.mm(grad_logits, self._weight, out=self._grad_hidden[part])
        if self._wants_weight:
            share = grad_logits.t() @ self._hidden[part]
            if self._grad_weight is not None:
                self._grad_weight.add_(share)
            else:
                self._grad_weight = share.to(self._sum_dtype)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the hidden states and of the projection, where they are wanted."""
        weight = self._grad_weight
        return self._grad_hidden, None if weight is None else weight.to(self._weight.dtype)


def blocks_of(logits: Tensor, start: int, most: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """A chunk's logits by blocks of rows, with their place among all predictions.

    Args:
        logits: [n, V], the first of prediction `start`.
        start: see there.
        most: elements of a block where the device does not ask for less; by default all.
    """
    rows = len(logits) if most is None else max(most // logits.shape[1], 1)
    if logits.device.type == "cpu":
        rows = max(CPU_BLOCK_ELEMENTS // logits.shape[1], 1)
    for first in range(0, len(logits), rows):
        block = logits[first : first + rows]
        yield slice(start + first, start + first + len(block)), block


def scaled_logits(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
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
