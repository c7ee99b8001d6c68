"""Top-k log-probs: log-probs of the k most likely tokens, or of given tokens (with a gradient), at every prediction.

As in `logprobs`, predictions are computed in chunks, with the softmax in float32 (float64 for a float64 model), and
logits are kept for the backward pass only if all of them fit in `MAX_KEPT_BYTES`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.training.network import logprobs as token_logprobs
from roll.training.network.distributions import BLOCK_ELEMENTS, Projection, iter_logit_chunks
from roll.training.network.divergence import log_softmax, recompute_log_softmax
from roll.training.network.logprobs import ProjectionGradient, compute_softcap_slope, split_into_blocks

__all__ = ["compute_logprobs", "compute_topk_logprobs"]


class _SelectedLogprobs(torch.autograd.Function):
    """Computes the log-probs of given tokens i_1, …, i_k at each prediction, under p = softmax(z / T) of the logits z.

    If g_j is the gradient of the loss with respect to the log-prob of i_j, then

        d loss / d z = (sum_j g_j onehot(i_j) - p sum_j g_j) / T

    The backward pass overwrites stored logits with their gradients, so it can run only once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, softcap: float | None
    ) -> Tensor:
        chunk = max(token_logprobs.CHUNK_ELEMENTS // weight.shape[0], 1)
        size = len(hidden) * weight.shape[0] * weight.element_size()
        keep = size <= token_logprobs.MAX_KEPT_BYTES and any(ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        result = hidden.new_empty(ids.shape, dtype=dtype)
        norms = largest, total = [hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2)]
        kept: list[Tensor] = []
        for part, (logits,) in iter_logit_chunks(hidden, weight, (), chunk, (softcap, None)):
            for rows, block in split_into_blocks(logits, part.start, BLOCK_ELEMENTS):
                logp = log_softmax(block, temperature, largest[rows], total[rows])
                result[rows] = logp.gather(1, ids[rows])
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, ids, *norms, *kept)
        ctx.chunk, ctx.temperature, ctx.softcap = chunk, temperature, softcap
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, ids, largest, total, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        own = grads[0] / ctx.temperature
        sums = -own.sum(1)
        projection = ProjectionGradient(hidden, weight, ctx.chunk, wants_hidden, wants_weight, total.dtype)
        for part, (logits,) in iter_logit_chunks(hidden, weight, (), ctx.chunk, (ctx.softcap, None), kept):
            slope = compute_softcap_slope(logits, ctx.softcap)
            for rows, block in split_into_blocks(
                logits, part.start, BLOCK_ELEMENTS
            ):  # becomes the gradient of the logits
                p = recompute_log_softmax(block, ctx.temperature, largest[rows], total[rows]).exp_()
                block.copy_(p.mul_(sums[rows, None]).scatter_add_(1, ids[rows], own[rows]))
            projection.add(part, logits, slope)
        return *projection.get_gradients(), None, None, None


def compute_logprobs(policy: Projection, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute the log-probs [M, k] of the token IDs [M, k] (int64) in float32 or better; differentiable in hidden
    states and weight.
    """
    result = _SelectedLogprobs.apply(*policy[:2], ids, temperature, policy.softcap)
    assert isinstance(result, Tensor)
    return result


@torch.no_grad()
def compute_topk_logprobs(policy: Projection, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the top-k token IDs [M, k] (int64) of every prediction and their log-probs, descending, without a
    gradient.

    Raises:
        ValueError: The vocabulary has fewer than `k` tokens.
    """
    hidden, weight, softcap = policy[:3]
    if k > len(weight):
        raise ValueError(f"the number of top-k tokens must be at most the vocabulary size {len(weight)}, got {k}")
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = hidden.new_empty(ids.shape, dtype=dtype)
    for part, (logits,) in iter_logit_chunks(
        hidden, weight, (), max(token_logprobs.CHUNK_ELEMENTS // weight.shape[0], 1), (softcap, None)
    ):
        for rows, block in split_into_blocks(logits, part.start, BLOCK_ELEMENTS):
            norms = torch.empty(2, len(block), dtype=dtype, device=block.device)
            logprobs[rows], ids[rows] = log_softmax(block, temperature, *norms).topk(k, dim=1)
    return ids, logprobs
