"""Log-probs of given tokens from hidden states, without ever materializing the logits of a whole batch.

    logprob_m = z_m[target_m] - logsumexp(z_m),    z_m = W h_m / temperature

The vocabulary projection runs in chunks of vocabulary entries, so that the gradient of an entry's weights is computed
by one matmul and is never summed over chunks. Logits are kept for the backward pass only if all of them fit in
`MAX_KEPT_BYTES`. Otherwise they are recomputed, so memory does not grow with vocabulary x predictions. The softmax is
computed in float32 (float64 for a float64 model).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roll.training.kernels.native import NativeLibrary, load_native_library
from roll.training.parallel.vocab_parallel import VocabShard

__all__ = [
    "CHUNK_ELEMENTS",
    "MAX_KEPT_BYTES",
    "ProjectionGradient",
    "compute_scaled_logits",
    "compute_softcap_slope",
    "compute_token_logprobs",
    "has_small_cache",
    "softcap_",
    "split_into_blocks",
]

CHUNK_ELEMENTS = 2**25
"""Number of logits that exist at the same time, in the model's dtype: 64 MiB in bfloat16."""

MAX_KEPT_BYTES = 512 * 2**20
"""Maximum size in bytes of a micro-batch's logits that are kept. Recomputing larger ones takes about two fifths of the
time of a small model's layers."""

CPU_BLOCK_ELEMENTS = 2**19
"""Number of logits in a block of the softmax on a CPU, chosen to fit in its cache."""


class _TokenLogprobs(torch.autograd.Function):
    """Computes the targets' log-probs, one chunk of logits z at a time.

    The gradient is d logprob / d z = (onehot - softmax(z / temperature)) / temperature. The largest logit and the sum
    of exponentials are stored separately, because a single log-sum-exp would lose precision for large logits. The
    backward pass overwrites stored logits with their gradients, so it can run only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        vocab_shard: VocabShard | None,
    ) -> Tensor:
        keep = len(hidden) * weight.shape[0] * weight.element_size() <= MAX_KEPT_BYTES and any(ctx.needs_input_grad)
        accumulation_dtype = torch.promote_types(hidden.dtype, torch.float32)
        result = hidden.new_zeros(len(hidden), dtype=accumulation_dtype)
        if vocab_shard is not None:
            local, here = vocab_shard.compute_local_indices(targets, len(weight))
            # Another rank has these targets; -1 is in no slice of this shard.
            targets = local.where(here, -1)
        largest, total = torch.full_like(result, float("-inf")), torch.zeros_like(result)
        kept: list[Tensor] = []
        for part in _split_vocab(hidden, weight):
            logits = softcap_(hidden @ weight[part].t(), softcap)
            _update_logsumexp(logits, temperature, largest, total)
            local = targets - part.start
            found = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].to(accumulation_dtype)
            torch.where((local >= 0) & (local < logits.shape[1]), found / temperature, result, out=result)
            if keep:
                kept.append(logits)
        if vocab_shard is not None:
            # The sum relative to the maximum over all shards; see `vocab_parallel`.
            total.mul_(vocab_shard.reduce_max_(largest).exp_())
            vocab_shard.all_reduce_(total, result)
        ctx.save_for_backward(hidden, weight, targets, largest, total, *kept)
        ctx.temperature, ctx.softcap = temperature, softcap
        return result.sub_(largest).sub_(total.log())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, largest, total, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        scale = (grads[0] / ctx.temperature).to(total.dtype)
        factor = -scale / total
        parts = _split_vocab(hidden, weight)
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_hidden: Tensor | None = None
        for i, part in enumerate(parts):
            logits = kept[i] if kept else softcap_(hidden @ weight[part].t(), ctx.softcap)
            slope = compute_softcap_slope(logits, ctx.softcap)
            _replace_logits_by_gradient(logits, ctx.temperature, largest, factor, scale, targets - part.start)
            if slope is not None:
                logits.mul_(slope)
            if grad_weight is not None:
                torch.mm(logits.t(), hidden, out=grad_weight[part])
            if wants_hidden:
                share = logits @ weight[part]
                if len(parts) > 1:
                    # Rounding every partial sum to bfloat16 would accumulate an error.
                    share = share.to(total.dtype)
                grad_hidden = share if grad_hidden is None else grad_hidden.add_(share)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def softcap_(logits: Tensor, softcap: float | None) -> Tensor:
    """Apply a final soft cap c to logits, in place: c tanh(z / c)."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def compute_softcap_slope(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Return the derivative of capped logits with respect to uncapped logits."""
    return None if softcap is None else (logits / softcap).square_().neg_().add_(1.0)


