"""Divergence of the policy's next-token distributions from a teacher's, over the whole vocabulary, with the gradient.

    p_m = softmax(W h_m / T),     q_m = softmax(W' h'_m / T)    of the teacher,     r = (1 - beta) p + beta q

    reverse   sum_v p (log p - log q)           forward   sum_v q (log q - log p)
    jsd       beta KL(q || r) + (1 - beta) KL(p || r)        arXiv 2306.13649 eq. 1

As in `logprobs`, predictions are computed in chunks, with the softmax in float32 (float64 for a float64 model), and
logits are kept for the backward pass only while all of them together are small. The log-probs of the targets come from
the same logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from roll.training.network import logprobs as plain
from roll.training.network.distributions import BLOCK_ELEMENTS, Caps, Projection, logit_chunks, select_rows, softcaps
from roll.training.network.logprobs import ProjectionGradient, scaled_logits, softcap_slope, split_into_blocks
from roll.types import Divergence

__all__ = ["log_softmax", "recompute_log_softmax", "teacher_divergence"]


class _Divergence(torch.autograd.Function):
    """Computes log-prob and divergence D. With their incoming gradients a and k, d loss / d z is 1 / T times

        a (onehot - p) + k g,     g = p (log p - log q - D)     q - p, negative     (1 - beta) p (log p - log r - D_p)

    for reverse, forward and jsd, where D_p is KL(p || r). The teacher gets no gradient. Kept logits are overwritten
    with their gradients: the backward pass runs once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        form: Divergence,
        caps: Caps,
        *teacher: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(plain.CHUNK_ELEMENTS // weight.shape[0], 1)
        size = 2 * len(hidden) * weight.shape[0] * weight.element_size()
        keep = size <= plain.KEEP_BYTES and any(ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, divergence, inner, *norms = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(7))
        kept: list[Tensor] = []
        for part, chunks in logit_chunks(hidden, weight, teacher, chunk, caps):
            for rows, block in split_into_blocks(chunks[0], part.start, BLOCK_ELEMENTS):
                logp = log_softmax(block, temperature, *(x[rows] for x in norms[:2]))
                logq = log_softmax(select_rows(chunks[1], part, rows), temperature, *(x[rows] for x in norms[2:]))
                torch.gather(logp, 1, targets[rows, None], out=logprobs[rows, None])
                divergence[rows], inner[rows] = _divergence(form, logp, logq)
            if keep:
                kept += chunks
        ctx.save_for_backward(hidden, weight, targets, inner, *norms, *teacher, *kept)
        ctx.chunk, ctx.temperature, ctx.form, ctx.caps = chunk, temperature, form, caps
        return logprobs, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, inner, *rest = ctx.saved_tensors
        norms, teacher, kept = rest[:4], rest[4:6], rest[6:]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        own, other = (grad / ctx.temperature for grad in grads)
        projection = ProjectionGradient(hidden, weight, ctx.chunk, wants_hidden, wants_weight, inner.dtype)
        for part, chunks in logit_chunks(hidden, weight, teacher, ctx.chunk, ctx.caps, kept):
            slope = softcap_slope(chunks[0], ctx.caps[0])
            for rows, block in split_into_blocks(
                chunks[0], part.start, BLOCK_ELEMENTS
            ):  # becomes the gradient of the logits
                logp = recompute_log_softmax(block, ctx.temperature, *(x[rows] for x in norms[:2]))
                logq = recompute_log_softmax(
                    select_rows(chunks[1], part, rows), ctx.temperature, *(x[rows] for x in norms[2:])
                )
                p = logp.exp()
                gradient = _gradient(ctx.form, p, logp, logq, inner[rows, None]).mul_(other[rows, None])
                gradient.addcmul_(p, own[rows, None], value=-1)
                block.copy_(gradient.scatter_add_(1, targets[rows, None], own[rows, None]))
            projection.add(part, chunks[0], slope)
        return *projection.result(), None, None, None, None, None, None


def log_softmax(logits: Tensor, temperature: float, largest: Tensor, total: Tensor) -> Tensor:
    """Return log-probs [n, V]; write each row's largest logit to `largest`, the log-sum of exponentials to `total`."""
    scaled = scaled_logits(logits, temperature, largest.dtype)
    torch.amax(scaled, dim=1, out=largest)
    scaled.sub_(largest[:, None])
    torch.sum(scaled.exp(), dim=1, out=total)
    total.log_()
    return scaled.sub_(total[:, None])


def recompute_log_softmax(logits: Tensor, temperature: float, largest: Tensor, total: Tensor) -> Tensor:
    """Return the same log-probs from the saved `largest` and `total`."""
    return scaled_logits(logits, temperature, largest.dtype).sub_(largest[:, None]).sub_(total[:, None])


def _divergence(form: Divergence, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence [n], and the one [n] that its gradient subtracts: see `_Divergence`."""
    if form.kind == "reverse":
        found = torch.sub(logp, logq).mul_(logp.exp()).sum(1)
        return found, found
    if form.kind == "forward":
        found = torch.sub(logq, logp).mul_(logq.exp()).sum(1)
        return found, found
    mixed = _mixture(form, logp, logq)
    inner = torch.sub(logp, mixed).mul_(logp.exp()).sum(1)
    return form.beta * mixed.neg_().add_(logq).mul_(logq.exp()).sum(1) + (1.0 - form.beta) * inner, inner


def _gradient(form: Divergence, p: Tensor, logp: Tensor, logq: Tensor, inner: Tensor) -> Tensor:
    """Return the gradient [n, V] of the divergence with respect to the scaled logits, as a new tensor."""
    if form.kind == "reverse":
        return torch.sub(logp, logq).sub_(inner).mul_(p)
    if form.kind == "forward":
        return p - logq.exp()
    return _mixture(form, logp, logq).neg_().add_(logp).sub_(inner).mul_(p).mul_(1.0 - form.beta)


def _mixture(form: Divergence, logp: Tensor, logq: Tensor) -> Tensor:
    return torch.logaddexp(logp + math.log1p(-form.beta), logq + math.log(form.beta))


def teacher_divergence(
    policy: Projection, teacher: Projection, targets: Tensor, form: Divergence, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [M] of the targets and divergences [M] in nats, float32 or better, both at one temperature.

    Args:
        policy: The hidden states at the predicting positions, and the projection; differentiable in both.
        teacher: The teacher's hidden states at the same positions and its projection, over the same vocabulary.
        targets: The tokens [M], int64.
        form: The kind of divergence; its own temperature is not used here.
        temperature: The temperature of both distributions, above 0.
    """
    found = _Divergence.apply(*policy[:2], targets, temperature, form, softcaps(policy, teacher), *teacher[:2])
    assert isinstance(found, tuple)
    return found[0], found[1]
