"""Attention over a packed row: a response sees its prefix and itself, nothing else.

HF models call `packed_attention` in place of their own (it is registered as `roll_packed`), and hand it the
`AttentionPlan` of the micro-batch, built once for all layers. A plan is a list of independent calls, chosen
by cost:

    dense    small blocks, batched: plain matrix products under a mask, by far the cheapest for them
    causal   plain sequences and prefixes, batched by similar length: SDPA
    shared   the responses of one block, batched by similar length, behind their prefix's keys: SDPA
    varlen   everything at once on CUDA in half precision: `torch.nn.attention.varlen`

Padding exists only inside a call and is never attended to: it follows its sequence, and attention is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from roll.errors import ModelError
from roll.training.layout import PackedLayout, Segments
from roll.training.varlen import VarlenPlan, varlen_attention, varlen_supported

__all__ = ["ATTENTION", "AttentionPlan", "Observer", "packed_attention", "register_attention"]

ATTENTION = "roll_packed"

DENSE_TOKENS = 224
"""Longest block for dense products. Measured on two AVX-512 cores with 9 heads of 64: at 110 tokens 0.9 ms
against 2.8 ms for SDPA, forward and backward; at 300 tokens 6.9 ms against 5.1 ms."""

Observer: TypeAlias = Callable[[Tensor, Tensor, float, int | None], None]
"""Called by every layer in turn with queries [N, H, d], keys [N, K, d], scale of the scores, sliding window."""

LENGTH_RATIO = 0.75
"""Sequences are batched with others at least this share of the longest."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """[B, n] entries of the row, batched with padding, and the way back."""

    index: Tensor
    """[B * n] entry of the row; padding repeats an entry."""
    members: Tensor
    """[k] the entries of the row that occur, each once."""
    inverse: Tensor
    """[k] where each of them is among the B * n."""
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Dense:
    rows: _Rows
    bias: Tensor
    """[B, 1, 1, n, n] 0 where a query may see a key, else -inf; float32 or better."""


@dataclass(frozen=True, slots=True)
class _Causal:
    rows: _Rows


@dataclass(frozen=True, slots=True)
class _Shared:
    rows: _Rows
    prefix: slice


_Call = _Dense | _Causal | _Shared


class _Gather(torch.autograd.Function):
    """Rows of [N, h, d] as [B, n, h, d]. Backward copies gradients back: no sums, so it is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, x.shape
        return x.index_select(0, rows.index).view(*rows.size, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        rows = ctx.rows
        flat = grad.reshape(-1, *grad.shape[2:])
        if len(rows.members) == ctx.shape[0]:
            return flat.index_select(0, rows.inverse), None
        result = grad.new_zeros(ctx.shape)
        result[rows.members] = flat.index_select(0, rows.inverse)
        return result, None


class AttentionPlan:
    """How the attention of one micro-batch is computed. Built once, used by every layer.

    Args:
        layout: the packed row.
        device: where the network runs.
        dtype: of queries, keys and values.
        observer: is shown every layer's queries and keys.
    """

    def __init__(
        self, layout: PackedLayout, device: torch.device, dtype: torch.dtype, observer: Observer | None = None
    ) -> None:
        self.observer = observer
        self.longest = int(layout.position_ids.max()) + 1
        self.varlen = VarlenPlan(layout, device) if varlen_supported(device, dtype) else None
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._calls: dict[int | None, list[_Call]] = {}

    def calls(self, window: int | None) -> list[_Call]:
        """The calls under a sliding window (`None`: unlimited)."""
        if window not in self._calls:
            self._calls[window] = self._plan(window)
        return self._calls[window]

    def _plan(self, window: int | None) -> list[_Call]:
        if window is not None:  # windows are rare: every block becomes dense, whose mask can say anything
            return [self._dense([block], window) for block in self._layout.blocks]
        small = [b for b in self._layout.blocks if b.num_tokens <= DENSE_TOKENS]
        large = [b for b in self._layout.blocks if b.num_tokens > DENSE_TOKENS]
        calls: list[_Call] = [self._dense(batch, None) for batch in _similar(small, [b.num_tokens for b in small])]
        plain: list[tuple[int, int]] = []
        for block in large:
            starts = (block.start + block.prefix_length + np.cumsum((0, *block.response_lengths[:-1]))).tolist()
            sequences = list(zip(starts, block.response_lengths, strict=True))
            if block.prefix_length == 0:
                plain += sequences
                continue
            plain.append((block.start, block.prefix_length))
            prefix = slice(block.start, block.start + block.prefix_length)
            for batch in _similar(sequences, [n for _, n in sequences]):
                calls.append(_Shared(rows=self._rows(batch), prefix=prefix))
        calls += [_Causal(rows=self._rows(batch)) for batch in _similar(plain, [n for _, n in plain])]
        return calls

    def _rows(self, sequences: Sequence[tuple[int, int]]) -> _Rows:
        longest = max(n for _, n in sequences)
        index = np.stack([start + np.minimum(np.arange(longest), n - 1) for start, n in sequences])
        members = np.concatenate([start + np.arange(n) for start, n in sequences])
        inverse = np.concatenate([i * longest + np.arange(n) for i, (_, n) in enumerate(sequences)])
        order = np.argsort(members, kind="stable")
        return _Rows(
            index=self._tensor(index.reshape(-1)),
            members=self._tensor(members[order]),
            inverse=self._tensor(inverse[order]),
            size=(len(sequences), longest),
        )

    def _dense(self, blocks: Sequence[Segments], window: int | None) -> _Dense:
        rows = self._rows([(b.start, b.num_tokens) for b in blocks])
        hidden = ~np.stack([_block_mask(b, rows.size[1], window) for b in blocks])
        bias = torch.zeros(hidden.shape, dtype=torch.promote_types(self._dtype, torch.float32))
        bias.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return _Dense(rows=rows, bias=bias.to(self._device)[:, None, None])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _similar(items: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Batches of items of similar length, longest first."""
    batches: list[list[Any]] = []
    longest = 0
    for i in sorted(range(len(items)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] < LENGTH_RATIO * longest:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(items[i])
    return batches


def _block_mask(block: Segments, size: int, window: int | None) -> np.ndarray:
    """[size, size] True where entry i of a block may see entry j; padding is unseen and sees entry 0."""
    lengths = (block.prefix_length, *block.response_lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([
        np.arange(n) + (block.prefix_length if i else 0) for i, n in enumerate(lengths)
    ])  # fmt: skip
    visible = (owner[None, :] == 0) | (owner[:, None] == owner[None, :])
    distance = position[:, None] - position[None, :]
    visible &= distance >= 0
    if window is not None:
        visible &= distance < window
    mask = np.zeros((size, size), dtype=np.bool_)
    mask[:, 0] = True
    mask[: len(owner), : len(owner)] = visible
    return mask


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
    """Attention of one layer, in the signature that HF models call.

    Args:
        module: the layer's attention module; not used.
        query: [1, H, N, d].
        key: [1, K, N, d] with H a multiple of K; `value` likewise.
        attention_mask: not used; the plan says who sees whom.
        scaling: of the scores; by default 1 / sqrt(d).
        roll_plan: of the micro-batch; the trainer passes it through the model.
        sliding_window: of this layer, in tokens.

    Returns:
        [1, N, H, d], and no attention weights.

    Raises:
        ModelError: the model's attention needs something that packing does not have (sinks, soft-capping).
    """
    if roll_plan is None:
        raise ModelError(
            f"attention '{ATTENTION}' serves the trainer alone: load the model with another for generation"
        )
    unsupported = [name for name in ("s_aux", "softcap", "position_bias") if kwargs.get(name) is not None]
    if unsupported:
        raise ModelError(
            f"the trainer's packed attention does not support this model: its attention uses {unsupported}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < roll_plan.longest else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if roll_plan.observer is not None:
        roll_plan.observer(q, k, scale, window)
    if roll_plan.varlen is not None:
        return varlen_attention(q, k, v, roll_plan.varlen, scale, window)[None], None
    calls = roll_plan.calls(window)
    parts = [_compute(call, q, k, v, scale) for call in calls]
    if len(calls) == 1 and len(calls[0].rows.members) == len(q):
        return parts[0].index_select(0, calls[0].rows.inverse)[None], None
    return _assemble(parts, calls, len(q))[None], None


def _assemble(parts: list[Tensor], calls: list[_Call], length: int) -> Tensor:
    """Results of the calls, [B * n, H, d] each, as one row [N, H, d]."""
    source = torch.cat([part.index_select(0, c.rows.inverse) for part, c in zip(parts, calls, strict=True)])
    order = torch.empty(length, dtype=torch.int64, device=source.device)
    order[torch.cat([call.rows.members for call in calls])] = torch.arange(length, device=source.device)
    return source.index_select(0, order)


def _compute(call: _Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One call: [B * n, H, d], padding included."""
    queries, keys, values = (_Gather.apply(x, call.rows) for x in (q, k, v))
    if isinstance(call, _Dense):
        result = _dense_products(queries, keys, values, call.bias, scale)
    elif isinstance(call, _Causal):
        result = _sdpa(queries, keys, values, scale, None)
    else:
        size, longest = call.rows.size
        keys, values = (
            torch.cat([x[call.prefix][None].expand(size, -1, -1, -1), own], dim=1)
            for x, own in ((k, keys), (v, values))
        )
        num_keys = keys.shape[1]
        mask = torch.ones(longest, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - longest)
        result = _sdpa(queries, keys, values, scale, mask)
    return result.flatten(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[B, n, H, d] queries, [B, m, K, d] keys and values; causal where there is no mask."""
    repeats = q.shape[2] // k.shape[2]
    k, v = ((x.repeat_interleave(repeats, dim=2) if repeats > 1 else x).transpose(1, 2) for x in (k, v))
    result = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return result.transpose(1, 2)


class _DenseProducts(torch.autograd.Function):
    """softmax(scale Q K^T + bias) V by matrix products; keeps only the weights, in the model's dtype.

    Queries [B, K, g n, d] (g heads share keys), keys and values [B, K, n, d], bias [B, 1, 1, n, n].
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


def _dense_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """The same as `_sdpa` under a mask, without expanding keys."""
    size, n, heads, width = q.shape
    groups = k.shape[2]
    queries = q.view(size, n, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(size, groups, -1, width)
    keys, values = (x.transpose(1, 2).contiguous() for x in (k, v))
    result = _DenseProducts.apply(queries, keys, values, bias, scale)
    result = result.view(size, groups, heads // groups, n, width)
    return result.permute(0, 3, 1, 2, 4).reshape(size, n, heads, width)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """What HF models build their mask with; the plan takes its place."""
    return None


def register_attention() -> str:
    """Make `roll_packed` known to transformers; returns its name. May be called repeatedly."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    return ATTENTION
