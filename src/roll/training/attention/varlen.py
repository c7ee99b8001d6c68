"""Packed attention on CUDA: one call to `torch.nn.attention.varlen` for a whole micro-batch.

Every segment (a prompt, an answer, a plain sequence) is a query sequence. The keys of its ancestors and its own keys
are gathered. FlashAttention aligns the causal mask to the end of the keys, which is correct for a segment.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.models.transfers import to_tensor
from roll.training.packing.layout import PackedLayout

__all__ = [
    "MAX_HEAD_DIM",
    "VarlenPlan",
    "build_varlen_indices",
    "build_varlen_plan",
    "is_varlen_supported",
    "varlen_attention",
]

MAX_HEAD_DIM = 256
"""Maximum head dimension that FlashAttention's kernels support."""

HEAD_DIM_MULTIPLE = 8
"""FlashAttention's kernels reject head sizes that are not multiples of this; SDPA would pad them."""


def is_varlen_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `varlen_attn` runs here: CUDA (or ROCm) in half precision, compute capability 8.0 or newer."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def build_varlen_indices(layout: PackedLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of queries and of keys of each segment [S], and the row entries of all keys, concatenated."""
    queries: list[int] = []
    keys: list[int] = []
    index: list[np.ndarray] = []
    for block in layout.blocks:
        for segment, context in zip(block.segments, block.list_contexts(), strict=True):
            queries.append(segment.length)
            keys.append(len(context) + segment.length)
            index += [context, segment.start + np.arange(segment.length)]
    return np.array(queries), np.array(keys), np.concatenate(index)


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Cumulative lengths and key indices of one micro-batch."""

    query_starts: Tensor
    """The first query of each segment, and the number of queries [S + 1], int32."""
    key_starts: Tensor
    """The first key of each segment, and the number of keys [S + 1], int32."""
    key_index: Tensor | None
    """The row entries of all keys. `None` if no segment shares keys: the keys are then the row itself."""
    longest_query: int
    longest_key: int


def build_varlen_plan(layout: PackedLayout) -> VarlenPlan:
    """Return the plan of a packed row, with its tensors on the CPU."""
    queries, keys, index = build_varlen_indices(layout)
    shared = any(len(block.segments) > 1 for block in layout.blocks)
    return VarlenPlan(
        query_starts=to_tensor(np.cumsum((0, *queries)), torch.int32),
        key_starts=to_tensor(np.cumsum((0, *keys)), torch.int32),
        key_index=to_tensor(index) if shared else None,
        longest_query=int(queries.max()),
        longest_key=int(keys.max()),
    )


class _RepeatRows(torch.autograd.Function):
    """Gathers rows of [N, K, d] by an index with repetitions; the gradients of repeated rows are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        # A prefix has a gradient from each of its branches: in bfloat16 their sum would lose precision.
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, window: int | None) -> Tensor:
    """Compute attention of queries [N, H, d], keys [N, K, d] and values [N, K, w] of a packed row; return [N, H, w].

    w must be at most d, and d at most `MAX_HEAD_DIM`.
    """
    from torch.nn.attention.varlen import varlen_attn

    if plan.key_index is not None:
        # `varlen_attn` takes the keys of a sequence as adjacent rows, so those of a shared prefix are repeated.
        k, v = _RepeatRows.apply(k, plan.key_index), _RepeatRows.apply(v, plan.key_index)
    width, size = v.shape[-1], -(-q.shape[-1] // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    q, k, v = (_pad_heads(x, size) for x in (q, k, v))  # its kernels support one head size, and zeros add nothing
    more: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] and _needs_enable_gqa() else {}
    result = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        plan.query_starts,
        plan.key_starts,
        plan.longest_query,
        plan.longest_key,
        scale=scale,
        # FlashAttention counts the keys before a query, without the query itself.
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    assert isinstance(result, Tensor)
    return result[..., :width]


def _pad_heads(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


@cache
def _needs_enable_gqa() -> bool:
    """Return whether `varlen_attn` needs `enable_gqa` for heads that share keys; before torch 2.12, sharing was always
    enabled.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
