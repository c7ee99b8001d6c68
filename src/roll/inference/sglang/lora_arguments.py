"""The arguments of an SGLang server that serves LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll.errors import ModelError
from roll.inference.spec import EngineSpec
from roll.models import list_adapted_layers

__all__ = ["build_lora_arguments", "get_module_names", "list_layers"]


def build_lora_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the server's arguments for the adapters of a spec.

    Raises:
        ModelError: SGLang cannot apply such adapters.
    """
    if spec.lora is None:
        return {}
    if spec.lora.use_dora:
        raise ModelError(
            "SGLang does not support DoRA adapters (model.lora.use_dora): set weight_sync.lora to merged, or "
            "inference.engine to hf"
        )
    return {
        "enable-lora": True,
        "max-lora-rank": spec.lora.max_rank,
        "lora-target-modules": get_module_names(list_layers(spec, spec.lora.target_modules)),
        "max-loras-per-batch": spec.max_adapters + 1,  # SGLang counts requests without an adapter as one
        "max-loaded-loras": spec.max_adapters + 2,  # during a sync, the old and the new adapter are loaded
        "lora-strict-loading": True,
        "enable-weights-cpu-backup": spec.sleeps,  # no sync restores the model's weights after sleep
    }


def list_layers(spec: EngineSpec, targets: Sequence[str] | Literal["all-linear"]) -> Mapping[str, tuple[int, int]]:
    """Return the shapes [outputs, inputs] of the layers of the spec's model that `targets` selects, by name."""
    return list_adapted_layers(
        spec.model_path,
        "all-linear" if targets == "all-linear" else tuple(targets),
        trust_remote_code=spec.trust_remote_code,
    )


def get_module_names(layers: Mapping[str, Any]) -> list[str]:
    """Return the last parts of the names of layers, each once."""
    return sorted({layer.rpartition(".")[2] for layer in layers})
