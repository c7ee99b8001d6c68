"""LoRA adapters in vLLM's workers: updates are applied in memory, without files.

Data flow:  engine ─ pickled WeightUpdate and AdapterTarget ─ collective_rpc ─► every worker: open_update ─► LoRAModel
            ─► vLLM's LoRA manager (the slot of the adapter) ─► compared with the received tensors ─► checksums

The weights of the model never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roll.errors import WeightSyncError
from roll.inference.vllm.adapters import AdapterTarget
from roll.types import WeightUpdate
from roll.weights import open_update
from roll.weights.adapters import check_adapter_finite, check_adapter_manifest, name_adapter_tensor

__all__ = ["apply_adapter"]


@torch.inference_mode()
def apply_adapter(
    worker: Any, update: WeightUpdate, target: AdapterTarget, progress: dict[str, bool]
) -> dict[str, int]:
    """Receive an adapter, and put it into the slot of the adapter with the same number.

    Args:
        worker: vLLM's worker.
        update: The update.
        target: The adapter that the update replaces.
        progress: Receives `intact: False` before the slot changes.

    Returns:
        The checksum of the received bytes, by tensor name.

    Raises:
        WeightSyncError: A tensor is missing, unknown or not finite, or has the wrong shape, vLLM has no adapters for a
            layer, or a slot does not contain the tensors that were received.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    version, lora = update.policy_version, target.lora
    check_adapter_manifest(update.manifest, target.layers, lora, policy_version=version)
    manager = worker.model_runner.lora_manager._adapter_manager
    places = _find_places(manager, target.layers, version)
    workers = worker.parallel_config.world_size
    with open_update(update, device=worker.device, worker=worker.rank, num_workers=workers) as receiver:
        dtype = manager.lora_config.lora_dtype
        tensors = {name: tensor.to(worker.device, dtype, copy=True) for name, tensor in receiver}
    check_adapter_finite(tensors, policy_version=version)
    layers: dict[str, Any] = {}
    sent: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in target.layers:
        a, b = (tensors[name_adapter_tensor(layer, part)] for part in ("lora_A.weight", "lora_B.weight"))
        scale = lora.compute_scale(layer)
        # vLLM multiplies B by the scale in place.
        layers[layer] = LoRALayerWeights(layer, len(a), round(lora.alpha), a, b.clone(), scaling=scale)
        sent[layer] = a, b * scale
    progress["intact"] = False
    manager.remove_adapter(target.number)
    manager.add_adapter(LoRAModel(target.number, lora.max_rank, layers))
    manager.activate_adapter(target.number)
    _check_slot(manager, target.number, places, sent, version)
    return receiver.checksums


def _find_places(manager: Any, layers: Mapping[str, Any], version: int) -> dict[str, tuple[Any, int]]:
    """Return the module with the slots of each layer, and the layer's index in this module, which may be fused."""
    fused = {
        layer: (manager.modules[parent], index)
        for parent, names in manager.packed_modules.items()
        for index, layer in enumerate(names)
    }
    places: dict[str, tuple[Any, int]] = {}
    for layer in layers:
        if layer in manager.modules:
            places[layer] = manager.modules[layer], 0
        elif layer in fused:
            places[layer] = fused[layer]
        else:
            raise WeightSyncError(
                f"weight sync of policy version {version}: vLLM cannot apply an adapter to the layer '{layer}' of this "
                "model: set weight_sync.lora to merged."
            )
    return places


def _check_slot(
    manager: Any,
    number: int,
    places: Mapping[str, tuple[Any, int]],
    sent: Mapping[str, tuple[Tensor, Tensor]],
    version: int,
) -> None:
    """Check that a slot contains the tensors that were sent, and that the last slot is empty."""
    about = f"weight sync of policy version {version}"
    slot = manager.lora_index_to_id.index(number)
    if manager.lora_index_to_id[-1] is not None:
        # vLLM 0.32 computes rows without an adapter with the last slot.
        raise WeightSyncError(f"{about}: adapter {number} is in vLLM's last slot, which rows without an adapter use.")
    for layer, tensors in sent.items():
        module, index = places[layer]
        if module.tp_size > 1:
            continue  # a worker stores a part of the tensors
        for stacked, tensor in zip((module.lora_a_stacked, module.lora_b_stacked), tensors, strict=True):
            rows, columns = tensor.shape
            if not torch.equal(stacked[index][slot, 0, :rows, :columns], tensor):
                raise WeightSyncError(f"{about}: the adapter of '{layer}' was received, but vLLM has other values.")
