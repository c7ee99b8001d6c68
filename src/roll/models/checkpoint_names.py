"""The names and shapes of a model's weights in its checkpoint, where `transformers` stores them in another form.

    model      layers.0.mlp.experts.gate_up_proj  [experts, 2 width, hidden]
    checkpoint layers.0.mlp.experts.0.gate_proj.weight  [width, hidden],   …0.up_proj.weight,   …1.gate_proj.weight, …

The conversions of `transformers` at loading are reverted tensor by tensor, as views where possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["changes_names", "to_checkpoint_tensors"]


def changes_names(model: Any) -> bool:
    """Return whether any weight of an HF model has another name or shape in the checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not hasattr(model, "_weight_conversions"):
        return bool(get_model_conversion_mapping(model, add_legacy=False))
    return bool(model._weight_conversions)


def to_checkpoint_tensors(model: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the checkpoint's tensors that a weight of the model corresponds to, as views of `weight` where possible.

    Raises:
        ModelError: the checkpoint stores the weight in one tensor with other weights.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.core_model_loading import revert_weight_conversion

    class Views(TorchFunctionMode):
        """Prevents copies of parts of a tensor."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

    try:
        with Views(), torch.no_grad():
            found = revert_weight_conversion(model, {name: weight.detach()})
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"weight '{name}' of {type(model).__name__} cannot be converted to the checkpoint format: {error}"
        ) from error
    if sum(tensor.numel() for tensor in found.values()) != weight.numel():
        raise ModelError(
            f"weight '{name}' of {type(model).__name__} is stored in one checkpoint tensor together with other "
            "weights, which is not supported"
        )
    return found
