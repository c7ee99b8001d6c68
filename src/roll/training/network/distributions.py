"""Log-probs, entropy and divergence of next-token distributions, with gradients.

    p_m = softmax(W h_m / temperature),     q_m = softmax(W' h'_m / temperature)    of the reference

    entropy_m = -sum_v p log p              full_kl_m = sum_v p (log p - log q)

As in `logprobs`, predictions are computed in chunks, with the softmax in float32 (float64 for a float64 model), and
logits are kept for the backward pass only if all of them fit in `MAX_KEPT_BYTES`. The log-probs are bitwise equal to
those of `logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from roll.training.network import logprobs as token_logprobs
from roll.training.network.logprobs import (
    ProjectionGradient,
    compute_scaled_logits,
    compute_softcap_slope,
    compute_token_logprobs,
    softcap_,
    split_into_blocks,
)
from roll.training.parallel.vocab_parallel import VocabShard

__all__ = [
    "BLOCK_ELEMENTS",
    "Predictions",
    "Projection",
    "Softcaps",
    "compute_token_statistics",
    "get_softcaps",
    "iter_logit_chunks",
    "select_rows",
]

BLOCK_ELEMENTS = 2**23
"""Number of logits in a block on an accelerator, where several float32 copies of it, 32 MiB each, exist at the same
time."""


Softcaps: TypeAlias = tuple[float | None, float | None]
"""The soft caps of the policy's logits and of the other model's logits."""


class Projection(NamedTuple):
    """Hidden states, and the vocabulary projection to apply to them."""

    hidden: Tensor
    """The hidden states [M, H]."""
    weight: Tensor
    """The projection [V, H]."""
    softcap: float | None = None
    """The soft cap of the logits."""
    vocab_shard: VocabShard | None = None
    """The vocabulary shard of the projection; `None`: the projection has the whole vocabulary."""

    def gather_vocab(self) -> Projection:
        """Return the projection to the whole vocabulary, gathered from all shards.

        Every rank then computes the same results, which must be passed to `divide_gradient`.
        """
        return (
            self
            if self.vocab_shard is None
            else self._replace(weight=self.vocab_shard.gather_projection(self.weight), vocab_shard=None)
        )

    def divide_gradient(self, value: Tensor) -> Tensor:
        """Return the value unchanged, but divide its gradient by the number of vocabulary shards that compute it."""
        return value if self.vocab_shard is None else self.vocab_shard.divide_gradient(value)


class Predictions(NamedTuple):
    """The outputs of a network at every prediction of a micro-batch; float32, or float64 for a float64 model."""

    logprobs: Tensor | None = None
    """The log-probs of the targets [M]; `None` for a critic."""
    entropy: Tensor | None = None
    """The entropies [M] in nats, if requested."""
    full_kl: Tensor | None = None
    """KL(policy || reference) [M] in nats, if a reference was given."""
    values: Tensor | None = None
    """The values of the states before the targets [M]: a critic's, or those of a policy's value head if requested."""
    divergence: Tensor | None = None
    """The divergences from a teacher [M] in nats, if requested."""
    top_logprobs: Tensor | None = None
    """The log-probs [M, k] of the top-k tokens or of given tokens, if requested."""
    top_ids: Tensor | None = None
    """The IDs [M, k] of the top-k tokens, if top-k log-probs were requested."""
    hidden: Tensor | None = None
    """The hidden states [n, H] that went to the next stage: the only output of a stage before the last one."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not `None`."""
        return [tensor for tensor in self if tensor is not None]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Predictions:
        """Return the predictions with `function` applied to every tensor."""
        return Predictions(*(None if tensor is None else function(tensor) for tensor in self))


