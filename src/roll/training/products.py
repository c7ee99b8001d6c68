"""Attention by plain matrix products on batches of sequences, in two ways that give the same:

    dense      one product for a whole batch; keeps its weights for the backward pass: small sequences
    blocked    tile by tile, none of which leaves the cache; computes weights again: any length, CPU

Queries of g heads share keys, so a product has the rows of all of them. Blocked skips keys that come after all queries
of a tile. On a core with AVX-512 either takes 5 ns for a query, a key and a head of 64 numbers, forward and backward,
where SDPA takes 11 (1,000 keys, 512 queries) to 30 (64 queries).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["blocked_products", "dense_products"]

TILE_ROWS = 128
"""Most queries of a sequence in a tile."""
TILE_WEIGHTS = 2**19
"""Most weights of a tile, where one head's fit: 2 MiB of float32."""


def dense_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Queries [B, n, H, d], keys and values [B, m, K, d], bias [B, 1, 1, n, m]; returns [B, n, H, d]."""
    size, n, heads, width = q.shape
    groups = k.shape[2]
    queries = q.view(size, n, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(size, groups, -1, width)
    keys, values = (x.transpose(1, 2).contiguous() for x in (k, v))
    result = _DenseProducts.apply(queries, keys, values, bias, scale)
    result = result.view(size, groups, heads // groups, n, width)
    return result.permute(0, 3, 1, 2, 4).reshape(size, n, heads, width)


def blocked_products(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, scale: float) -> Tensor:
    """Causal attention of n queries to the last n of m keys, behind m - n others.

    Args:
        q: [B, n, H, d].
        k: [B, m, K, d] with H a multiple of K; `v` likewise.
        before: [B, m - n] 0 where a sequence's queries see one of the others, else -inf; float32 or better. None: all.
        scale: of the scores.

    Returns:
        [B, n, H, d].
    """
    size, n, heads, width = q.shape
    groups = k.shape[2]
    queries = q.view(size, n, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(size * groups, -1, n, width)
    keys, values = (x.transpose(1, 2).reshape(size * groups, -1, width) for x in (k, v))
    if before is not None:
        before = before.repeat_interleave(groups, dim=0)[:, None, None]
    result = _BlockedProducts.apply(queries, keys, values, before, scale)
    return result.view(size, groups, -1, n, width).permute(0, 3, 1, 2, 4).reshape(size, n, heads, width)


class _DenseProducts(torch.autograd.Function):
    """softmax(scale Q K^T + bias) V; keeps only the weights, in the model's dtype.

    Queries [B, K, g n, d] (g heads share keys), keys and values [B, K, m, d], bias [B, 1, 1, n, m].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        scores = (q @ k.transpose(2, 3)).to(bias.dtype)
        by_head = scores.view(*scores.shape[:2], -1, *bias.shape[-2:])
        torch.add(bias, by_head, alpha=scale, out=by_head)
        weights = scores.softmax(dim=-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.high = scale, bias.dtype
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        q, k, v, weights = ctx.saved_tensors
        grad_v = weights.transpose(2, 3) @ grad
        high = weights.to(ctx.high)
        grad_scores = (grad @ v.transpose(2, 3)).to(ctx.high)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, high, -1, ctx.high)
        grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
        return grad_scores @ k, grad_scores.transpose(2, 3) @ q, grad_v, None, None


class _Tile(NamedTuple):
    """Queries whose weights are computed together."""

    sequences: slice
    rows: slice
    """Of queries."""
    num_keys: int
    """That the last of them sees; the others see fewer."""


class _BlockedProducts(torch.autograd.Function):
    """As `blocked_products`, with sequences and their groups of heads as one dimension S.

    Queries [S, g, n, d], keys and values [S, m, d], before [S, 1, 1, m - n]. Keeps nothing but these; gradients of keys
    and values are added up over tiles in float32 or better.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, before)
        ctx.scale = scale
        result = torch.empty_like(q)
        for tile in _tiles(q, k):
            weights = _weights(tile, q, k, before, scale).to(v.dtype).flatten(1, 2)
            own = weights @ v[tile.sequences, : tile.num_keys]
            result[tile.sequences, :, tile.rows] = own.unflatten(1, (q.shape[1], -1))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        q, k, v, before = ctx.saved_tensors
        high = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=high) for x in (k, v))
        for tile in _tiles(q, k):
            keys, heads = (tile.sequences, slice(tile.num_keys)), (q.shape[1], -1)
            own_q, own_grad = (x[tile.sequences, :, tile.rows].flatten(1, 2) for x in (q, grad))
            weights = _weights(tile, q, k, before, ctx.scale)
            grad_v[keys] += weights.to(v.dtype).flatten(1, 2).transpose(1, 2) @ own_grad
            scores = (own_grad @ v[keys].transpose(1, 2)).to(high).unflatten(1, heads)
            scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, high)
            scores = scores.mul_(ctx.scale).to(q.dtype).flatten(1, 2)
            grad_q[tile.sequences, :, tile.rows] = (scores @ k[keys]).unflatten(1, heads)
            grad_k[keys] += scores.transpose(1, 2) @ own_q
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _tiles(q: Tensor, k: Tensor) -> Iterator[_Tile]:
    """Of queries [S, g, n, d] and keys [S, m, d], each as large as may be."""
    sequences, heads, n = q.shape[:3]
    for start in range(0, n, TILE_ROWS):
        stop = min(start + TILE_ROWS, n)
        num_keys = k.shape[1] - n + stop
        step = max(TILE_WEIGHTS // (heads * (stop - start) * num_keys), 1)
        for first in range(0, sequences, step):
            yield _Tile(slice(first, first + step), slice(start, stop), num_keys)


def _weights(tile: _Tile, q: Tensor, k: Tensor, before: Tensor | None, scale: float) -> Tensor:
    """[s, g, r, keys] in float32 or better."""
    own = q[tile.sequences, :, tile.rows]
    products = own.flatten(1, 2) @ k[tile.sequences, : tile.num_keys].transpose(1, 2)
    scores = products.to(torch.promote_types(q.dtype, torch.float32)).unflatten(1, own.shape[1:3]).mul_(scale)
    if before is not None:
        scores[..., : before.shape[-1]] += before[tile.sequences]
    rows = own.shape[2]
    later = torch.full((rows, rows), float("-inf"), dtype=scores.dtype).triu_(1)
    scores[..., -rows:] += later
    return scores.softmax(dim=-1)
