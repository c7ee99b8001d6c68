"""Weight sync into a loaded `transformers` model, in place; the applied tensors are verified by checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.errors import WeightSyncError
from roll.inference.spec import EngineSpec
from roll.models import has_renamed_weights, load_causal_lm, to_checkpoint_tensors
from roll.types import TensorSpec, WeightUpdate
from roll.weights import compute_checksum, open_update
from roll.weights.plan import get_dtype
from roll.weights.quantization import dequantize_stream, drop_scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.inference.hf_shard import ModelShard

__all__ = ["apply_update", "reload_weights"]


def apply_update(model: PreTrainedModel, update: WeightUpdate, shard: ModelShard | None = None) -> Mapping[str, int]:
    """Receive the weights, copy them into the model, then read every tensor back and compare its bytes.

    The update must contain every weight, or at least one of several tied weights. Tensors are cast to the model's
    dtype, and quantized weights are dequantized to exactly the product of codes and scales.

    If the model is sharded, the call is collective: rank 0 receives the weights and sends them to the other ranks.

    Args:
        model: The model.
        update: The weights.
        shard: This rank's part of the model, if it is sharded.

    Returns:
        The checksum of the received bytes, by tensor name; empty on ranks other than 0.

    Raises:
        WeightSyncError: a tensor is missing, unknown, has the wrong shape, or was not applied; the message names it.
            The model is unchanged only if the manifest is invalid.
    """
    model_tensors = _list_model_tensors(model)
    weights = drop_scales(update.manifest)
    _check_manifest(weights, model_tensors, shard)
    if shard is not None and shard.rank > 0:
        _receive_from_first_rank(model_tensors, weights, shard)
        return {}
    sent_as = {spec.name: get_dtype(spec) for spec in weights}
    applied: dict[str, int] = {}
    device = next(iter(model_tensors.values())).device
    with torch.no_grad(), open_update(update, device=device) as receiver:
        for name, tensor in dequantize_stream(receiver, update.manifest, model.dtype):
            target = model_tensors[name]
            same = sent_as[name] == target.dtype
            if shard is not None:
                whole = shard.broadcast(tensor.to(target.device, target.dtype, copy=True).contiguous())
                tensor, same = shard.select(name, whole), same and name not in shard.dims
            target.copy_(tensor)
            applied[name] = receiver.checksums[name] if same else compute_checksum(tensor.to(target.dtype))
    # The tensors are looked up again: the check must read the tensors in use, not those that were written.
    model_tensors = _list_model_tensors(model)
    for name, checksum in applied.items():
        if compute_checksum(model_tensors[name]) != checksum:
            raise WeightSyncError(
                f"tensor '{name}' of policy version {update.policy_version} was received, but the model contains "
                "different values."
            )
    return dict(receiver.checksums)


@torch.no_grad()
def _receive_from_first_rank(
    model_tensors: Mapping[str, Tensor], weights: Sequence[TensorSpec], shard: ModelShard
) -> None:
    """Receive the weights that rank 0 sends in `apply_update`, and keep this rank's part."""
    for spec in weights:
        target = model_tensors[spec.name]
        whole = shard.broadcast(torch.empty(spec.shape, dtype=target.dtype, device=target.device))
        target.copy_(shard.select(spec.name, whole))


@torch.no_grad()
def reload_weights(model: PreTrainedModel, spec: EngineSpec) -> None:
    """Read all weights of the model from its files again."""
    files = load_causal_lm(spec.model_path, spec.dtype, attention="eager", trust_remote_code=spec.trust_remote_code)
    for own, read in zip(model.parameters(), files.parameters(), strict=True):
        own.copy_(read)


def _list_model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return weights and persistent buffers, or views of them, by checkpoint name; tied weights have several names."""
    state = dict(model.state_dict(keep_vars=True))
    if not has_renamed_weights(model):
        return state
    model_tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = to_checkpoint_tensors(model, name, tensor)
        # If a part were a copy, writing to it would not change the model.
        if any(part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() for part in parts.values()):
            raise WeightSyncError(
                f"tensor '{name}' cannot be updated in place, because its checkpoint format differs from the model's: "
                "use inference.engine=vllm."
            )
        model_tensors |= parts
    return model_tensors


def _check_manifest(
    manifest: tuple[TensorSpec, ...], model_tensors: Mapping[str, Tensor], shard: ModelShard | None
) -> None:
    for spec in manifest:
        if spec.name not in model_tensors:
            raise WeightSyncError(f"the engine's model has no tensor '{spec.name}'.")
        tensor = model_tensors[spec.name]
        shape = tuple(tensor.shape) if shard is None else shard.get_whole_shape(spec.name, tensor)
        if spec.shape != shape:
            raise WeightSyncError(
                f"tensor '{spec.name}' must have shape {shape} for the engine's model, got {spec.shape}."
            )
    # Compared by address instead of name, because one of two tied weights is enough.
    updated = {model_tensors[spec.name].data_ptr() for spec in manifest}
    missing = [name for name, tensor in model_tensors.items() if tensor.data_ptr() not in updated]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise WeightSyncError(f"tensor '{missing[0]}'{more} missing from the trainer's weights.")