class _Distributions(torch.autograd.Function):
    """Computes each target's log-prob, the entropy H, and the divergence K = KL(p || q) from a reference.

    p and q are the softmax of the policy's logits z and of the reference's logits, each divided by the temperature. If
    a, e and k are the gradients of the loss with respect to log-prob, H and K, then

        d loss / d z = (a onehot - p [a + e (log p + H) - k (log p - log q - K)]) / temperature

    The reference gets no gradient. With s = z / temperature - max(z / temperature) and t = sum exp s, log p is
    s - log t. K is computed from differences of s, so that equal distributions give exactly 0. The backward pass
    overwrites stored logits with their gradients, so it can run only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        caps: Softcaps,
        vocab_shard: VocabShard | None,
        *reference: Tensor,
    ) -> tuple[Tensor, ...]:
        chunk = max(token_logprobs.CHUNK_ELEMENTS // weight.shape[0], 1)
        size = len(hidden) * weight.shape[0] * weight.element_size() * (2 if reference else 1)
        keep = size <= token_logprobs.MAX_KEPT_BYTES and any(ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, kl = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        sums = [torch.empty_like(logprobs) for _ in range(4)]
        largest, total, other_largest, other_total = sums
        targets, is_in_shard = (
            vocab_shard.compute_local_indices(targets, len(weight)) if vocab_shard is not None else (targets, None)
        )
        stored_logits: list[Tensor] = []
        for part, chunks in iter_logit_chunks(hidden, weight, reference, chunk, caps):
            for rows, block in split_into_blocks(chunks[0], part.start, BLOCK_ELEMENTS):
                shifted = _shift_logits(block, temperature, largest[rows])
                torch.gather(shifted, 1, targets[rows, None], out=logprobs[rows, None])
                weights = shifted.exp()
                torch.sum(weights, dim=1, out=total[rows])
                if reference:
                    other = _shift_logits(select_rows(chunks[1], part, rows), temperature, other_largest[rows])
                    torch.sum(torch.sub(shifted, other).mul_(weights), dim=1, out=kl[rows])
                    torch.sum(other.exp_(), dim=1, out=other_total[rows])
                torch.sum(shifted.mul_(weights), dim=1, out=entropy[rows])
            if keep:
                stored_logits += chunks
        if vocab_shard is not None and is_in_shard is not None:
            entries = [logprobs, entropy, *([kl] if reference else [])]
            _reduce_over_vocab(vocab_shard, is_in_shard, sums if reference else sums[:2], entries)
        # With w = exp s: H = log t - sum(w s) / t, K = sum(w (s - s')) / t - log t + log t' (s', t': reference).
        log_total = total.log()
        results = [logprobs.sub_(log_total), log_total - entropy.div_(total)]
        if reference:
            results.append(kl.div_(total).sub_(log_total).add_(other_total.log()))
        ctx.save_for_backward(hidden, weight, targets, *sums, *results[1:], *reference, *stored_logits)
        ctx.chunk, ctx.temperature, ctx.caps, ctx.num_reference = chunk, temperature, caps, len(reference)
        ctx.is_in_shard = is_in_shard
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, largest, total, other_largest, other_total, entropy, *rest = ctx.saved_tensors
        kl, reference, stored_logits = (rest[0], rest[1:3], rest[3:]) if ctx.num_reference else (None, [], rest)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # The bracket of the class docstring with log p = s - log t: a constant for each row, plus terms with s and s'.
        log_total = total.log()
        constant = grads[0] + grads[1] * (entropy - log_total)
        if kl is not None:
            constant += grads[2] * (kl + log_total - other_total.log())
        factor = -1.0 / (total * ctx.temperature)
        onehot = grads[0] / ctx.temperature
        if ctx.is_in_shard is not None:
            onehot = onehot * ctx.is_in_shard
        projection = ProjectionGradient(hidden, weight, ctx.chunk, wants_hidden, wants_weight, total.dtype)
        for part, chunks in iter_logit_chunks(hidden, weight, reference, ctx.chunk, ctx.caps, stored_logits):
            slope = compute_softcap_slope(chunks[0], ctx.caps[0])
            for rows, block in split_into_blocks(
                chunks[0], part.start, BLOCK_ELEMENTS
            ):  # becomes the gradient of the logits
                shifted = compute_scaled_logits(block, ctx.temperature, total.dtype).sub_(largest[rows, None])
                bracket = torch.addcmul(constant[rows, None], shifted, grads[1][rows, None])
                if kl is not None:
                    own = select_rows(chunks[1], part, rows)
                    other = compute_scaled_logits(own, ctx.temperature, total.dtype).sub_(other_largest[rows, None])
                    bracket.addcmul_(other.sub_(shifted), grads[2][rows, None])
                gradient = shifted.exp_().mul_(bracket).mul_(factor[rows, None])
                block.copy_(gradient.scatter_add_(1, targets[rows, None], onehot[rows, None]))
            projection.add(part, chunks[0], slope)
        return *projection.get_gradients(), None, None, None, None, *[None] * ctx.num_reference


def iter_logit_chunks(
    hidden: Tensor,
    weight: Tensor,
    reference: Sequence[Tensor],
    chunk_size: int,
    softcaps: Softcaps,
    stored_logits: Iterable[Tensor] = (),
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each chunk of predictions as a slice, with the logits of the policy and, if given, of `reference`.

    If `stored_logits` is given, it must contain the logits of an earlier call, in order. They are yielded instead of
    being computed again.
    """
    again = iter(stored_logits)
    pairs = [(hidden, weight), *([tuple(reference)] if reference else [])]
    for start in range(0, len(hidden), chunk_size):
        part = slice(start, min(start + chunk_size, len(hidden)))
        found = [next(again, None) for _ in pairs]
        yield (
            part,
            [
                softcap_(h[part] @ w.t(), cap) if own is None else own
                for own, (h, w), cap in zip(found, pairs, softcaps, strict=False)
            ],
        )


