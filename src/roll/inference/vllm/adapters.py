"""The LoRA adapters of a vLLM engine: names, versions, and vLLM's arguments.

An adapter has a fixed number in vLLM. A weight sync replaces its tensors in the workers (`adapter_worker`)
while the scheduler is paused, and then drops the prefix cache, as after a sync of all weights. Running requests keep
their number, so they continue with the new tensors, and recompute their keys and values.

vLLM 0.32 has five defects on a CPU. This module and its callers work around them:

- The prefix cache distinguishes adapters by name and path, not by content. It is dropped after every sync.
- Rows without an adapter use the last slot. One additional slot is allocated, so that the last slot stays empty.
- Prompt log-probs of several requests fail if the output layer has adapters. It never gets adapters here.
- Experts are computed with Triton if the engine has adapters. MoE models are rejected.
- Adapter products gather a matrix for each token. `lora_kernels` replaces these products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.config.model import LoRAConfig
from roll.errors import DataError, ModelError, WeightSyncError
from roll.inference.spec import EngineSpec, reject_adapter
from roll.inference.vllm.conversion import INITIAL_VERSION
from roll.inference.vllm.description import MAX_LORA_RANK
from roll.models import describe_model, list_adapted_layers
from roll.models.multimodal import has_media_config
from roll.types import WeightUpdate

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["AdapterTarget", "EngineAdapters", "build_lora_arguments"]

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_LORA_RANK)
"""The values that vLLM accepts as the largest rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTarget:
    """The adapter that a weight update replaces, for vLLM's workers."""

    number: int
    """The adapter's number in vLLM, from 1."""
    lora: LoRAConfig
    layers: Mapping[str, tuple[int, int]]
    """The shapes [outputs, inputs] of all layers with adapters, by name."""


class EngineAdapters:
    """The adapters of one engine; the policy's adapter has the name `None`.

    Args:
        spec: The spec of the engine. Without `lora`, the engine rejects requests and updates that name an adapter.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._numbers: dict[str | None, int] = {}
        self._versions: list[Mapping[str | None, int]] = [{}]
        """The policy versions of all adapters after each sync. vLLM has one version per engine, the index in this
        list."""

    def build_target(self, adapter: str | None) -> AdapterTarget | None:
        """Return the target of an update; `None` if updates contain all weights.

        Raises:
            WeightSyncError: The adapter is new, and the engine has the maximum number of adapters.
            UnsupportedError: The engine has no adapters.
        """
        if self._spec.lora is None:
            reject_adapter("vllm", adapter)
            return None
        number = self._numbers.get(adapter, len(self._numbers) + 1)
        if number > self._spec.max_adapters:
            raise WeightSyncError(
                f"adapter '{adapter}' cannot be added: the engine has {len(self._numbers)} adapters, its maximum "
                f"(EngineSpec.max_adapters is {self._spec.max_adapters})."
            )
        return AdapterTarget(number=number, lora=self._spec.lora, layers=_list_layers(self._spec))

    def confirm_update(self, update: WeightUpdate, target: AdapterTarget | None) -> str:
        """Record that an update was applied; return vLLM's weight version for later tokens."""
        if target is None:
            return str(update.policy_version)
        self._numbers[update.adapter] = target.number
        self._versions.append({**self._versions[-1], update.adapter: update.policy_version})
        return str(len(self._versions) - 1)

    def get_version(self, adapter: str | None, vllm_version: str) -> int:
        """Return the policy version of an adapter for vLLM's weight version of a token."""
        number = int(vllm_version)
        return number if self._spec.lora is None else self._versions[number].get(adapter, INITIAL_VERSION)

    def build_request(self, adapter: str | None) -> LoRARequest | None:
        """Return vLLM's LoRA request for an adapter; `None` if the frozen weights are used.

        Raises:
            DataError: The engine has not received this adapter. vLLM would end the engine.
            UnsupportedError: The engine has no adapters.
        """
        if self._spec.lora is None:
            reject_adapter("vllm", adapter)
            return None
        from vllm.lora.request import LoRARequest

        number = self._numbers.get(adapter)
        if number is None and adapter is not None:
            raise DataError(
                f"a request names the adapter '{adapter}', which the engine has not received: sync it first."
            )
        return None if number is None else LoRARequest(f"roll-{number}", number, f"roll/{number}")


def build_lora_arguments(spec: EngineSpec, *, cpu: bool) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs` for the adapters of a spec.

    Args:
        spec: The spec of the engine.
        cpu: Whether vLLM computes on the CPU.

    Raises:
        ModelError: vLLM cannot apply such adapters to the model.
    """
    if spec.lora is None:
        return {}
    advice = "set weight_sync.lora to merged, or inference.engine to hf"
    if spec.lora.use_dora:
        raise ModelError(f"vLLM does not support DoRA adapters (model.lora.use_dora): {advice}")
    if has_media_config(spec.model_path):
        raise ModelError(f"adapters of '{spec.model_path}', which reads media, are not supported with vLLM: {advice}")
    if cpu and describe_model(spec.model_path).num_experts > 1:
        # With adapters, vLLM 0.32 computes experts with Triton even on a CPU, and the first request ends the engine.
        raise ModelError(
            f"adapters of '{spec.model_path}', which has experts, are not supported by vLLM on a CPU: {advice}"
        )
    rank = next((each for each in VLLM_RANKS if each >= spec.lora.max_rank), None)
    if rank is None:
        raise ModelError(
            f"vLLM supports adapters up to rank {VLLM_RANKS[-1]}, but model.lora has rank {spec.lora.max_rank}: lower "
            f"the rank, {advice}"
        )
    slots = spec.max_adapters + 1
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": rank,
        # Without the output layer: adapters on it break prompt log-probs.
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in _list_layers(spec)}),
    }


def _list_layers(spec: EngineSpec) -> Mapping[str, tuple[int, int]]:
    assert spec.lora is not None
    targets = spec.lora.target_modules
    return list_adapted_layers(
        spec.model_path,
        targets if targets == "all-linear" else tuple(targets),
        trust_remote_code=spec.trust_remote_code,
    )
