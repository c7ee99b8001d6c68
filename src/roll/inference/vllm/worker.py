"""Weight sync in vLLM's workers: an extension that applies a `WeightUpdate` in the process that holds the model.

Data flow:  engine ─ pickled WeightUpdate ─ collective_rpc ─► every worker: open_update ─► vLLM's reload ─► read back
            engine ◄─ checksums, or an error and whether weights were changed ───────────┘

vLLM fuses projections and repacks weights after loading, so weights cannot be loaded into the running model directly.
On a CPU, layers are packed again as their tensors arrive (`direct`). On other devices, and for models with other
layers, vLLM's layer-wise reload is used. A manifest that differs from the checkpoint is rejected before any weight
changes.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from roll.errors import UnsupportedError, WeightSyncError
from roll.inference.manifests import check_manifest, read_checkpoint_shapes
from roll.inference.vllm import continuation, kernels, lora_kernels, routing
from roll.inference.vllm.adapter_worker import apply_adapter
from roll.inference.vllm.direct import DirectLoader, TensorPlacement, plan_direct_load
from roll.inference.vllm.environment import is_cpu_build
from roll.inference.vllm.quantized import (
    DERIVED_PARAMETERS,
    QuantizedLayer,
    check_quantized_manifest,
    compute_held_checksums,
    find_quantized_layers,
    register_loader,
)
from roll.inference.vllm.quantized_kernels import register_quantized_kernels
from roll.openmp import start_spin_control
from roll.types import WeightUpdate
from roll.weights import open_update
from roll.weights.quantization import dequantize_stream, drop_scales

__all__ = ["WeightReceiver", "check_weights_applied"]

logger = logging.getLogger("vllm.roll")
"""A child of vLLM's logger, so that its messages are written to vLLM's log."""
PERSISTENT_TRANSPORTS = frozenset({"shared_memory", "store"})
"""Transports whose tensors stay valid until the sync ends."""


if "vllm" in sys.modules:  # a worker imports this module before it builds the model
    kernels.register_cpu_kernels()
    lora_kernels.register_lora_kernels()
    continuation.register()
    register_loader()
    register_quantized_kernels()
    if is_cpu_build():
        start_spin_control()


class WeightReceiver:
    """A mixin for vLLM's worker class (`worker_extension_cls`); the engine calls its methods with `collective_rpc`."""

    def roll_list_resources(self) -> dict[str, Any]:
        """Return the processes (this worker and its parent) and the files to remove when the engine is closed."""
        method = str(getattr(self, "distributed_init_method", ""))
        files = [method.removeprefix("file://")] if method.startswith("file://") else []
        return {"processes": [os.getpid(), os.getppid()], "files": files}

    def roll_record_experts(self, max_rows: int, by_vllm: bool) -> dict[str, Any]:
        """Start recording the chosen experts. With `by_vllm`, vLLM records them; this method only finds MoE layers.

        Returns:
            `{"layers": …}` with the indices of MoE layers, or `{"error": …}`.
        """
        runner = getattr(self, "model_runner")  # noqa: B009 - of vLLM's worker, which this is mixed into
        try:
            if not by_vllm:
                self._roll_experts = routing.RoutingRecorder(runner, max_rows)
            return {"layers": list(routing.find_moe_layers(runner.get_model()))}
        except UnsupportedError as error:
            return {"error": str(error)}

    def roll_pop_experts(self, name: str) -> tuple[str, list[int], bytes] | None:
        """Remove and return the experts of a request's first n tokens, as dtype, shape [n, layers, k] and bytes."""
        experts = self._roll_experts.pop_experts(name)
        # vLLM does not decode arrays inside results, so dtype, shape and bytes are sent.
        return None if experts is None else (experts.dtype.str, list(experts.shape), experts.tobytes())

    def roll_read_checksums(self) -> dict[str, int]:
        """Return the checksums of the codes and scales that the layers contain; see `compute_held_checksums`."""
        return compute_held_checksums(_get_quantized_layers(self))

    def roll_update_weights(self, payload: bytes) -> dict[str, Any]:
        """Receive and apply the weights of a pickled `WeightUpdate`, or those of an adapter.

        Args:
            payload: A pickled pair of the update and the `AdapterTarget`, which is `None` if the update contains all
                weights.

        Returns:
            `{"checksums": …}`, or `{"error": …, "intact": …}`, where `intact` is true if no weight has been changed.
        """
        progress = {"intact": True}
        try:
            update, target = pickle.loads(payload)
            if target is not None:
                return {"checksums": apply_adapter(self, update, target, progress)}
            return {"checksums": _update(self, update, progress)}
        except WeightSyncError as error:
            logger.error("%s", error)
            return {"error": str(error), **progress}
        except Exception as error:  # returned, because vLLM would not preserve its type; the engine raises it
            logger.exception("a weight update failed")
            return {"error": f"{type(error).__name__}: {error}", **progress}


