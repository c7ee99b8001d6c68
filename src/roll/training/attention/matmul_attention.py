"""Attention as plain matmuls on batches of sequences; both implementations give the same result:

    dense      one product for a whole batch; saves its weights for the backward pass: small sequences
    blocked    tile by tile within the cache; recomputes weights in the backward pass: any length, CPU

g query heads share a key head, so one product has the rows of all of them. Blocked products skip keys after the last
query of a tile. On a core with AVX-512, both take 5 ns per query, key and head of size 64, forward and backward;
SDPA takes 11 ns (1,000 keys, 512 queries) to 30 ns (64 queries).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roll.models import AttentionParams

__all__ = ["blocked_attention", "dense_attention"]

MAX_TILE_ROWS = 128
"""Maximum number of queries of a sequence in a tile."""
MAX_TILE_WEIGHTS = 2**19
"""Maximum number of attention weights of a tile, unless one head needs more: 2 MiB of float32."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, params: AttentionParams) -> Tensor:
    """Compute attention with one matmul per batch; return [B, n, H, w].

    Queries are [B, n, H, d], keys [B, m, K, d], values [B, m, K, w], bias [B, 1, 1, n, m].
    """
    size, n, heads, width = q.shape
    groups = k.shape[2]
    queries = q.view(size, n, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(size, groups, -1, width)
    keys, values = (x.transpose(1, 2).contiguous() for x in (k, v))
    sinks = None if params.sinks is None else params.sinks.view(1, groups, -1).expand(size, groups, -1)
    result = _DenseAttention.apply(queries, keys, values, bias, params.scale, params.softcap, sinks)
    result = result.view(size, groups, heads // groups, n, -1)
    return result.permute(0, 3, 1, 2, 4).reshape(size, n, heads, -1)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, prefix_mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Compute causal attention of n queries to the last n of m keys, after the m - n keys of a prefix.

    Args:
        q: The queries [B, n, H, d].
        k: The keys [B, m, K, d], with H a multiple of K.
        v: The values [B, m, K, w].
        prefix_mask: The mask [B, m - n] of the prefix keys: 0 where a sequence's queries see a key, else -inf; float32
            or better. With `None`, the queries see all prefix keys.
        params: The scale, soft cap and sinks of the scores. `params.span` is ignored: the caller must apply it.

    Returns:
        The attention [B, n, H, w].
    """
    size, n, heads, width = q.shape
    groups = k.shape[2]
    queries = q.view(size, n, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(size * groups, -1, n, width)
    keys, values = (x.transpose(1, 2).reshape(size * groups, -1, x.shape[-1]) for x in (k, v))
    if prefix_mask is not None:
        prefix_mask = prefix_mask.repeat_interleave(groups, dim=0)[:, None, None]
    sinks = None if params.sinks is None else params.sinks.view(1, groups, -1).expand(size, groups, -1).flatten(0, 1)
    result = _BlockedAttention.apply(queries, keys, values, prefix_mask, params.scale, params.softcap, sinks)
    return result.view(size, groups, -1, n, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(size, n, heads, -1)


class _DenseAttention(torch.autograd.Function):
    """Computes softmax(scale Q K^T + bias) V; saves only the weights, in the model's dtype.

    Queries are [B, K, g n, d] (g heads share keys), keys [B, K, m, d], values [B, K, m, w], bias [B, 1, 1, n, m], sinks
    [B, K, g].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        scores = (q @ k.transpose(2, 3)).to(bias.dtype)
        by_head = scores.view(*scores.shape[:2], -1, *bias.shape[-2:])
        if softcap is not None:
            scores.mul_(scale / softcap).tanh_()
        # `by_head` is a view of `scores`: mask and scale (or soft cap) are applied in place, in one pass.
        torch.add(bias, by_head, alpha=scale if softcap is None else softcap, out=by_head)
        high, unused = _softmax(by_head, sinks)
        weights = high.to(v.dtype).view(scores.shape)
        ctx.save_for_backward(q, k, v, weights, unused)
        ctx.scale, ctx.softcap, ctx.bias = scale, softcap, bias
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, weights, unused = ctx.saved_tensors
        dtype = ctx.bias.dtype
        grad_v = weights.transpose(2, 3) @ grad
        high = weights.to(dtype)
        grad_scores = (grad @ v.transpose(2, 3)).to(dtype)
        grad_sinks = None
        if unused is not None:
            # A sink has a weight u but no value: its gradient is u (0 - sum_j w_j d w_j).
            shares = (grad_scores * high).sum(-1).view(unused.shape)
            grad_sinks = -(shares * unused).sum(-1)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, high, -1, dtype)
        if ctx.softcap is not None:
            # The forward pass overwrote the scores. The derivative of c tanh(s / c) is 1 - tanh^2(s / c).
            capped = (q @ k.transpose(2, 3)).to(dtype).mul_(ctx.scale / ctx.softcap).tanh_()
            grad_scores.mul_(capped.square_().neg_().add_(1.0))
        grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
        return grad_scores @ k, grad_scores.transpose(2, 3) @ q, grad_v, None, None, None, grad_sinks


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the softmax weights of scores [..., g, n, m], and the weights [..., g, n] of sinks [..., g]; `None`
    without sinks.
    """
    if sinks is None:
        return scores.softmax(dim=-1), None
    column = sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
    both = torch.cat([scores, column], dim=-1).softmax(dim=-1)
    # Copies: views would keep the wider tensor until the backward pass.
    return both[..., :-1].contiguous(), both[..., -1].clone()


class _Tile(NamedTuple):
    """A group of queries whose attention weights are computed together."""

    sequences: slice
    rows: slice
    """The rows of the queries."""
    num_keys: int
    """The number of keys of the last query; the other queries have fewer."""


class _BlockedAttention(torch.autograd.Function):
    """Computes `blocked_attention`, with sequences and their groups of heads as one dimension S.

    Queries are [S, g, n, d], keys [S, m, d], values [S, m, w], the prefix mask [S, 1, 1, m - n], sinks [S, g]. Saves
    only its inputs; gradients of keys and values are summed over tiles in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, prefix_mask, sinks)
        ctx.scale, ctx.softcap = scale, softcap
        result = q.new_empty(*q.shape[:3], v.shape[-1])
        for tile in _iter_tiles(q, k):
            scores = _compute_scores(tile, q, k, scale, softcap)
            weights, _ = _softmax(_mask_hidden_keys(tile, scores, prefix_mask), _select_tile_sinks(tile, sinks))
            own = weights.to(v.dtype).flatten(1, 2) @ v[tile.sequences, : tile.num_keys]
            result[tile.sequences, :, tile.rows] = own.unflatten(1, (q.shape[1], -1))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, prefix_mask, sinks = ctx.saved_tensors
        high = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=high) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=high)
        for tile in _iter_tiles(q, k):
            keys, heads = (tile.sequences, slice(tile.num_keys)), (q.shape[1], -1)
            own_q, own_grad = (x[tile.sequences, :, tile.rows].flatten(1, 2) for x in (q, grad))
            raw = _compute_scores(tile, q, k, ctx.scale, ctx.softcap)
            # Before the mask, which changes `raw` in place.
            slope = None if ctx.softcap is None else (raw / ctx.softcap).square_().neg_().add_(1.0)
            weights, unused = _softmax(_mask_hidden_keys(tile, raw, prefix_mask), _select_tile_sinks(tile, sinks))
            grad_v[keys] += weights.to(v.dtype).flatten(1, 2).transpose(1, 2) @ own_grad
            scores = (own_grad @ v[keys].transpose(1, 2)).to(high).unflatten(1, heads)
            if grad_sinks is not None and unused is not None:
                grad_sinks[tile.sequences] -= ((scores * weights).sum(-1) * unused).sum(-1)
            scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, high)
            if slope is not None:
                scores.mul_(slope)
            scores = scores.mul_(ctx.scale).to(q.dtype).flatten(1, 2)
            grad_q[tile.sequences, :, tile.rows] = (scores @ k[keys]).unflatten(1, heads)
            grad_k[keys] += scores.transpose(1, 2) @ own_q
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, grad_sinks


