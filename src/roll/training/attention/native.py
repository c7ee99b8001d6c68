"""Attention of a packed row by `attention.c`: every segment attends to its ancestors and itself, without copies.

    queries, keys, values [N, h, d] ─► trees x heads of keys, one after the other, on all threads ─► [N, H, w]

Nothing is gathered into batches, padded or masked in memory. It supports bfloat16 models on the CPU with plain
attention; all other attention (windows, caps, sinks, other dtypes) uses `matmul_attention`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roll.training.kernels.native import native
from roll.training.packing.layout import PackedLayout, Tree

__all__ = ["Rotation", "TreeRanges", "attend", "build_tree_ranges", "native_attention_supported", "rotate"]


class TreeRanges(NamedTuple):
    """The positions of a row's trees in the form that `attention.c` reads; int64."""

    trees: Tensor
    """First token, number of tokens, first segment, number of segments of each tree [T, 4]; the largest tree first."""
    segments: Tensor
    """First token in its tree, length, first range, number of ranges of each segment [S, 4]."""
    ranges: Tensor
    """First token in its tree and length of each range of ancestors' tokens [R, 2]."""


class Rotation(NamedTuple):
    """Cosines and sines that rotate the first r numbers of queries and keys by position; bfloat16 [N, r] each."""

    cosine: Tensor
    sine: Tensor


def native_attention_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend` runs on this device and dtype, and is faster there than `products`."""
    return device.type == "cpu" and dtype == torch.bfloat16 and native() is not None and _kind() > 0


def build_tree_ranges(layout: PackedLayout) -> TreeRanges:
    """Return the positions of a row's trees, segments and ancestor ranges. Adjacent ancestors form one range."""
    trees, segments, ranges = [], [], []
    for tree in sorted(layout.blocks, key=lambda tree: (-_pairs(tree), tree.start)):
        trees.append((tree.start, tree.num_tokens, len(segments), len(tree.segments)))
        known: list[list[tuple[int, int]]] = []
        for s in tree.segments:
            first = s.start - tree.start
            behind = known[s.parent] if s.parent >= 0 else []
            segments.append((first, s.length, len(ranges), len(behind)))
            ranges += behind
            if behind and sum(behind[-1]) == first:
                known.append([*behind[:-1], (behind[-1][0], behind[-1][1] + s.length)])
            else:
                known.append([*behind, (first, s.length)])
    parts = ((trees, 4), (segments, 4), (ranges, 2))
    return TreeRanges(*(torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, wide)) for rows, wide in parts))


def _pairs(tree: Tree) -> int:
    return sum(s.length * (s.position + s.length) for s in tree.segments)


def attend(
    q: Tensor, k: Tensor, v: Tensor, places: TreeRanges, scale: float, rotation: Rotation | None = None
) -> Tensor:
    """Compute attention of queries [N, H, d], keys [N, K, d] and values [N, K, w]; return [N, H, w].

    With `rotation`, queries and keys are given before their rotation.
    """
    result = _Attention.apply(q, k, v, places, scale, rotation)
    assert isinstance(result, Tensor)
    return result


@torch.no_grad()
def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys [N, h, d] as `attend` does, without a gradient."""
    width = rotation.cosine.shape[1]
    turning, rest = x.float().split([width, x.shape[2] - width], dim=2)
    first, second = turning.chunk(2, dim=2)
    across = torch.cat([-second, first], dim=2)
    found = turning * rotation.cosine[:, None].float() + across * rotation.sine[:, None].float()
    return torch.cat([found, rest], dim=2).to(x.dtype)


@cache
def _kind() -> int:
    """Return the bfloat16 instructions of this machine: 0 none, 1 AVX-512 vectors, 2 AMX tiles."""
    library = native()
    assert library is not None
    return library.query("attention_kind")


class _Attention(torch.autograd.Function):
    """Computes softmax(scale Q K^T) V; saves its inputs, its result, and one number per query and head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: TreeRanges, scale: float, rotation: Rotation | None
    ) -> Tensor:
        library = native()
        assert library is not None
        q, k, v = (x.contiguous() for x in (q, k, v))
        result = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        turned = 0 if rotation is None else rotation.cosine.shape[1]
        numbers = (len(places.trees), q.shape[1], k.shape[1], q.shape[2], v.shape[2], turned, _kind())
        ctx.given = (*places, torch.tensor(numbers), scale)
        ctx.rotation = () if rotation is None else tuple(x.contiguous() for x in rotation)
        ctx.library = library
        library.call("attention_forward", *_inputs(ctx, q, k, v), result, lse)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, lse = ctx.saved_tensors
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        ctx.library.call("attention_backward", *_inputs(ctx, q, k, v), result, lse, grads[0].contiguous(), *found)
        return *found, None, None, None


def _inputs(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | float | None, ...]:
    return (q, k, v, *(ctx.rotation or (None, None)), *ctx.given)
