"""Attention over a packed row with the CPU kernel `attention.c`: every segment attends to its ancestors and itself,
without copies.

    queries, keys, values [N, h, d] ─► one task per tree and key head, on all threads ─► [N, H, w]

The kernel needs no gathers, masks or copies, which would take 30 % of a training step. It supports bfloat16 models on
the CPU with plain attention; all other attention (windows, caps, sinks, other dtypes) uses `matmul_attention`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roll.training.kernels.native import load_native_library
from roll.training.packing.layout import PackedLayout, Tree

__all__ = ["Rotation", "TreeRanges", "attend", "build_tree_ranges", "is_native_attention_supported", "rotate"]


class TreeRanges(NamedTuple):
    """The token ranges of a row's trees, in the format that `attention.c` reads; int64."""

    trees: Tensor
    """First token, number of tokens, first segment, number of segments of each tree [T, 4]; the largest tree first."""
    segments: Tensor
    """First token (relative to its tree), length, first range, number of ranges of each segment [S, 4]."""
    ranges: Tensor
    """First token (relative to its tree) and length of each range of ancestor tokens [R, 2]."""


class Rotation(NamedTuple):
    """The RoPE cosines and sines for the first r dimensions of queries and keys; bfloat16 [N, r] each."""

    cosine: Tensor
    sine: Tensor


def is_native_attention_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend` supports this device and dtype, and is faster than `matmul_attention`."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and load_native_library() is not None
        and _detect_bfloat16_instructions() > 0
    )


def build_tree_ranges(layout: PackedLayout) -> TreeRanges:
    """Return the token ranges of a row's trees, segments and ancestors. Adjacent ancestors form one range."""
    trees, segments, ranges = [], [], []
    # Threads take trees dynamically: with the largest first, all of them finish at about the same time.
    for tree in sorted(layout.blocks, key=lambda tree: (-_count_pairs(tree), tree.start)):
        trees.append((tree.start, tree.num_tokens, len(segments), len(tree.segments)))
        known: list[list[tuple[int, int]]] = []
        for s in tree.segments:
            first = s.start - tree.start
            ancestors = known[s.parent] if s.parent >= 0 else []
            segments.append((first, s.length, len(ranges), len(ancestors)))
            ranges += ancestors
            if ancestors and sum(ancestors[-1]) == first:
                known.append([*ancestors[:-1], (ancestors[-1][0], ancestors[-1][1] + s.length)])
            else:
                known.append([*ancestors, (first, s.length)])
    parts = ((trees, 4), (segments, 4), (ranges, 2))
    return TreeRanges(*(torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, wide)) for rows, wide in parts))


def _count_pairs(tree: Tree) -> int:
    return sum(s.length * (s.position + s.length) for s in tree.segments)


def attend(
    q: Tensor, k: Tensor, v: Tensor, ranges: TreeRanges, scale: float, rotation: Rotation | None = None
) -> Tensor:
    """Compute attention of queries [N, H, d], keys [N, K, d] and values [N, K, w]; return [N, H, w].

    If `rotation` is given, RoPE is first applied to queries and keys.
    """
    result = _Attention.apply(q, k, v, ranges, scale, rotation)
    assert isinstance(result, Tensor)
    return result


@torch.no_grad()
def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply RoPE to queries or keys [N, h, d] as `attend` does, without a gradient."""
    width = rotation.cosine.shape[1]
    rotated, rest = x.float().split([width, x.shape[2] - width], dim=2)
    first, second = rotated.chunk(2, dim=2)
    half = torch.cat([-second, first], dim=2)  # `rotate_half` of `transformers`
    result = rotated * rotation.cosine[:, None].float() + half * rotation.sine[:, None].float()
    return torch.cat([result, rest], dim=2).to(x.dtype)


@cache
def _detect_bfloat16_instructions() -> int:
    """Return the bfloat16 instructions of this machine: 0 for none, 1 for AVX-512 vectors, 2 for AMX tiles.

    The kernel is twice as fast as `matmul_attention` with AVX-512, and three times as fast with AMX.
    """
    library = load_native_library()
    assert library is not None
    return library.query("attention_kind")


class _Attention(torch.autograd.Function):
    """Computes softmax(scale Q K^T) V; saves its inputs, its result, and the log-sum-exp of each query and head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: TreeRanges, scale: float, rotation: Rotation | None
    ) -> Tensor:
        library = load_native_library()
        assert library is not None
        q, k, v = (x.contiguous() for x in (q, k, v))
        result = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        turned = 0 if rotation is None else rotation.cosine.shape[1]
        numbers = (
            len(ranges.trees),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            v.shape[2],
            turned,
            _detect_bfloat16_instructions(),
        )
        ctx.given = (*ranges, torch.tensor(numbers), scale)
        ctx.rotation = () if rotation is None else tuple(x.contiguous() for x in rotation)
        ctx.library = library
        library.call("attention_forward", *_get_saved_inputs(ctx, q, k, v), result, lse)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, lse = ctx.saved_tensors
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        ctx.library.call(
            "attention_backward", *_get_saved_inputs(ctx, q, k, v), result, lse, grads[0].contiguous(), *found
        )
        return *found, None, None, None


def _get_saved_inputs(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | float | None, ...]:
    return (q, k, v, *(ctx.rotation or (None, None)), *ctx.given)