def select_rows(logits: Tensor, part: slice, rows: slice) -> Tensor:
    """Return the logits of the predictions in `rows` from a chunk that covers `part`."""
    return logits[rows.start - part.start : rows.stop - part.start]


def _reduce_over_vocab(
    vocab_shard: VocabShard, is_in_shard: Tensor, sums: Sequence[Tensor], entries: Sequence[Tensor]
) -> None:
    """Replace sums over this rank's vocabulary shard by sums over the whole vocabulary, in place.

    Args:
        vocab_shard: This rank's vocabulary shard.
        is_in_shard: Whether the target is in the shard [M].
        sums: The largest logit and the sum of exponentials, of the policy and, if given, of the reference.
        entries: The target's logit and the sums for entropy and divergence, all relative to the largest logit.
    """
    largest, total, *other = sums
    logit, entropy, *kl = entries
    shift = vocab_shard.reduce_max_(largest)
    if kl:
        other_shift = vocab_shard.reduce_max_(other[0])
        kl[0].addcmul_(shift - other_shift, total).mul_(shift.exp())
        other[1].mul_(other_shift.exp())
    logit.add_(shift).mul_(is_in_shard)
    entropy.addcmul_(shift, total).mul_(shift.exp())
    # Last: the sums above are shifted with this rank's own `total`.
    total.mul_(shift.exp())
    vocab_shard.all_reduce_(total, *other[1:], *entries)


def get_softcaps(policy: Projection, reference: Projection | None) -> Softcaps:
    """Return the soft caps of the policy's projection and of the reference's projection."""
    return policy.softcap, None if reference is None else reference.softcap


def _shift_logits(logits: Tensor, temperature: float, max_logits: Tensor) -> Tensor:
    """Return logits / temperature minus their maximum, which is written to `max_logits`."""
    scaled = compute_scaled_logits(logits, temperature, max_logits.dtype)
    torch.amax(scaled, dim=1, out=max_logits)
    return scaled.sub_(max_logits[:, None])


def compute_token_statistics(
    policy: Projection,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: Projection | None = None,
) -> Predictions:
    """Compute the log-probs of the targets, and on request entropies and divergences from a reference.

    Args:
        policy: The hidden states at the predicting positions, and the projection; differentiable in both.
        targets: The tokens [M], int64.
        temperature: The temperature of the policy's and the reference's distributions, above 0.
        entropy: Whether to compute entropies.
        reference: The reference's hidden states at the same positions, and its projection. If `None`, no divergence is
            computed.
    """
    if not entropy and reference is None:
        hidden, weight, softcap, vocab_shard = policy
        plain_logprobs = compute_token_logprobs(
            hidden, weight, targets, temperature=temperature, softcap=softcap, vocab_shard=vocab_shard
        )
        return Predictions(plain_logprobs)
    caps, other = get_softcaps(policy, reference), reference[:2] if reference else ()
    found = _Distributions.apply(*policy[:2], targets, temperature, caps, policy.vocab_shard, *other)
    assert isinstance(found, tuple)
    return Predictions(found[0], found[1] if entropy else None, found[2] if reference is not None else None)