def _split_vocab(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Split the vocabulary into slices of as many entries as `CHUNK_ELEMENTS` allows."""
    size = max(CHUNK_ELEMENTS // max(len(hidden), 1), 1)
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


def _update_logsumexp(logits: Tensor, temperature: float, max_logits: Tensor, sum_exp: Tensor) -> None:
    """Update each prediction's largest logit [M] and sum of exponentials [M] with logits [M, n] of more vocabulary
    entries.
    """
    library = _get_native_library(logits)
    if library is not None:
        library.call("softmax_sums", logits, 1.0 / temperature, max_logits, sum_exp, *logits.shape)
        return
    for rows, block in split_into_blocks(logits, 0):
        scaled = compute_scaled_logits(block, temperature, sum_exp.dtype)
        # Online softmax (arXiv 1805.02867): earlier sums are rescaled to the new maximum.
        top = torch.maximum(max_logits[rows], scaled.amax(dim=1))
        sum_exp[rows] *= (max_logits[rows] - top).exp_()
        sum_exp[rows] += scaled.sub_(top[:, None]).exp_().sum(dim=1)
        max_logits[rows] = top


def _replace_logits_by_gradient(
    logits: Tensor, temperature: float, max_logits: Tensor, factor: Tensor, scale: Tensor, local: Tensor
) -> None:
    """Replace logits [M, n] of n vocabulary entries by their gradient, in place.

    The gradient is `factor` * exp(logits / temperature - largest), plus `scale` in the target's column `local` (if it
    is one of the n columns).
    """
    library = _get_native_library(logits)
    if library is not None:
        library.call("softmax_gradient", logits, 1.0 / temperature, max_logits, factor, scale, local, *logits.shape)
        return
    extra = torch.where((local >= 0) & (local < logits.shape[1]), scale, 0.0)[:, None]
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    for rows, block in split_into_blocks(logits, 0):
        gradient = compute_scaled_logits(block, temperature, scale.dtype).sub_(max_logits[rows, None]).exp_()
        block.copy_(gradient.mul_(factor[rows, None]).scatter_add_(1, index[rows], extra[rows]))


def _get_native_library(logits: Tensor) -> NativeLibrary | None:
    return load_native_library() if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" else None


class ProjectionGradient:
    """Computes the gradients of hidden states and vocabulary projection from the logits' gradients, chunk by chunk.

    Args:
        hidden: The hidden states [M, H].
        weight: The projection [V, H].
        chunk: The number of predictions in a chunk.
        wants_hidden: Whether to compute the gradient of the hidden states.
        wants_weight: Whether to compute the gradient of the projection.
        accumulation_dtype: The dtype in which the gradients of several chunks are summed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        chunk: int,
        wants_hidden: bool,
        wants_weight: bool,
        accumulation_dtype: torch.dtype,
    ) -> None:
        self._hidden, self._weight, self._wants_weight = hidden, weight, wants_weight
        self._sum_dtype = hidden.dtype if len(hidden) <= chunk else accumulation_dtype
        self._grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        self._grad_weight: Tensor | None = None

    def add(self, part: slice, grad_logits: Tensor, slope: Tensor | None = None) -> None:
        """Add the gradients of the predictions in `part`, computed from the gradients [n, V] of their logits.

        If given, `slope` must be the result of `compute_softcap_slope`; `grad_logits` is multiplied by it in place.
        """
        if slope is not None:
            grad_logits.mul_(slope)
        if self._grad_hidden is not None:
            torch.mm(grad_logits, self._weight, out=self._grad_hidden[part])
        if self._wants_weight:
            share = grad_logits.t() @ self._hidden[part]
            if self._grad_weight is not None:
                self._grad_weight.add_(share)
            else:
                self._grad_weight = share.to(self._sum_dtype)

    def get_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the hidden states and of the projection; `None` for a gradient that was not
        requested.
        """
        weight = self._grad_weight
        if weight is None and self._wants_weight:  # without predictions: the other ranks still reduce this gradient
            weight = torch.zeros_like(self._weight)
        return self._grad_hidden, None if weight is None else weight.to(self._weight.dtype)


def split_into_blocks(logits: Tensor, start: int, max_elements: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield a chunk's logits in blocks of rows, each with its slice of all predictions.

    Args:
        logits: The logits [n, V]; the first row belongs to prediction `start`.
        start: The first prediction of the chunk.
        max_elements: The maximum number of elements in a block; unlimited by default. On devices with a small cache,
            the limit is lower.
    """
    rows = len(logits) if max_elements is None else max(max_elements // logits.shape[1], 1)
    if has_small_cache(logits.device):
        rows = max(CPU_BLOCK_ELEMENTS // logits.shape[1], 1)
    for first in range(0, len(logits), rows):
        block = logits[first : first + rows]
        yield slice(start + first, start + first + len(block)), block


def has_small_cache(device: torch.device) -> bool:
    """Return whether blocks of logits should fit into a CPU cache. A dry run patches this function to return the result
    for an accelerator.
    """
    return device.type == "cpu"


def compute_scaled_logits(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return a copy of the logits in `dtype`, divided by the temperature."""
    scaled = logits.to(dtype, copy=True)
    return scaled if temperature == 1.0 else scaled.div_(temperature)


def compute_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
) -> Tensor:
    """Compute the log-prob of each target under softmax(W h / temperature).

    Args:
        hidden: The hidden states [M, H] at the predicting positions.
        weight: The vocabulary projection [V, H].
        targets: The tokens [M], int64.
        temperature: The temperature, above 0.
        softcap: The soft cap of the logits before the temperature.
        vocab_shard: The vocabulary shard of the projection; `None` if the projection has the whole vocabulary.

    Returns:
        The log-probs [M], float32 (float64 for a float64 model); differentiable in `hidden` and `weight`.
    """
    result = _TokenLogprobs.apply(hidden, weight, targets, temperature, softcap, vocab_shard)
    assert isinstance(result, Tensor)
    return result