def _iter_tiles(q: Tensor, k: Tensor) -> Iterator[_Tile]:
    """Yield tiles of queries [S, g, n, d], as large as `MAX_TILE_ROWS` and `MAX_TILE_WEIGHTS` allow for keys [S, m,
    d].
    """
    sequences, heads, n = q.shape[:3]
    for start in range(0, n, MAX_TILE_ROWS):
        stop = min(start + MAX_TILE_ROWS, n)
        num_keys = k.shape[1] - n + stop
        step = max(MAX_TILE_WEIGHTS // (heads * (stop - start) * num_keys), 1)
        for first in range(0, sequences, step):
            yield _Tile(slice(first, first + step), slice(start, stop), num_keys)


def _compute_scores(tile: _Tile, q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the scores [s, g, r, keys] of a tile in float32 or better."""
    queries = q[tile.sequences, :, tile.rows]
    products = queries.flatten(1, 2) @ k[tile.sequences, : tile.num_keys].transpose(1, 2)
    scores = products.to(torch.promote_types(q.dtype, torch.float32)).unflatten(1, queries.shape[1:3])
    return scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)


def _mask_hidden_keys(tile: _Tile, scores: Tensor, prefix_mask: Tensor | None) -> Tensor:
    """Set scores to -inf, in place, for later keys and for prefix keys that the mask `prefix_mask` hides."""
    if prefix_mask is not None:
        scores[..., : prefix_mask.shape[-1]] += prefix_mask[tile.sequences]
    rows = scores.shape[2]
    later = torch.full((rows, rows), float("-inf"), dtype=scores.dtype).triu_(1)
    scores[..., -rows:] += later
    return scores


def _select_tile_sinks(tile: _Tile, sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks[tile.sequences]
