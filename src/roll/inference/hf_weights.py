"""New weights for a live `transformers` model, in place, and checksums of what it then holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.errors import WeightSyncError
from roll.inference.spec import refuse_adapter
from roll.models import changes_names, to_checkpoint_tensors
from roll.types import TensorSpec, WeightUpdate
from roll.weights import open_update, tensor_checksum
from roll.weights.plan import dtype_of
from roll.weights.quantization import dequantize_stream, without_scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["apply_update"]


def apply_update(model: PreTrainedModel, update: WeightUpdate) -> Mapping[str, int]:
    """Fetch the weights, copy them into the model, read every tensor back from the model and compare its bytes.

    The update must contain every weight, and at least one of tied ones. A tensor of another dtype is cast, a quantized
    one is dequantized: the model then holds exactly the product of codes and scales.

    Returns:
        The checksum of the received bytes, by name.

    Raises:
        UnsupportedError: the weights are an adapter's.
        WeightSyncError: names a tensor that is missing, unknown, of another shape, or was not applied. The model is
            unchanged only if the manifest itself was wrong.
    """
    refuse_adapter("hf", update.adapter)
    live = _live_tensors(model)
    weights = without_scales(update.manifest)
    _check_manifest(weights, live)
    sent_as = {spec.name: dtype_of(spec) for spec in weights}
    applied: dict[str, int] = {}
    device = next(iter(live.values())).device
    with torch.no_grad(), open_update(update, device=device) as receiver:
        for name, tensor in dequantize_stream(receiver, update.manifest, model.dtype):
            target = live[name]
            target.copy_(tensor)
            same = sent_as[name] == target.dtype
            applied[name] = receiver.checksums[name] if same else tensor_checksum(tensor.to(target.dtype))
    held = _live_tensors(model)  # looked up again: the tensors in use, not those that were written
    for name, checksum in applied.items():
        if tensor_checksum(held[name]) != checksum:
            raise WeightSyncError(
                f"tensor '{name}' of policy version {update.policy_version} arrived, but the model does not hold it."
            )
    return dict(receiver.checksums)


def _live_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return weights and persistent buffers, or views of them, by checkpoint name; tied ones appear under each name."""
    held = dict(model.state_dict(keep_vars=True))
    if not changes_names(model):
        return held
    found: dict[str, Tensor] = {}
    for name, tensor in held.items():
        parts = to_checkpoint_tensors(model, name, tensor)
        if any(part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() for part in parts.values()):
            raise WeightSyncError(
                f"tensor '{name}' cannot be written in its checkpoint's form: use inference.engine=vllm."
            )
        found |= parts
    return found


def _check_manifest(manifest: tuple[TensorSpec, ...], live: Mapping[str, Tensor]) -> None:
    for spec in manifest:
        if spec.name not in live:
            raise WeightSyncError(f"tensor '{spec.name}' is unknown to the engine's model.")
        shape = tuple(live[spec.name].shape)
        if spec.shape != shape:
            raise WeightSyncError(f"tensor '{spec.name}' has shape {spec.shape}; the engine's model needs {shape}.")
    brought = {live[spec.name].data_ptr() for spec in manifest}
    missing = [name for name, tensor in live.items() if tensor.data_ptr() not in brought]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise WeightSyncError(f"tensor '{missing[0]}'{more} missing from the weights that the trainer offered.")
