"""Attention of the `hf` engine over its own KV cache, registered in `transformers`' attention interface.

The model code of `transformers` runs unchanged on one flat row of tokens. Each attention layer calls
`engine_attention`, which passes queries, keys and values to the current *pass*:

    CausalPass   one sequence from its beginning; keys and values may be stored in a row of the cache (prefill)
    DecodePass   one new token for each of many rows, against their cached past

Numerics are row-independent where the kernels allow it: a sequence is prefilled alone, and the shapes in decoding are
rounded up to multiples (`HEAD_MULTIPLE`, `WIDTH_MULTIPLE`). With these, the CPU kernels that we measured compute the
same bits for a row, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.models import AttentionForm, AttentionSpan, attention_form, decoder_of, position_scale, read_mask_span

__all__ = [
    "ATTENTION_NAME",
    "CausalPass",
    "DecodePass",
    "KVCache",
    "mix_in_passes",
    "register_attention",
    "round_up",
]

ATTENTION_NAME = "roll_engine"
HEAD_MULTIPLE = 4
WIDTH_MULTIPLE = 32


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


class AttentionPass(Protocol):
    """The computation of one forward pass at every attention layer."""

    num_calls: int
    """The number of calls of `attend` so far."""
    positions: Tensor | None
    """The positions of the first B tokens [B], if they are not 0, 1, 2, …"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute attention of [1, H, N, D], [1, Hkv, N, D] and [1, Hkv, N, W]; return [1, N, H, W]."""
        ...

    def mix(self, name: str, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run a recurrent part of a layer on [1, N, D]; return [1, N, D]."""
        ...


def register_attention() -> None:
    """Register the attention with `transformers` as `ATTENTION_NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(ATTENTION_NAME, read_mask_span)
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that `transformers` calls; `attention_pass` is passed through the model."""
    form = attention_form(module, query.shape[-1], attention_mask, scaling, sliding_window, kwargs)
    attention_pass.num_calls += 1
    if attention_pass.positions is not None:
        own = position_scale(module, attention_pass.positions, query.dtype)
        if own is not None:
            own = F.pad(own, (0, query.shape[2] - len(own)), value=1.0)
            query = (query * own[:, None]).to(query.dtype)
    return attention_pass.attend(module.layer_idx, query, key, value, form), None  # type: ignore[arg-type]


class KVCache:
    """Keys and values of every layer, [rows, Hkv, width, D]: one row per running request, width in token positions."""

    def __init__(self) -> None:
        self.rows = 0
        self.width = 0
        self._layers: dict[int | str, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, width: int, used: int) -> None:
        """Make room for a number of rows and positions; the first `used` rows keep their content.

        A cache that is large enough stays; otherwise it gets exactly this size, so `rows` × `width` bounds it.
        """
        if rows <= self.rows and width <= self.width:
            return
        self.rows, self.width = rows, width
        for layer, tensors in self._layers.items():
            self._layers[layer] = (self._grow(tensors[0], used), self._grow(tensors[1], used))

    def clear(self) -> None:
        """Free all memory."""
        self.rows = self.width = 0
        self._layers.clear()

    def layer(self, index: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensors of a layer, allocated at first use with the shapes and dtypes of its keys and values."""
        if index not in self._layers:
            self._layers[index] = (self._empty(key), self._empty(value))
        return self._layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 × NaN would be NaN.
        return like.new_zeros(self.rows, like.shape[-3], self.width, like.shape[-1])

    def _grow(self, old: Tensor, used: int) -> Tensor:
        new = self._empty(old)
        width = min(old.shape[2], new.shape[2])
        new[:used, :, :width] = old[:used, :, :width]
        return new


class CausalPass:
    """A pass over one whole sequence; with a cache, its keys and values are stored in `row`."""

    positions = None

    def __init__(self, cache: KVCache | None = None, row: int = 0) -> None:
        self.num_calls = 0
        self._cache, self._row = cache, row
        self._bias: dict[AttentionSpan, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionPass`."""
        length, heads, kv_heads = key.shape[2], query.shape[1], key.shape[1]
        self._store(layer, key, value)
        reach = form.span.limit_to(length)
        bias = None if form.is_plain and reach == AttentionSpan() else self._reach_bias(length, reach, query)
        if form.is_plain:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, is_causal=bias is None, scale=form.scale,
                enable_gqa=heads != kv_heads,
            )  # fmt: skip
            return output.transpose(1, 2)
        assert bias is not None
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
        sinks = None if form.sinks is None else form.sinks.view(kv_heads, -1, 1, 1)
        output = _attend_eagerly(grouped, key[:, :, None], value[:, :, None], bias, form, sinks)
        return output.flatten(1, 2).transpose(1, 2)

    def mix(self, name: str, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """See `AttentionPass`."""
        self._store(name, hidden[:, None], hidden[:, None, :, :0])
        return plain(hidden)

    def _store(self, layer: int | str, key: Tensor, value: Tensor) -> None:
        if self._cache is not None:
            length = key.shape[2]
            keys, values = self._cache.layer(layer, key, value)
            keys[self._row, :, :length], values[self._row, :, :length] = key[0], value[0]

    def _reach_bias(self, length: int, reach: AttentionSpan, like: Tensor) -> Tensor:
        if reach not in self._bias:
            position = torch.arange(length)
            seen = reach.is_visible(position[:, None], position).to(like.device)
            self._bias[reach] = like.new_zeros(length, length).masked_fill_(~seen, float("-inf"))
        return self._bias[reach]


class DecodePass:
    """A pass over one new token per row: tokens 0 … B-1 of the flat input belong to rows 0 … B-1, more are padding."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        """Prepare a pass in which row i's new token is at position `positions[i]`, shape [B], int64."""
        self.num_calls = 0
        self.positions = positions
        self._cache = cache
        self._rows = torch.arange(len(positions), device=positions.device)
        self._width = min(round_up(int(positions.max()) + 1, WIDTH_MULTIPLE), cache.width)
        self._bias: dict[AttentionSpan, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionPass`."""
        rows, heads, kv_heads = len(self._rows), query.shape[1], key.shape[1]
        keys, values = self._store(layer, key, value)
        # Query heads that share a key head are treated as query positions, so that each key is read once.
        group = heads // kv_heads
        grouped = query[0, :, :rows].transpose(0, 1).reshape(rows, kv_heads, group, -1)
        grouped = F.pad(grouped, (0, 0, 0, -group % HEAD_MULTIPLE))
        bias = self._mask(form.span, query)
        if form.is_plain:
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=form.scale)
        else:
            sinks = None if form.sinks is None else F.pad(form.sinks.view(kv_heads, -1), (0, -group % HEAD_MULTIPLE))
            attended = _attend_eagerly(grouped, keys, values, bias, form, None if sinks is None else sinks[..., None])
        output = attended.new_zeros(1, query.shape[2], heads, attended.shape[-1])
        output[0, :rows] = attended[:, :, :group].reshape(rows, heads, -1)
        return output

    def mix(self, name: str, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run a recurrent part on the whole past again: correct for any such part, slow for long texts. See
        `AttentionPass`.
        """
        past, _ = self._store(name, hidden[:, None], hidden[:, None, :, :0])
        mixed = plain(past[:, 0])[self._rows, self.positions]
        return F.pad(mixed, (0, 0, 0, hidden.shape[1] - len(mixed)))[None]

    def _store(self, layer: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values, and return those of all positions of the rows in a layer."""
        rows = len(self._rows)
        tensors = self._cache.layer(layer, key, value)
        for held, new in zip(tensors, (key, value), strict=True):
            held[self._rows, :, self.positions] = new[0, :, :rows].transpose(0, 1)
        return tensors[0][:rows, :, : self._width], tensors[1][:rows, :, : self._width]

    def _mask(self, reach: AttentionSpan, like: Tensor) -> Tensor:
        """Return the bias [B, 1, 1, width]: 0 where a row may attend, -inf elsewhere."""
        if reach not in self._bias:
            seen = reach.is_visible(self.positions[:, None], torch.arange(self._width, device=like.device))
            bias = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self._bias[reach] = bias[:, None, None, :]
        return self._bias[reach]


def _attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """Compute attention with soft caps or sinks, which SDPA does not support; queries [..., n, D], keys [..., m, D]."""
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value


def mix_in_passes(model: Any, mixers: dict[str, Any]) -> None:
    """Make recurrent modules compute through the current pass."""
    current: list[AttentionPass | None] = [None]

    def remember(layer: Any, args: Any, kwargs: Any) -> None:
        current[0] = kwargs.get("attention_pass")

    def through(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("attention_pass", None)
            if current[0] is None:
                return plain(*args, **kwargs)
            hidden = args[0] if args else kwargs.pop("hidden_states")
            rest: list[Any] = []

            def alone(x: Tensor) -> Tensor:
                output = plain(x, *args[1:], **kwargs)
                rest[:] = output[1:] if isinstance(output, tuple) else []
                return output[0] if isinstance(output, tuple) else output

            mixed = current[0].mix(name, alone, hidden)
            return (mixed, *rest) if rest else mixed

        return forward

    for layer in decoder_of(model).layers:
        layer.register_forward_pre_hook(remember, with_kwargs=True)
    for name, mixer in mixers.items():
        mixer.forward = through(name, mixer.forward)
