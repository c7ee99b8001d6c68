"""Conversion of a model's weights to their names and shapes in its checkpoint, where the two differ.

    model      layers.0.mlp.experts.gate_up_proj  [experts, 2 width, hidden]
    checkpoint layers.0.mlp.experts.0.gate_proj.weight  [width, hidden],   …0.up_proj.weight,   …1.gate_proj.weight, …

`transformers` converts checkpoints when it loads them. The conversions are reverted tensor by tensor, as views where
possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.errors import ModelError
from roll.models.omni import get_weight_prefix

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["has_renamed_weights", "to_checkpoint_tensors"]


def has_renamed_weights(model: Any) -> bool:
    """Return whether any weight of an HF model has a different name or shape in its checkpoint."""
    if get_weight_prefix(model):
        return True
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not hasattr(model, "_weight_conversions"):
        return bool(get_model_conversion_mapping(model, add_legacy=False))
    return bool(model._weight_conversions)


def to_checkpoint_tensors(model: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Convert a weight of the model to the corresponding checkpoint tensors, by name; views of `weight` where possible.

    Raises:
        ModelError: the checkpoint stores the weight together with other weights in one tensor.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.core_model_loading import revert_weight_conversion

    class ContiguousViews(TorchFunctionMode):
        """Makes `Tensor.contiguous` return the tensor itself, so that parts of a tensor are not copied."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

    try:
        with ContiguousViews(), torch.no_grad():
            converted = revert_weight_conversion(model, {name: weight.detach()})
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"weight '{name}' of {type(model).__name__} cannot be converted to the checkpoint format: {error}"
        ) from error
    # If the checkpoint stores several weights in one tensor, a single weight cannot be converted back.
    if sum(tensor.numel() for tensor in converted.values()) != weight.numel():
        raise ModelError(
            f"weight '{name}' of {type(model).__name__} is stored in one checkpoint tensor together with other "
            "weights, which is not supported"
        )
    prefix = get_weight_prefix(model)
    return {f"{prefix}{own}": tensor for own, tensor in converted.items()}
