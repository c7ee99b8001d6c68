"""Attention of the `hf` engine over its KV cache, registered in `transformers`' attention interface.

The model code of `transformers` runs unchanged on one flat row of tokens. Each attention layer calls
`compute_engine_attention`, which passes queries, keys and values to the current *pass*:

    CausalPass   one sequence from its beginning; keys and values may be stored in a row of the cache (prefill)
    DecodePass   one new token for each of many rows, against their cached past

Where the kernels allow it, the result of a row does not depend on the other rows: a sequence is prefilled alone, and
the shapes in decoding are rounded up to multiples (`HEAD_MULTIPLE`, `WIDTH_MULTIPLE`). The CPU kernels that we measured
then compute the same bits for a row in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.models import (
    AttentionParams,
    AttentionSpan,
    compute_position_scale,
    get_decoder,
    read_attention_params,
    read_mask_span,
)

__all__ = [
    "ATTENTION_NAME",
    "CausalPass",
    "DecodePass",
    "KVCache",
    "patch_mixers",
    "register_attention",
    "round_up",
]

ATTENTION_NAME = "roll_engine"
HEAD_MULTIPLE = 4
WIDTH_MULTIPLE = 32


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class AttentionPass(Protocol):
    """Computes the attention layers of one forward pass."""

    num_calls: int
    """The number of calls to `attend` so far."""
    positions: Tensor | None
    """The positions [B] of the first B tokens; `None` if they are 0, 1, 2, …"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute attention for query [1, H, N, D], key [1, Hkv, N, D], value [1, Hkv, N, W]; return [1, N, H, W]."""
        ...

    def run_mixer(self, name: str, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run the recurrent module `name`, whose original forward is `forward`, on hidden states [1, N, D] → [1, N,
        D]."""
        ...


def register_attention() -> None:
    """Register `compute_engine_attention` with `transformers` as `ATTENTION_NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(ATTENTION_NAME, read_mask_span)
    AttentionInterface.register(ATTENTION_NAME, compute_engine_attention)


def compute_engine_attention(
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
    """Compute the attention of a layer with `attention_pass.attend`; `transformers` calls this function.

    `attention_pass` is an argument of the model's forward call, which `transformers` passes on.
    """
    params = read_attention_params(module, query.shape[-1], attention_mask, scaling, sliding_window, kwargs)
    attention_pass.num_calls += 1
    if attention_pass.positions is not None:
        # The model scaled queries as if their positions were 0, 1, 2, …, but the tokens of a decoding step have others.
        scale = compute_position_scale(module, attention_pass.positions, query.dtype)
        if scale is not None:
            scale = F.pad(scale, (0, query.shape[2] - len(scale)), value=1.0)
            query = (query * scale[:, None]).to(query.dtype)
    return attention_pass.attend(module.layer_idx, query, key, value, params), None  # type: ignore[arg-type]


class KVCache:
    """Keys and values of every layer, [rows, Hkv, width, D]: one row per running request, `width` tokens per row."""

    def __init__(self) -> None:
        self.rows = 0
        self.width = 0
        self._layers: dict[int | str, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, width: int, used: int) -> None:
        """Resize the cache to `rows` × `width` if it is smaller; the first `used` rows keep their content."""
        if rows <= self.rows and width <= self.width:
            return
        self.rows, self.width = rows, width
        for layer, tensors in self._layers.items():
            self._layers[layer] = (self._grow(tensors[0], used), self._grow(tensors[1], used))

    def clear(self) -> None:
        """Free all memory."""
        self.rows = self.width = 0
        self._layers.clear()

    def get_layer(self, index: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values of a layer, allocated on first use with the dtypes of `key` and `value`."""
        if index not in self._layers:
            self._layers[index] = (self._allocate(key), self._allocate(value))
        return self._layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not uninitialized memory: masked positions are multiplied by 0, and 0 × NaN is NaN.
        return like.new_zeros(self.rows, like.shape[-3], self.width, like.shape[-1])

    def _grow(self, old: Tensor, used: int) -> Tensor:
        new = self._allocate(old)
        width = min(old.shape[2], new.shape[2])
        new[:used, :, :width] = old[:used, :, :width]
        return new


class CausalPass:
    """A forward pass over a whole sequence. With a cache, keys and values are stored in row `row` of the cache.

    Args:
        cache: The cache; `None` if keys and values are not stored.
        row: The sequence's row in the cache.
        images: Number of the image or crop to which each token belongs, shape [N]; 0 for text. Tokens of an image also
            attend to later tokens of the same image. `None` if attention is causal.
    """

    positions = None

    def __init__(self, cache: KVCache | None = None, row: int = 0, images: Tensor | None = None) -> None:
        self.num_calls = 0
        self._images = images
        self._cache, self._row = cache, row
        self._bias: dict[AttentionSpan, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """See `AttentionPass`."""
        length, heads, kv_heads = key.shape[2], query.shape[1], key.shape[1]
        self._store(layer, key, value)
        span = params.span.limit_to(length)
        # Without a bias, SDPA uses its causal kernel, which needs no [N, N] matrix.
        is_causal = params.is_plain and span == AttentionSpan() and self._images is None
        bias = None if is_causal else self._build_bias(length, span, query)
        if params.is_plain:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, is_causal=bias is None, scale=params.scale,
                enable_gqa=heads != kv_heads,
            )  # fmt: skip
            return output.transpose(1, 2)
        assert bias is not None
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
        sinks = None if params.sinks is None else params.sinks.view(kv_heads, -1, 1, 1)
        output = _compute_eager_attention(grouped, key[:, :, None], value[:, :, None], bias, params, sinks)
        return output.flatten(1, 2).transpose(1, 2)

    def run_mixer(self, name: str, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """See `AttentionPass`."""
        # The cache stores pairs of keys and values. A recurrent module only has inputs, so its values have 0 columns.
        self._store(name, hidden[:, None], hidden[:, None, :, :0])
        return forward(hidden)

    def _store(self, layer: int | str, key: Tensor, value: Tensor) -> None:
        if self._cache is not None:
            length = key.shape[2]
            keys, values = self._cache.get_layer(layer, key, value)
            keys[self._row, :, :length], values[self._row, :, :length] = key[0], value[0]

    def _build_bias(self, length: int, span: AttentionSpan, like: Tensor) -> Tensor:
        if span not in self._bias:
            position = torch.arange(length)
            seen = span.is_visible(position[:, None], position).to(like.device)
            if self._images is not None:
                seen |= (self._images[:, None] == self._images) & (self._images > 0)
            self._bias[span] = like.new_zeros(length, length).masked_fill_(~seen, float("-inf"))
        return self._bias[span]


class DecodePass:
    """A forward pass over one new token for each of B rows: input token i belongs to row i < B; others are padding."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        """Prepare a pass in which the new token of row i is at `positions[i]`; `positions` is int64 [B]."""
        self.num_calls = 0
        self.positions = positions
        self._cache = cache
        self._rows = torch.arange(len(positions), device=positions.device)
        self._width = min(round_up(int(positions.max()) + 1, WIDTH_MULTIPLE), cache.width)
        self._bias: dict[AttentionSpan, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """See `AttentionPass`."""
        rows, heads, kv_heads = len(self._rows), query.shape[1], key.shape[1]
        keys, values = self._store(layer, key, value)
        # Query heads that share a key head are treated as query positions, so that each key is read once.
        group = heads // kv_heads
        grouped = query[0, :, :rows].transpose(0, 1).reshape(rows, kv_heads, group, -1)
        grouped = F.pad(grouped, (0, 0, 0, -group % HEAD_MULTIPLE))
        bias = self._build_bias(params.span, query)
        if params.is_plain:
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=params.scale)
        else:
            sinks = (
                None if params.sinks is None else F.pad(params.sinks.view(kv_heads, -1), (0, -group % HEAD_MULTIPLE))
            )
            attended = _compute_eager_attention(
                grouped, keys, values, bias, params, None if sinks is None else sinks[..., None]
            )
        output = attended.new_zeros(1, query.shape[2], heads, attended.shape[-1])
        output[0, :rows] = attended[:, :, :group].reshape(rows, heads, -1)
        return output

    def run_mixer(self, name: str, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """See `AttentionPass`."""
        # Modules represent their states differently, so the module runs again on all past inputs: this is correct for
        # any module, but slow for long sequences.
        past, _ = self._store(name, hidden[:, None], hidden[:, None, :, :0])
        mixed = forward(past[:, 0])[self._rows, self.positions]
        return F.pad(mixed, (0, 0, 0, hidden.shape[1] - len(mixed)))[None]

    def _store(self, layer: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values in the cache, and return the cached keys and values of the rows."""
        rows = len(self._rows)
        tensors = self._cache.get_layer(layer, key, value)
        for held, new in zip(tensors, (key, value), strict=True):
            held[self._rows, :, self.positions] = new[0, :, :rows].transpose(0, 1)
        return tensors[0][:rows, :, : self._width], tensors[1][:rows, :, : self._width]

    def _build_bias(self, span: AttentionSpan, like: Tensor) -> Tensor:
        """Return the bias [B, 1, 1, width]: 0 where the new token of a row may attend to the cache, -inf elsewhere."""
        if span not in self._bias:
            seen = span.is_visible(self.positions[:, None], torch.arange(self._width, device=like.device))
            bias = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            self._bias[span] = bias[:, None, None, :]
        return self._bias[span]


def _compute_eager_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    """Compute attention with soft caps or sinks, which SDPA does not support; queries [..., n, D], keys [..., m, D]."""
    # The softmax is in float32, as in the eager attention of `transformers`, to which `check_decoding` compares it.
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value


def patch_mixers(model: Any, mixers: dict[str, Any]) -> None:
    """Replace the `forward` of recurrent modules (`mixers`, by name) with calls of `AttentionPass.run_mixer`."""
    current: list[AttentionPass | None] = [None]

    def store_pass(layer: Any, args: Any, kwargs: Any) -> None:
        current[0] = kwargs.get("attention_pass")

    def make_forward(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("attention_pass", None)
            if current[0] is None:
                return original(*args, **kwargs)
            hidden = args[0] if args else kwargs.pop("hidden_states")
            other_outputs: list[Any] = []

            def run_plain(x: Tensor) -> Tensor:
                output = original(x, *args[1:], **kwargs)
                other_outputs[:] = output[1:] if isinstance(output, tuple) else []
                return output[0] if isinstance(output, tuple) else output

            mixed = current[0].run_mixer(name, run_plain, hidden)
            return (mixed, *other_outputs) if other_outputs else mixed

        return forward

    # Some layers do not pass keyword arguments on to their mixer, so the pass is read from the call to the layer.
    for layer in get_decoder(model).layers:
        layer.register_forward_pre_hook(store_pass, with_kwargs=True)
    for name, mixer in mixers.items():
        mixer.forward = make_forward(name, mixer.forward)
