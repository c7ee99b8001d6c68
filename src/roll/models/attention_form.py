"""Variants of a layer's attention beyond softmax(scale Q K^T) V, read from the arguments of HF models.

softcap   scores s become c tanh(s / c)                                  Gemma 2
sinks     every head has one more score, of a key without a value        gpt-oss
window    a token sees itself and the window - 1 tokens before it        Mistral, Gemma, gpt-oss
chunk     a token sees its own chunk of positions up to itself           Llama 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from roll.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AttentionForm", "AttentionSpan", "attention_form", "position_scale", "read_mask_span"]

_UNKNOWN = ("position_bias", "alibi", "head_mask")


class AttentionSpan(NamedTuple):
    """The distance that a token may attend to; `None`: to the beginning."""

    window: int | None = None
    chunk: int | None = None

    def limit_to(self, length: int) -> AttentionSpan:
        """Return the reach without limits that texts of `length` tokens do not reach."""
        return AttentionSpan(*(limit if limit is not None and limit < length else None for limit in self))

    def is_visible(self, query: Any, key: Any) -> Any:
        """Return whether tokens at positions `query` may attend to those at `key`; arrays or tensors that broadcast."""
        seen = query >= key
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen


class AttentionForm(NamedTuple):
    """The form of one layer's attention."""

    scale: float
    span: AttentionSpan = AttentionSpan()
    softcap: float | None = None
    sinks: Tensor | None = None
    """The extra scores of the heads [H]."""

    @property
    def is_plain(self) -> bool:
        """Whether the scores are not modified before the softmax."""
        return self.softcap is None and self.sinks is None


def attention_form(
    module: Any, width: int, mask: Any, scaling: float | None, sliding_window: int | None, given: dict[str, Any]
) -> AttentionForm:
    """Read a layer's form.

    Args:
        module: The layer's attention module.
        width: The width d of a head.
        mask: The result of `read_mask_span`, or `None`.
        scaling: The scale of the scores; by default 1 / sqrt(d).
        sliding_window: The window of this layer, in tokens.
        given: Further arguments of the attention function.

    Raises:
        ModelError: the layer uses a feature that is not supported here.
    """
    unknown = [name for name in _UNKNOWN if given.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {unknown} to its attention, which the trainer does not support"
        )
    return AttentionForm(
        scale=width**-0.5 if scaling is None else scaling,
        span=mask if isinstance(mask, AttentionSpan) else AttentionSpan(sliding_window),
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
    )


def read_mask_span(
    *args: Any, local_size: int | None = None, config: Any = None, **kwargs: Any
) -> AttentionSpan | None:
    """Return the reach of the layers that HF models pass a mask to; it replaces the mask itself."""
    if local_size is None:
        return None
    return (
        AttentionSpan(chunk=local_size)
        if local_size == getattr(config, "attention_chunk_size", None)
        else AttentionSpan(local_size)
    )


def position_scale(module: Any, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return factors [N] that correct queries that the model scaled by a token's place in the row instead of its
    position.

    Llama 4's layers without rotation scale queries by 1 + a log(1 + floor((t + 1) / f)), with t counted along the given
    row.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    import torch

    def scale(t: Tensor) -> Tensor:
        return torch.log1p(torch.floor((t.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    high = torch.promote_types(dtype, torch.float32)
    return scale(positions).to(high) / scale(torch.arange(len(positions), device=positions.device)).to(high)
