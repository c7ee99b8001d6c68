"""Attention over a packed row: a segment attends only to its ancestors and itself.

HF models call `packed_attention` instead of their own attention (it is registered as `roll_packed`) with the
`AttentionPlan` of the micro-batch, built once for all layers. A plan is a list of independent calls, chosen by cost:

    dense    small blocks, batched: plain matmuls with a mask
    causal   longer plain sequences and roots of trees, batched by similar length
    shared   branches of all trees, batched by similar length, each after its ancestors' keys

Causal and longer shared calls are blocked products on a CPU (see `matmul_attention`), and SDPA elsewhere. Padding
exists only inside a call and is never attended to: it follows its sequence, and attention is causal.

Plain attention in half precision needs no such calls: `torch.nn.attention.varlen` on CUDA, and
`native.attend` on a CPU, compute the whole row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll.errors import ModelError, UnsupportedError
from roll.models import AttentionParams, compute_position_scale, read_attention_params, read_mask_span
from roll.training.attention.calls import Call, compute_call
from roll.training.attention.native import attend
from roll.training.attention.plan import AttentionPlan
from roll.training.attention.varlen import MAX_HEAD_DIM, varlen_attention

__all__ = ["ATTENTION_NAME", "packed_attention", "register_attention"]

ATTENTION_NAME = "roll_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    roll_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that HF models call.

    Args:
        module: The layer's attention module.
        query: The queries [1, H, N, d].
        key: The keys [1, K, N, d], with H a multiple of K.
        value: The values [1, K, N, w].
        attention_mask: The result of `read_mask_span`; the plan contains the mask of the packed row.
        scaling: The scale of the scores; by default 1 / sqrt(d).
        roll_plan: The plan of the micro-batch; the trainer passes it through the model.
        sliding_window: The window of this layer, in tokens.
        kwargs: See `read_attention_params`.

    Returns:
        The attention [1, N, H, w], and `None` for the attention weights.

    Raises:
        ModelError: The model's attention needs a feature that packing does not support.
        UnsupportedError: The observer does not support this attention.
    """
    if roll_plan is None:
        raise ModelError(f"attention '{ATTENTION_NAME}' is only for training: to generate, load the model without it")
    observer = roll_plan.advance_observer()
    params = read_attention_params(module, query.shape[-1], attention_mask, scaling, sliding_window, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    share = roll_plan.share
    if share.cp is not None:
        if params.sinks is not None or getattr(module, "attn_temperature_tuning", False):
            raise ModelError(
                f"{type(module).__name__} has attention sinks or scales queries by position in the row, so context "
                "parallelism cannot split its rows: set training.parallel.cp to 1"
            )
        # Ulysses (arXiv 2309.14509): each rank exchanges its tokens of all heads for all tokens of some heads.
        q, k, v = (share.all_to_all_heads(x) for x in (q, k, v))
    position_scale = compute_position_scale(module, roll_plan.positions, q.dtype)
    if position_scale is not None:
        q = (q * position_scale[:, None, None]).to(q.dtype)
    span = params.span.limit_to(roll_plan.longest)
    if observer is not None:
        if not params.is_plain or span.chunk is not None or roll_plan.images is not None:
            raise UnsupportedError(
                "attention credit supports plain causal softmax attention only, but this model has sinks, soft caps, "
                "chunks or bidirectional images: choose an algorithm.credit.type other than local, global or coupled"
            )
        observer.observe(q, k, params.scale, span.window)
    result = _attend_by_plan(roll_plan, q, k, v, params)
    return (result if share.cp is None else share.all_to_all_tokens(result))[None], None


def _attend_by_plan(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Compute the attention [N, H, d] of the whole row with the fastest kernel that supports it."""
    span = params.span.limit_to(plan.longest)
    if plan.varlen is not None and params.is_plain and span.chunk is None and q.shape[-1] <= MAX_HEAD_DIM:
        return varlen_attention(q, k, v, plan.varlen, params.scale, span.window)
    if plan.tree_ranges is not None and plan.is_native_supported(params):
        return attend(q, k, v, plan.tree_ranges, params.scale)
    calls = plan.get_calls(params)
    parts = [compute_call(call, q, k, v, params) for call in calls]
    if len(calls) == 1 and len(calls[0].rows.members) == len(q):
        return parts[0].index_select(0, calls[0].rows.inverse)
    return _assemble(parts, calls, len(q))


def _assemble(parts: list[Tensor], calls: list[Call], length: int) -> Tensor:
    """Assemble the results [B * n, H, d] of the calls into one row [N, H, d]."""
    source = torch.cat([part.index_select(0, c.rows.inverse) for part, c in zip(parts, calls, strict=True)])
    order = torch.empty(length, dtype=torch.int64, device=source.device)
    order[torch.cat([call.rows.members for call in calls])] = torch.arange(length, device=source.device)
    return source.index_select(0, order)


def register_attention() -> str:
    """Register `roll_packed` with transformers and return its name. May be called repeatedly."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, read_mask_span)
    return ATTENTION_NAME
