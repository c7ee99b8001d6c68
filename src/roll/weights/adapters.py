"""The tensors of a LoRA adapter in a weight sync: their names, and the checks of an engine that applies them.

    layer        model.layers.0.self_attn.q_proj        [outputs, inputs]
    tensors      <layer>.lora_A.weight                  [rank, inputs]
                 <layer>.lora_B.weight                  [outputs, rank]
                 <layer>.lora_magnitude_vector          [outputs], only with DoRA

These are the names of peft, without its prefix. Ranks and scales follow from the run's `model.lora`, which trainer and
engines both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from roll.config.model import LoRAConfig
from roll.errors import WeightSyncError
from roll.types import TensorSpec

__all__ = [
    "ADAPTER_PARTS",
    "check_adapter_finite",
    "check_adapter_manifest",
    "name_adapter_tensor",
    "split_adapter_name",
]

ADAPTER_PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""The names of an adapter's tensors, after the name of the layer."""

ADAPTER_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which an adapter can be sent."""


def name_adapter_tensor(layer: str, part: str) -> str:
    """Return the name of a layer's adapter tensor; `part` is one of `ADAPTER_PARTS`."""
    return f"{layer}.{part}"


def split_adapter_name(name: str) -> tuple[str, str] | None:
    """Return the layer and the part of an adapter tensor; `None` if the name is not that of an adapter tensor."""
    for part in ADAPTER_PARTS:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return None


def check_adapter_manifest(
    manifest: Sequence[TensorSpec], layers: Mapping[str, tuple[int, ...]], lora: LoRAConfig, *, policy_version: int
) -> None:
    """Compare an update's manifest with the adapter that an engine expects.

    Args:
        manifest: The manifest of the update.
        layers: The shapes [outputs, inputs] of the layers with adapters, by name.
        lora: The configuration of the adapters.
        policy_version: The version of the update, for messages.

    Raises:
        WeightSyncError: a tensor is missing, unknown, or sent twice, or has the wrong shape or dtype; the message names
            it.
    """
    about = f"weight sync of policy version {policy_version}: adapter tensor"
    expected: dict[str, tuple[int, ...]] = {}
    for layer, (outputs, inputs) in layers.items():
        rank = lora.get_rank(layer)
        shapes = [(rank, inputs), (outputs, rank), *([(outputs,)] if lora.use_dora else [])]
        for part, shape in zip(ADAPTER_PARTS, shapes, strict=False):
            expected[name_adapter_tensor(layer, part)] = shape
    announced = {spec.name: tuple(spec.shape) for spec in manifest}
    if len(announced) < len(manifest):
        names = [spec.name for spec in manifest]
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightSyncError(f"{about} '{twice}' is sent more than once.")
    for spec in manifest:
        name, shape = spec.name, tuple(spec.shape)
        if name not in expected:
            raise WeightSyncError(
                f"{about} '{name}' does not belong to the engine's adapters: model.lora selects "
                f"{len(layers)} layers, such as '{next(iter(layers), '')}'."
            )
        if shape != expected[name]:
            raise WeightSyncError(f"{about} '{name}' must have shape {expected[name]}, got {shape}.")
        if spec.dtype not in ADAPTER_DTYPES:
            raise WeightSyncError(
                f"{about} '{name}' must have one of the dtypes {', '.join(ADAPTER_DTYPES)}, got {spec.dtype}."
            )
    if missing := [name for name in expected if name not in announced]:
        raise WeightSyncError(
            f"{about} '{missing[0]}' is missing from the update ({len(missing)} of {len(expected)} are missing)."
        )


def check_adapter_finite(tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
    """Reject a received adapter with NaN or infinite values, before an engine applies it.

    Args:
        tensors: The tensors in the dtype of the engine, by name.
        policy_version: The version of the update, for messages.

    Raises:
        WeightSyncError: a value is not finite; the message names the first tensor.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: adapter tensor '{name}' has NaN or infinite values "
                f"in {str(tensor.dtype).removeprefix('torch.')}: resume from an earlier checkpoint with a lower "
                "training.learning_rate."
            )
