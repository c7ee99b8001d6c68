"""Attention calls of a micro-batch: rows, masks and computation.

    queries, keys, values [N, h, d] ─ gather ─► [B, n, h, d] ─ matmuls, or SDPA ─► [B * n, H, d]

A gather stores its inverse, so the backward pass copies gradients and sums them only for tokens that several segments
use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.models import AttentionParams
from roll.training.attention.matmul_attention import blocked_attention, dense_attention

__all__ = ["Call", "CausalCall", "DenseCall", "Prefixes", "RowIndex", "TreeCall", "compute_call"]


@dataclass(frozen=True, slots=True)
class RowIndex:
    """An index that gathers entries of the packed row into a padded batch [B, n], and its inverse."""

    index: Tensor
    """The entry of the row at each position of the flattened batch [B * n]; padding repeats an entry."""
    members: Tensor
    """The entries of the row that the batch contains [k], ascending."""
    inverse: Tensor
    """The position of each member in the flattened batch [k]."""
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of a batch of segments; each segment attends to the keys of its prefix."""

    rows: RowIndex
    """The entries of the prefixes, size [b, p]."""
    owners: Tensor
    """The index of each segment's prefix [B]."""
    overlap: bool
    """True if an entry of the row may be in several prefixes, or both in a prefix and in a segment."""


@dataclass(frozen=True, slots=True)
class DenseCall:
    """Attention of small blocks, computed as matmuls with a mask."""

    rows: RowIndex
    bias: Tensor
    """The mask [B, 1, 1, n, n]: 0 where a query may see a key, else -inf; float32 or better."""


@dataclass(frozen=True, slots=True)
class CausalCall:
    """Causal attention of sequences without a shared prefix."""

    rows: RowIndex
    blocked: bool
    """True to use blocked products, False to use SDPA."""


@dataclass(frozen=True, slots=True)
class TreeCall:
    """Attention of each segment of a batch to its own keys and to the keys of its ancestors, in any tree."""

    rows: RowIndex
    """The entries of the segments, size [B, n]."""
    prefixes: Prefixes
    kernel: Literal["dense", "blocked", "sdpa"]
    """The kernel: SDPA, or a kernel of `matmul_attention`."""
    bias: Tensor
    """The mask [B, 1, 1, n, p + n]: 0 where a query may see a key, else -inf; float32 or better. [B, p] for blocked
    products, which are always causal."""


Call = DenseCall | CausalCall | TreeCall


def compute_call(call: Call, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Compute the attention of one call from the row's queries [N, H, d], keys [N, K, d] and values [N, K, w].

    Returns:
        The attention [B * n, H, w] of the call's padded batch.
    """
    queries = _Gather.apply(q, call.rows)
    if isinstance(call, TreeCall):
        keys, values = (_GatherWithPrefix.apply(x, call.rows, call.prefixes) for x in (k, v))
    else:
        keys, values = (_Gather.apply(x, call.rows) for x in (k, v))
    if isinstance(call, DenseCall):
        result = dense_attention(queries, keys, values, call.bias, params)
    elif isinstance(call, CausalCall):
        causal = blocked_attention if call.blocked else _run_sdpa
        result = causal(queries, keys, values, None, params)
    elif call.kernel == "sdpa":
        # SDPA takes a mask [B, 1, n, m] in the dtype of the queries.
        result = _run_sdpa(queries, keys, values, call.bias[:, 0].to(q.dtype), params)
    else:
        products = dense_attention if call.kernel == "dense" else blocked_attention
        result = products(queries, keys, values, call.bias, params)
    return result.flatten(0, 1)


class _Gather(torch.autograd.Function):
    """Gathers rows of [N, h, d] as [B, n, h, d]. The backward pass only copies gradients, so it does not round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowIndex) -> Tensor:
        ctx.rows, ctx.shape = rows, x.shape
        return x.index_select(0, rows.index).view(*rows.size, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return _scatter_gradients(ctx.shape, ((ctx.rows, grad),)), None


class _GatherWithPrefix(torch.autograd.Function):
    """Gathers rows of [N, h, d] as [B, p + n, h, d]: each segment's rows follow the rows of its prefix.

    The backward pass sums the gradients of a common prefix over its segments, in float32 or better, in the order of
    segments.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowIndex, prefixes: Prefixes) -> Tensor:
        ctx.rows, ctx.prefixes, ctx.shape = rows, prefixes, x.shape
        before = x.index_select(0, prefixes.rows.index).view(*prefixes.rows.size, *x.shape[1:])
        own = x.index_select(0, rows.index).view(*rows.size, *x.shape[1:])
        return torch.cat([before.index_select(0, prefixes.owners), own], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        prefixes: Prefixes = ctx.prefixes
        num, length = prefixes.rows.size
        high = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros((num, length, *grad.shape[2:]), dtype=high)
        sums.index_add_(0, prefixes.owners, grad[:, :length].to(high))
        # Entries that several prefixes contain need a sum. Without overlap every entry occurs once, so it is copied.
        if prefixes.overlap:
            total = grad.new_zeros(ctx.shape, dtype=high)
            for rows, part in ((prefixes.rows, sums), (ctx.rows, grad[:, length:].to(high))):
                total.index_add_(0, rows.members, part.reshape(-1, *part.shape[2:]).index_select(0, rows.inverse))
            return total.to(grad.dtype), None, None
        return (
            _scatter_gradients(ctx.shape, ((prefixes.rows, sums.to(grad.dtype)), (ctx.rows, grad[:, length:]))),
            None,
            None,
        )


def _scatter_gradients(shape: torch.Size, parts: tuple[tuple[RowIndex, Tensor], ...]) -> Tensor:
    """Return the gradient of all rows from the gradients [B, n, h, d] of disjoint gathered rows; other rows get 0."""
    flat = [grad.reshape(-1, *grad.shape[2:]).index_select(0, rows.inverse) for rows, grad in parts]
    if len(parts) == 1 and len(flat[0]) == shape[0]:
        return flat[0]  # the members are all entries, in order
    result = flat[0].new_zeros(shape)
    for (rows, _), own in zip(parts, flat, strict=True):
        result[rows.members] = own
    return result


def _run_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, params: AttentionParams) -> Tensor:
    """Run SDPA on queries [B, n, H, d], keys and values [B, m, K, d] with `bias` [B, 1, n, m]; causal if bias is
    `None`.
    """
    # Grouped-query attention: SDPA expects as many key heads as query heads.
    repeats = q.shape[2] // k.shape[2]
    k, v = ((x.repeat_interleave(repeats, dim=2) if repeats > 1 else x).transpose(1, 2) for x in (k, v))
    result = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=bias, is_causal=bias is None, scale=params.scale
    )
    return result.transpose(1, 2)
