"""The LoRA adapters of an SGLang server: names, versions, files, and the server's arguments.

SGLang cannot replace an adapter. Each sync loads an adapter under a new name and unloads the old one. KV cache entries
belong to a name, so entries of old weights are not used again. The engine aborts running requests before a sync, and
continues their tokens with the new adapter, because the server would use the old one.

SGLang reads one rank and one scale per adapter. Matrices of a smaller rank are filled with zeros, and B is multiplied
by the layer's scale, so that SGLang's own scale is 1.

SGLang computes q, k and v in one layer, and gate and up in another, and needs an adapter of each part. If
`model.lora.target_modules` selects only some of the parts, the other parts get adapters of zeros: without them, the
server rejects the adapter, or ends at the first request that uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from roll.config.model import LoRAConfig
from roll.errors import DataError, ModelError, WeightSyncError
from roll.inference.spec import EngineSpec, reject_adapter
from roll.models import list_adapted_layers
from roll.types import WeightUpdate
from roll.weights import open_update
from roll.weights.adapters import check_adapter_finite, check_adapter_manifest, name_adapter_tensor

__all__ = ["EngineAdapters", "ServedAdapter", "build_lora_arguments"]

_PREFIX = "base_model.model."
"""Prefix of the layers in the adapter files of peft, which SGLang reads."""
_FUSED_MODULES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of layers that SGLang computes as one layer."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that the server has loaded."""

    name: str
    """The adapter's name in the server, for the field `lora_path` of requests."""
    policy_version: int


class EngineAdapters:
    """The adapters of one engine; the policy's adapter has the name `None`.

    Args:
        spec: The spec of the engine. Without `lora`, the engine rejects requests that name an adapter.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._served: dict[str | None, ServedAdapter] = {}
        self._unused: list[str] = []
        """The names of replaced adapters that the server has not unloaded yet."""
        self._num_loaded = 0

    @property
    def enabled(self) -> bool:
        """True if weight updates contain an adapter instead of all weights."""
        return self._spec.lora is not None

    def get_served(self, adapter: str | None) -> ServedAdapter | None:
        """Return the adapter that a request names; `None` if the request uses the model's own weights.

        Raises:
            DataError: The engine has not received an adapter of this name.
            UnsupportedError: The engine has no adapters.
        """
        if not self.enabled:
            reject_adapter("sglang", adapter)
        served = self._served.get(adapter)
        if served is None and adapter is not None:
            raise DataError(
                f"a request names the adapter '{adapter}', which the engine has not received: sync it first."
            )
        return served

    def check_update(self, update: WeightUpdate) -> None:
        """Check that an update is an adapter that the engine can add or replace.

        Raises:
            WeightSyncError: A tensor is missing, unknown or has the wrong shape, or there are too many adapters.
        """
        if update.adapter not in self._served and len(self._served) >= self._spec.max_adapters:
            raise WeightSyncError(
                f"adapter '{update.adapter}' cannot be added: the engine has {len(self._served)} adapters, its maximum "
                f"(EngineSpec.max_adapters is {self._spec.max_adapters})."
            )
        check_adapter_manifest(update.manifest, self._layers, self._lora, policy_version=update.policy_version)

    def write(self, update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
        """Receive an adapter and write it to `directory` in the format of peft.

        Returns:
            The checksum of the received bytes, by tensor name.

        Raises:
            WeightSyncError: A value is not finite in `dtype`.
            OSError: A file cannot be written.
        """
        from safetensors.torch import save_file

        with open_update(update, device="cpu") as receiver:
            received = {name: tensor.clone() for name, tensor in receiver}
        rank = self._lora.max_rank
        tensors: dict[str, Tensor] = {}
        for layer in self._layers:
            a, b = (received[name_adapter_tensor(layer, part)] for part in ("lora_A.weight", "lora_B.weight"))
            missing = rank - len(a)
            scaled = b.float() * self._lora.compute_scale(layer)
            for part, tensor, padding in (("A", a, (0, 0, 0, missing)), ("B", scaled, (0, missing))):
                padded = torch.nn.functional.pad(tensor.to(dtype), padding)
                tensors[name_adapter_tensor(layer, f"lora_{part}.weight")] = padded.contiguous()
        check_adapter_finite(tensors, policy_version=update.policy_version)
        for layer, (outputs, inputs) in self._unadapted_layers.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[name_adapter_tensor(layer, f"lora_{part}.weight")] = torch.zeros(shape, dtype=dtype)
        files = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
        save_file(files, directory / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": _get_module_names({**self._layers, **self._unadapted_layers}),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return dict(receiver.checksums)

    def create_name(self) -> str:
        """Return a new adapter name."""
        self._num_loaded += 1
        return f"roll-{self._num_loaded}"

    def confirm_update(self, update: WeightUpdate, name: str) -> list[str]:
        """Record that the server has loaded an update under `name`; return the names that it can unload now."""
        unused, self._unused = self._unused, []
        if (old := self._served.get(update.adapter)) is not None:
            unused.append(old.name)
        self._served[update.adapter] = ServedAdapter(name, update.policy_version)
        return unused

    def clear(self) -> None:
        """Require a new sync of every adapter."""
        self._unused += [served.name for served in self._served.values()]
        self._served.clear()

    @cached_property
    def _layers(self) -> Mapping[str, tuple[int, int]]:
        return _list_layers(self._spec, self._lora.target_modules)

    @cached_property
    def _unadapted_layers(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of the layers without adapters that SGLang fuses with a layer that has one, by name."""
        every, found = _list_layers(self._spec, "all-linear"), {}
        for layer in self._layers:
            parent, _, module = layer.rpartition(".")
            for fused in _FUSED_MODULES:
                siblings = [f"{parent}.{each}" for each in fused] if module in fused else []
                found |= {name: every[name] for name in siblings if name in every and name not in self._layers}
        return found

    @property
    def _lora(self) -> LoRAConfig:
        assert self._spec.lora is not None, "the engine has adapters"
        return self._spec.lora


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
        "lora-target-modules": _get_module_names(_list_layers(spec, spec.lora.target_modules)),
        "max-loras-per-batch": spec.max_adapters + 1,  # SGLang counts requests without an adapter as one
        "max-loaded-loras": spec.max_adapters + 2,  # during a sync, the old and the new adapter are loaded
        "lora-strict-loading": True,
        "enable-weights-cpu-backup": spec.sleeps,  # no sync restores the model's weights after sleep
    }


def _list_layers(spec: EngineSpec, targets: Sequence[str] | Literal["all-linear"]) -> Mapping[str, tuple[int, int]]:
    return list_adapted_layers(
        spec.model_path,
        "all-linear" if targets == "all-linear" else tuple(targets),
        trust_remote_code=spec.trust_remote_code,
    )


def _get_module_names(layers: Mapping[str, Any]) -> list[str]:
    return sorted({layer.rpartition(".")[2] for layer in layers})