def _update(worker: Any, update: WeightUpdate, progress: dict[str, bool]) -> dict[str, int]:
    expected = _get_expected_shapes(worker)
    if expected is not None:
        tied = bool(getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False))
        check_manifest(drop_scales(update.manifest), expected, tied=tied, policy_version=update.policy_version)
    model, quantized = worker.get_model(), _get_quantized_layers(worker)
    if quantized:
        check_quantized_manifest(quantized, update.manifest, update.policy_version)
    unmodified = _list_unmodified_parameters(model, sharded=worker.parallel_config.tensor_parallel_size > 1)
    sent: dict[str, torch.Tensor] = {}
    workers = worker.parallel_config.world_size
    with open_update(update, device=worker.device, worker=worker.rank, num_workers=workers) as receiver:

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            dtype = worker.model_config.dtype
            received = receiver if quantized else dequantize_stream(receiver, update.manifest, dtype)
            for name, tensor in received:
                # vLLM keeps a layer's tensors until the layer is complete, longer than the receiver's buffer is valid.
                kept = tensor.to(worker.device, copy=update.transport not in PERSISTENT_TRANSPORTS)
                if name in unmodified:
                    sent[name] = kept
                progress["intact"] = False
                yield name, kept

        direct = _plan_placements(worker, model, expected)
        if direct is not None:
            load, loaded = DirectLoader(direct), None
            for name, tensor in stream():
                load.load_tensor(name, tensor)
            if lacking := sorted(load.finish()):
                raise WeightSyncError(
                    f"weight sync: the update is incomplete: parts of the fused vLLM layer of '{lacking[0]}' are "
                    "missing."
                )
        else:
            with _reload_layers(worker, model):
                loaded = model.load_weights(stream())
    _repack_tied_outputs(worker, model)
    check_weights_applied(model, loaded, unmodified, sent, update.policy_version)
    return receiver.checksums


def _get_expected_shapes(worker: Any) -> dict[str, tuple[int, ...]] | None:
    if not hasattr(worker, "_roll_expected_shapes"):
        worker._roll_expected_shapes = read_checkpoint_shapes(worker.model_config.model)
    return worker._roll_expected_shapes


def _get_quantized_layers(worker: Any) -> list[QuantizedLayer]:
    if not hasattr(worker, "_roll_quantized_layers"):
        worker._roll_quantized_layers = find_quantized_layers(worker.get_model())
    return worker._roll_quantized_layers


def _plan_placements(
    worker: Any, model: torch.nn.Module, expected: Mapping[str, tuple[int, ...]] | None
) -> dict[str, TensorPlacement] | None:
    """Return the placements of tensors for `DirectLoader`; `None` if the weights must be loaded by vLLM's reload."""
    if not hasattr(worker, "_roll_places"):
        tied = bool(getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False))
        alone = worker.parallel_config.world_size == 1 and worker.device.type == "cpu"
        worker._roll_places = plan_direct_load(model, expected, tied=tied) if alone and expected is not None else None
        logger.info(
            "weight syncs %s", "load tensors directly into the layers" if worker._roll_places else "use vLLM's reload"
        )
    return worker._roll_places


