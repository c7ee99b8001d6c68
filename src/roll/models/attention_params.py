"""Variants of a layer's attention beyond softmax(scale Q K^T) V, read from the arguments of HF models.

softcap   scores s become c tanh(s / c)                                          Gemma 2
sinks     the softmax of every head has an additional score without a value      gpt-oss
window    a token attends to itself and the window - 1 tokens before it          Mistral, Gemma, gpt-oss
chunk     a token attends to the earlier tokens of its chunk, and to itself      Llama 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from roll.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AttentionParams", "AttentionSpan", "compute_position_scale", "read_attention_params", "read_mask_span"]

_UNSUPPORTED_ARGUMENTS = ("position_bias", "alibi", "head_mask")


class AttentionSpan(NamedTuple):
    """The sliding window and the chunk that limit attention, as sizes in tokens; `None` means no limit."""

    window: int | None = None
    chunk: int | None = None

    def limit_to(self, length: int) -> AttentionSpan:
        """Return the span without limits that have no effect on sequences of `length` tokens."""
        return AttentionSpan(*(limit if limit is not None and limit < length else None for limit in self))

    def is_visible(self, query: Any, key: Any) -> Any:
        """Return whether tokens at positions `query` may attend to tokens at positions `key`; the two are broadcast."""
        seen = query >= key
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen


class AttentionParams(NamedTuple):
    """The attention parameters of one layer."""

    scale: float
    span: AttentionSpan = AttentionSpan()
    softcap: float | None = None
    sinks: Tensor | None = None
    """The additional score of each head [H]."""

    @property
    def is_plain(self) -> bool:
        """True if the scores are not modified before the softmax."""
        return self.softcap is None and self.sinks is None


def read_attention_params(
    module: Any,
    width: int,
    mask: Any,
    scaling: float | None,
    sliding_window: int | None,
    extra_arguments: dict[str, Any],
) -> AttentionParams:
    """Read the attention parameters of a layer.

    Args:
        module: The layer's attention module.
        width: The head dimension d.
        mask: The result of `read_mask_span`, or `None`.
        scaling: The scale of the scores; by default 1 / sqrt(d).
        sliding_window: The size of the layer's sliding window, in tokens; `None` if it has none.
        extra_arguments: Further arguments that the model passes to the attention function.

    Raises:
        ModelError: the layer uses a feature that is not supported here.
    """
    unknown = [name for name in _UNSUPPORTED_ARGUMENTS if extra_arguments.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to the attention function, which ROLL does not "
            "support: use another model"
        )
    return AttentionParams(
        scale=width**-0.5 if scaling is None else scaling,
        span=mask if isinstance(mask, AttentionSpan) else AttentionSpan(sliding_window),
        softcap=extra_arguments.get("softcap"),
        sinks=extra_arguments.get("s_aux"),
    )


def read_mask_span(
    *args: Any, local_size: int | None = None, config: Any = None, **kwargs: Any
) -> AttentionSpan | None:
    """Return the attention span of one type of layers; `None` if `local_size`, the window or chunk size, is `None`.

    This function replaces HF's mask functions: HF models call it once for each type of layer, and pass the result as
    the mask to the layers of this type.
    """
    if local_size is None:
        return None
    # HF passes a sliding window and a chunk size under the same name; the configuration tells which of them it is.
    return (
        AttentionSpan(chunk=local_size)
        if local_size == getattr(config, "attention_chunk_size", None)
        else AttentionSpan(local_size)
    )


def compute_position_scale(module: Any, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return factors [N] that correct queries scaled by the index in the packed row instead of by the position.

    Llama 4's layers without RoPE scale queries by 1 + a log(1 + floor((t + 1) / f)), where t is the index in the row.
    Return `None` for layers that do not scale queries.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    import torch

    def scale(t: Tensor) -> Tensor:
        return torch.log1p(torch.floor((t.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    high = torch.promote_types(dtype, torch.float32)
    return scale(positions).to(high) / scale(torch.arange(len(positions), device=positions.device)).to(high)
