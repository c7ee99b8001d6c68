"""Activation checkpointing (gradient checkpointing) and tiled MLP: recomputation in the backward pass saves memory.

    layers    autograd saves every decoder layer's input; the layer runs again before its gradient
    tiles     autograd saves the input of a layer's MLP; one tile of its tokens at a time runs again

Both may be enabled: a recomputed layer then stores its MLP's activations for one tile only. Recomputation must have no
side effects: code that counts the tokens of a layer checks `is_recomputing`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roll.errors import ModelError

__all__ = ["checkpoint_layers", "create_recompute_contexts", "is_recomputing", "tile_mlps"]

_state = threading.local()


def is_recomputing() -> bool:
    """Return whether this thread is recomputing a checkpointed layer for the backward pass."""
    return getattr(_state, "again", False)


def checkpoint_layers(model: Any) -> None:
    """Enable activation checkpointing: an HF model's decoder layers keep only their inputs during training."""
    # Only the non-reentrant variant takes contexts, which distinguish a recomputation from the first run.
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": create_recompute_contexts})


def tile_mlps(model: nn.Module, num_tokens: int) -> None:
    """Make a model's MLPs compute `num_tokens` tokens at a time and save only their inputs for the backward pass.

    Only modules that compute each token separately are replaced: gated MLPs, including shared experts. Call this
    function after the weights are sharded: each rank then tiles its own tokens, and every rank has the same number of
    tokens.

    A weight's gradient is the sum over the tiles, in the dtype of the weights.

    Raises:
        ModelError: The model does not have an MLP that can be tiled.
    """
    mlps: list[Any] = [module for module in model.modules() if _is_gated_mlp(module)]
    if not mlps:
        raise ModelError(
            f"training.tiled_mlp_tokens {num_tokens} is not supported for {type(model).__name__}, which has no MLP "
            "that processes each token separately: set training.activation_checkpointing instead"
        )
    for mlp in mlps:
        mlp.forward = _build_tiled_forward(mlp.forward, num_tokens)


def _is_gated_mlp(module: nn.Module) -> bool:
    parts = [isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "gate_up_proj")]
    return (all(parts[:2]) or parts[2]) and isinstance(getattr(module, "down_proj", None), nn.Module)


def _build_tiled_forward(original_forward: Callable[[Tensor], Tensor], num_tokens: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            parts = x.split(num_tokens, dim=-2)
            return (
                original_forward(x)
                if len(parts) == 1
                else torch.cat([original_forward(part) for part in parts], dim=-2)
            )
        parts = [checkpoint(original_forward, part, use_reentrant=False) for part in x.split(num_tokens, dim=-2)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    return forward


def create_recompute_contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Return two context managers: one for the first forward pass of a checkpointed layer, and one for its
    recomputation."""
    return contextlib.nullcontext(), _mark_recomputing()


@contextlib.contextmanager
def _mark_recomputing() -> Iterator[None]:
    before, _state.again = is_recomputing(), True
    try:
        yield
    finally:
        _state.again = before
