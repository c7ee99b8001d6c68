"""Attention of the `hf` engine, over its own key-value cache, plugged into `transformers`' attention interface.

The model code of `transformers` runs unchanged on one flat row of tokens; each attention layer calls
`engine_attention`, which hands queries, keys and values to the *pass* under way:

    CausalPass   one sequence from its beginning; keys and values may be stored in a row of the cache (prefill)
    DecodePass   one new token for each of many rows, against their cached past

Numerics are row-independent where the kernels allow it: a sequence is prefilled alone, and the shapes in decoding
are rounded up to multiples (`HEAD_MULTIPLE`, `WIDTH_MULTIPLE`) for which the CPU kernels that we measured give each
row the same bits in any company.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ATTENTION_NAME", "CausalPass", "DecodePass", "KVCache", "register_attention", "round_up"]

ATTENTION_NAME = "roll_engine"
HEAD_MULTIPLE = 4
WIDTH_MULTIPLE = 32


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


class AttentionPass(Protocol):
    """What one forward pass does at every attention layer."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """[1, H, N, D], [1, Hkv, N, D] twice → [1, N, H, D]."""
        ...


def register_attention() -> None:
    """Make the attention known to `transformers` under `ATTENTION_NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, engine_attention)


def engine_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_pass: AttentionPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that `transformers` calls; `attention_pass` travels as an argument of the model."""
    return attention_pass.attend(module.layer_idx, query, key, value, scaling, sliding_window), None  # type: ignore[arg-type]


class KVCache:
    """Keys and values of every layer, [rows, Hkv, width, D]: row = one running request, width = token positions."""

    def __init__(self) -> None:
        self.rows = 0
        self.width = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, width: int, used: int) -> None:
        """Make room for this many rows and positions; the first `used` rows keep what they hold.

        A cache that is large enough stays; otherwise it gets exactly this size, so `rows` × `width` bounds it.
        """
        if rows <= self.rows and width <= self.width:
            return
        self.rows, self.width = rows, width
        for layer, tensors in self._layers.items():
            self._layers[layer] = (self._grown(tensors[0], used), self._grown(tensors[1], used))

    def clear(self) -> None:
        """Free all memory."""
        self.rows = self.width = 0
        self._layers.clear()

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer, made at first use in the likeness of its keys and values."""
        if index not in self._layers:
            self._layers[index] = (self._empty(key), self._empty(value))
        return self._layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Let a row hold the first `length` positions of another one."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 × NaN would be NaN.
        return like.new_zeros(self.rows, like.shape[-3], self.width, like.shape[-1])

    def _grown(self, old: Tensor, used: int) -> Tensor:
        new = self._empty(old)
        width = min(old.shape[2], new.shape[2])
        new[:used, :, :width] = old[:used, :, :width]
        return new


class CausalPass:
    """One whole sequence; with a cache, its keys and values are stored in `row`."""

    def __init__(self, cache: KVCache | None = None, row: int = 0) -> None:
        self._cache, self._row = cache, row
        self._bias: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `AttentionPass`."""
        length = key.shape[2]
        if self._cache is not None:
            keys, values = self._cache.layer(layer, key, value)
            keys[self._row, :, :length], values[self._row, :, :length] = key[0], value[0]
        bias = self._window_bias(length, window, query) if window is not None and window < length else None
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=bias is None, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return output.transpose(1, 2)

    def _window_bias(self, length: int, window: int, like: Tensor) -> Tensor:
        if window not in self._bias:
            distance = torch.arange(length)[:, None] - torch.arange(length)
            seen = ((distance >= 0) & (distance < window)).to(like.device)
            self._bias[window] = like.new_zeros(length, length).masked_fill_(~seen, float("-inf"))
        return self._bias[window]


class DecodePass:
    """One new token per row: tokens 0 … B-1 of the flat input belong to rows 0 … B-1, any after them are padding."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        """`positions`: [B] int64, where each row's new token stands."""
        self._cache, self._positions = cache, positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._width = min(round_up(int(positions.max()) + 1, WIDTH_MULTIPLE), cache.width)
        self._bias: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `AttentionPass`."""
        rows, heads, kv_heads = len(self._rows), query.shape[1], key.shape[1]
        keys, values = self._cache.layer(layer, key, value)
        keys[self._rows, :, self._positions] = key[0, :, :rows].transpose(0, 1)
        values[self._rows, :, self._positions] = value[0, :, :rows].transpose(0, 1)
        # The query heads that share a key head stand in as that many query positions: one key is read once.
        group = heads // kv_heads
        grouped = query[0, :, :rows].transpose(0, 1).reshape(rows, kv_heads, group, -1)
        grouped = F.pad(grouped, (0, 0, 0, -group % HEAD_MULTIPLE))
        attended = F.scaled_dot_product_attention(
            grouped, keys[:rows, :, : self._width], values[:rows, :, : self._width],
            attn_mask=self._mask(window, query), scale=scale,
        )  # fmt: skip
        output = attended.new_zeros(1, query.shape[2], heads, attended.shape[-1])
        output[0, :rows] = attended[:, :, :group].reshape(rows, heads, -1)
        return output

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """[B, 1, 1, width] 0 where a row may look, -inf elsewhere."""
        if window not in self._bias:
            distance = self._positions[:, None] - torch.arange(self._width, device=like.device)
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            bias = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self._bias[window] = bias[:, None, None, :]
        return self._bias[window]
