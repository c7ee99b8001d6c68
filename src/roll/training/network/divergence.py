"""Divergence from a teacher over the whole vocabulary (reverse KL, forward KL, JSD), with the gradient.

    p_m = softmax(W h_m / T),     q_m = softmax(W' h'_m / T)    of the teacher,     r = (1 - beta) p + beta q

    reverse   sum_v p (log p - log q)           forward   sum_v q (log q - log p)
    jsd       beta KL(q || r) + (1 - beta) KL(p || r)        arXiv 2306.13649 eq. 1

As in `logprobs`, predictions are computed in chunks, with the softmax in float32 (float64 for a float64 model), and
logits are kept for the backward pass only if all of them fit in `MAX_KEPT_BYTES`. The log-probs of the targets come
from the same logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from roll.training.network import logprobs as token_logprobs
from roll.training.network.distributions import (
    BLOCK_ELEMENTS,
    Projection,
    Softcaps,
    get_softcaps,
    iter_logit_chunks,
    select_rows,
)
from roll.training.network.logprobs import (
    ProjectionGradient,
    compute_scaled_logits,
    compute_softcap_slope,
    split_into_blocks,
)
from roll.types import Divergence

__all__ = ["compute_teacher_divergence", "log_softmax", "recompute_log_softmax"]


class _TeacherDivergence(torch.autograd.Function):
    """Computes each target's log-prob, and the divergence D of the policy p from the teacher q.

    If a and k are the gradients of the loss with respect to log-prob and D, and T is the temperature, then the gradient
    with respect to the policy's logits is 1 / T times

        a (onehot - p) + k g

    where g is p (log p - log q - D) for reverse KL, p - q for forward KL, and (1 - beta) p (log p - log r - D_p) for
    JSD, with r = beta q + (1 - beta) p and D_p = KL(p || r). The teacher gets no gradient. The backward pass overwrites
    stored logits with their gradients, so it can run only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        divergence: Divergence,
        caps: Softcaps,
        *teacher: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(token_logprobs.CHUNK_ELEMENTS // weight.shape[0], 1)
        size = 2 * len(hidden) * weight.shape[0] * weight.element_size()
        keep = size <= token_logprobs.MAX_KEPT_BYTES and any(ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, values, inner, *norms = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(7))
        kept: list[Tensor] = []
        for part, chunks in iter_logit_chunks(hidden, weight, teacher, chunk, caps):
            for rows, block in split_into_blocks(chunks[0], part.start, BLOCK_ELEMENTS):
                logp = log_softmax(block, temperature, *(x[rows] for x in norms[:2]))
                logq = log_softmax(select_rows(chunks[1], part, rows), temperature, *(x[rows] for x in norms[2:]))
                torch.gather(logp, 1, targets[rows, None], out=logprobs[rows, None])
                values[rows], inner[rows] = _compute_divergence(divergence, logp, logq)
            if keep:
                kept += chunks
        ctx.save_for_backward(hidden, weight, targets, inner, *norms, *teacher, *kept)
        ctx.chunk, ctx.temperature, ctx.divergence, ctx.caps = chunk, temperature, divergence, caps
        return logprobs, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, inner, *rest = ctx.saved_tensors
        norms, teacher, kept = rest[:4], rest[4:6], rest[6:]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        own, other = (grad / ctx.temperature for grad in grads)
        projection = ProjectionGradient(hidden, weight, ctx.chunk, wants_hidden, wants_weight, inner.dtype)
        for part, chunks in iter_logit_chunks(hidden, weight, teacher, ctx.chunk, ctx.caps, kept):
            slope = compute_softcap_slope(chunks[0], ctx.caps[0])
            for rows, block in split_into_blocks(
                chunks[0], part.start, BLOCK_ELEMENTS
            ):  # becomes the gradient of the logits
                logp = recompute_log_softmax(block, ctx.temperature, *(x[rows] for x in norms[:2]))
                logq = recompute_log_softmax(
                    select_rows(chunks[1], part, rows), ctx.temperature, *(x[rows] for x in norms[2:])
                )
                p = logp.exp()
                gradient = _compute_gradient(ctx.divergence, p, logp, logq, inner[rows, None]).mul_(other[rows, None])
                gradient.addcmul_(p, own[rows, None], value=-1)
                block.copy_(gradient.scatter_add_(1, targets[rows, None], own[rows, None]))
            projection.add(part, chunks[0], slope)
        return *projection.get_gradients(), None, None, None, None, None, None


def log_softmax(logits: Tensor, temperature: float, max_logits: Tensor, sum_exp: Tensor) -> Tensor:
    """Return log-probs [n, V]; write each row's largest scaled logit to `max_logits`, and to `sum_exp`
    the logarithm of the sum of exp(scaled logit - largest).
    """
    scaled = compute_scaled_logits(logits, temperature, max_logits.dtype)
    torch.amax(scaled, dim=1, out=max_logits)
    scaled.sub_(max_logits[:, None])
    torch.sum(scaled.exp(), dim=1, out=sum_exp)
    sum_exp.log_()
    return scaled.sub_(sum_exp[:, None])


def recompute_log_softmax(logits: Tensor, temperature: float, max_logits: Tensor, sum_exp: Tensor) -> Tensor:
    """Recompute the log-probs that `log_softmax` returned, from the `max_logits` and `sum_exp` of that call."""
    return compute_scaled_logits(logits, temperature, max_logits.dtype).sub_(max_logits[:, None]).sub_(sum_exp[:, None])


def _compute_divergence(divergence: Divergence, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence [n], and the values [n] that `_compute_gradient` needs as `inner`: D, or D_p for jsd."""
    if divergence.kind == "reverse":
        found = torch.sub(logp, logq).mul_(logp.exp()).sum(1)
        return found, found
    if divergence.kind == "forward":
        found = torch.sub(logq, logp).mul_(logq.exp()).sum(1)
        return found, found
    mixed = _mix_distributions(divergence, logp, logq)
    inner = torch.sub(logp, mixed).mul_(logp.exp()).sum(1)
    return divergence.beta * mixed.neg_().add_(logq).mul_(logq.exp()).sum(1) + (1.0 - divergence.beta) * inner, inner


def _compute_gradient(divergence: Divergence, p: Tensor, logp: Tensor, logq: Tensor, inner: Tensor) -> Tensor:
    """Return the gradient g [n, V] of the divergence with respect to the scaled logits, with D or D_p from `inner`."""
    if divergence.kind == "reverse":
        return torch.sub(logp, logq).sub_(inner).mul_(p)
    if divergence.kind == "forward":
        return p - logq.exp()
    return _mix_distributions(divergence, logp, logq).neg_().add_(logp).sub_(inner).mul_(p).mul_(1.0 - divergence.beta)


def _mix_distributions(divergence: Divergence, logp: Tensor, logq: Tensor) -> Tensor:
    # log r of the mixture, without leaving log space: both probabilities may underflow.
    return torch.logaddexp(logp + math.log1p(-divergence.beta), logq + math.log(divergence.beta))


def compute_teacher_divergence(
    policy: Projection, teacher: Projection, targets: Tensor, divergence: Divergence, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [M] of the targets and divergences [M] in nats, float32 or better, both at the same
    temperature.

    Args:
        policy: The hidden states at the predicting positions, and the projection; differentiable in both.
        teacher: The teacher's hidden states at the same positions and its projection, over the same vocabulary.
        targets: The tokens [M], int64.
        divergence: The divergence. Its kind and beta are used; its temperature is ignored.
        temperature: The temperature of both distributions, above 0.
    """
    results = _TeacherDivergence.apply(
        *policy[:2], targets, temperature, divergence, get_softcaps(policy, teacher), *teacher[:2]
    )
    assert isinstance(results, tuple)
    return results[0], results[1]
