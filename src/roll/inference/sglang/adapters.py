"""The LoRA adapters of an SGLang server: names, versions and files.

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
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from roll.config.model import LoRAConfig
from roll.errors import DataError, InfraError, WeightSyncError
from roll.inference.sglang.client import CONTROL_TIMEOUT_S, SGLangClient
from roll.inference.sglang.lora_arguments import get_module_names, list_layers
from roll.inference.sglang.weights import convert_write_errors
from roll.inference.spec import EngineSpec, reject_adapter
from roll.types import WeightUpdate
from roll.weights import open_update
from roll.weights.adapters import check_adapter_finite, check_adapter_manifest, name_adapter_tensor

__all__ = ["EngineAdapters", "ServedAdapter", "unload_adapter", "unload_left_adapters"]

_PREFIX = "base_model.model."
"""Prefix of the layers in the adapter files of peft, which SGLang reads."""
NAME_PREFIX = "roll-"
"""Prefix of the names of ROLL's adapters in a server."""
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
        """The names of adapters that no request uses, and that the server may still have."""
        self._id = uuid.uuid4().hex[:8]
        self._num_names = 0

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
        """Receive an adapter and write it to the new directory `directory` in the format of peft.

        Returns:
            The checksum of the received bytes, by tensor name.

        Raises:
            WeightSyncError: A value is not finite in `dtype`, or a file cannot be written.
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
        settings = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": get_module_names({**self._layers, **self._unadapted_layers}),
            "bias": "none",
        }
        with convert_write_errors(update, directory):
            directory.mkdir()
            save_file(files, directory / "adapter_model.safetensors", {"format": "pt"})
            (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return dict(receiver.checksums)

    def create_name(self) -> str:
        """Return a new adapter name, which no engine of an earlier run has used at the same server.

        The name is unused until `confirm_update`, because a server that did not confirm it may have loaded it.
        """
        self._num_names += 1
        name = f"{NAME_PREFIX}{self._id}-{self._num_names}"
        self._unused.append(name)
        return name

    def confirm_update(self, update: WeightUpdate, name: str) -> None:
        """Record that the server has loaded an update under `name`, and that requests use it from now on."""
        self._unused.remove(name)
        if (old := self._served.get(update.adapter)) is not None:
            self._unused.append(old.name)
        self._served[update.adapter] = ServedAdapter(name, update.policy_version)

    async def unload_unused(self, client: SGLangClient) -> None:
        """Unload the adapters that no request uses. The server waits for running requests.

        Raises:
            InfraError: The server cannot unload an adapter; the next call tries it again.
            EngineDiedError: The server ended.
        """
        for name in list(self._unused):
            await unload_adapter(client, name)
            self._unused.remove(name)

    def clear(self) -> None:
        """Require a new sync of every adapter; the next `unload_unused` unloads the old ones."""
        self._unused += [served.name for served in self._served.values()]
        self._served.clear()

    @cached_property
    def _layers(self) -> Mapping[str, tuple[int, int]]:
        return list_layers(self._spec, self._lora.target_modules)

    @cached_property
    def _unadapted_layers(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of the layers without adapters that SGLang fuses with a layer that has one, by name."""
        every, found = list_layers(self._spec, "all-linear"), {}
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


async def unload_adapter(client: SGLangClient, name: str) -> None:
    """Unload an adapter. An adapter that the server does not have is ignored.

    Raises:
        InfraError: The server cannot unload the adapter.
        EngineDiedError: The server ended.
    """
    status, reply = await client.post("/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)
    problem = str(reply.get("error_message") or reply.get("message") or reply)
    if (status != 200 or not reply.get("success")) and "does not exist" not in problem:
        raise InfraError(f"engine '{client.engine_id}': SGLang cannot unload '{name}' (HTTP {status}): {problem[:300]}")


async def unload_left_adapters(client: SGLangClient) -> None:
    """Unload the adapters that an earlier run has left in the server, and end its requests, which use them.

    Raises:
        InfraError: The server cannot unload an adapter.
        EngineDiedError: The server ended.
    """
    await client.call("/abort_request", {"abort_all": True})
    for name in await client.list_models():
        if name.startswith(NAME_PREFIX):
            await unload_adapter(client, name)