@contextmanager
def _reload_layers(worker: Any, model: torch.nn.Module) -> Generator[None]:
    """Enable vLLM's layer-wise reload within this context. The caller runs the model's `load_weights` inside it.

    See https://docs.vllm.ai/en/latest/training/layerwise/.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        set_current_vllm_config(worker.vllm_config),
        set_default_torch_dtype(worker.model_config.dtype),  # as in the initial load; kernels read it
        torch.no_grad(),
        _repack_experts_on_reload(model),
    ):
        initialize_layerwise_reload(model)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the original error is raised below
                finalize_layerwise_reload(model, worker.model_config)
            raise
        finalize_layerwise_reload(model, worker.model_config)


@contextmanager
def _repack_experts_on_reload(model: torch.nn.Module) -> Generator[None]:
    """Make a weight reload pack MoE experts in the same way as the initial load."""
    # On a CPU, vLLM 0.32 packs experts only when it builds their kernel, which it does once
    # (`UnquantizedFusedMoEMethod._setup_kernel`). A reload would copy unpacked weights into the packed ones, whose
    # padded shapes differ. So kernels are built again. This can be removed when `_setup_kernel` packs updated weights.
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    kernels = {}
    for method in (getattr(module, "quant_method", None) for module in model.modules()):
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU:
            kernels[method], method.moe_kernel = method.moe_kernel, None
    try:
        yield
    finally:  # a layer that received no weights keeps its kernel
        for method, kernel in kernels.items():
            method.moe_kernel = method.moe_kernel or kernel


def _repack_tied_outputs(worker: Any, model: torch.nn.Module) -> None:
    """Pack tied output layers again after the input embedding has changed."""
    # On a CPU, vLLM 0.32 computes a tied output layer with a packed copy. The layer-wise reload does not update it,
    # because the layer has no tensor in the checkpoint. Elsewhere the layer computes with the shared storage. This can
    # be removed when the reload updates the copy.
    if worker.device.type != "cpu":
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    inputs = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in inputs:
            module.quant_method.process_weights_after_loading(module)


def _list_unmodified_parameters(model: torch.nn.Module, *, sharded: bool) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that vLLM stores unchanged: norms, and the input embedding unless it is sharded."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kept = {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}
    if not sharded:
        kept |= {f"{name}.weight" for name, part in model.named_modules() if type(part) is VocabParallelEmbedding}
    return {name: parameter for name, parameter in model.named_parameters() if name in kept}


def check_weights_applied(
    model: torch.nn.Module,
    loaded: set[str] | None,
    unmodified: Mapping[str, torch.nn.Parameter],
    received: Mapping[str, torch.Tensor],
    policy_version: int,
) -> None:
    """Check that every parameter was loaded, and that parameters that vLLM stores unchanged equal the sent tensors.

    Raises:
        WeightSyncError: a parameter was not loaded, or differs from the sent tensor; the message names the first one.
    """
    about = f"weight sync of policy version {policy_version}"
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] not in DERIVED_PARAMETERS}
    missing = sorted(names - loaded) if loaded is not None else []
    if missing:
        raise WeightSyncError(f"{about}: vLLM's '{missing[0]}' was not loaded ({len(missing)} such parameters).")
    for name, sent in received.items():
        held = unmodified[name].data
        if held.dim() == sent.dim() and held.shape[1:] == sent.shape[1:] and held.shape[0] >= sent.shape[0]:
            held = held[: sent.shape[0]]  # vLLM pads the vocabulary
            if not torch.equal(held, sent.to(held.dtype)):
                raise WeightSyncError(
                    f"{about}: tensor '{name}' was received, but the engine contains different values."
                )
