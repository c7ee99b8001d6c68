"""Import Megatron, and set up its process groups, data parallelism and optimizer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from roll.errors import ModelError, UnsupportedError
from roll.training.network.pipeline_split import PipelineSplit
from roll.training.spec import TrainerSpec
from roll.version import build_install_command

__all__ = [
    "SUPPORTED_DEVICE_TYPES",
    "all_reduce_gradients",
    "check_spec",
    "create_process_groups",
    "is_expert",
    "reduce_tied_gradients",
    "suppress_import_warnings",
    "wrap_data_parallel",
]

SUPPORTED_DEVICE_TYPES = ("cuda",)
"""Device types that Megatron supports; tests add `cpu` with stand-ins."""


@contextlib.contextmanager
def suppress_import_warnings() -> Iterator[None]:
    """Suppress Megatron's warnings about optional libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_spec(spec: TrainerSpec, device: torch.device) -> None:
    """Check that Megatron can train a spec, before anything is loaded.

    Raises:
        ModelError: Megatron is not installed, or the device or a variant of the adapters is not supported.
    """
    try:
        with suppress_import_warnings():
            import megatron.core.parallel_state  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"training.backend 'megatron' requires Megatron-core, which cannot be imported ({error}): install it with "
            f"`{build_install_command('megatron')}`, or set training.backend to 'torch'"
        ) from error
    if device.type not in SUPPORTED_DEVICE_TYPES:
        raise ModelError(
            f"training.backend 'megatron' requires CUDA devices, got '{device.type}': set training.backend to 'torch'"
        )
    if spec.model.lora is not None and (spec.model.lora.use_dora or spec.model.lora.base != "as_is"):
        key = "use_dora" if spec.model.lora.use_dora else "base"
        raise ModelError(
            f"training.backend 'megatron' does not support model.lora.{key} "
            f"({getattr(spec.model.lora, key)}): remove it, or set training.backend to 'torch'"
        )
    if spec.model.vision.freeze or spec.model.vision.learning_rate_factors:
        raise ModelError(
            "training.backend 'megatron' does not support separate learning rates: remove model.vision, or set "
            "training.backend to 'torch'"
        )


def create_process_groups(spec: TrainerSpec, device: torch.device) -> None:
    """Create Megatron's process groups, which all trainers of a process share. With several ranks, torch's default
    process group must exist already.

    Raises:
        UnsupportedError: Another trainer of this process has a different layout.
    """
    from megatron.core import parallel_state

    parallel = spec.training.parallel
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    # Megatron keeps its groups in global variables, so all trainers of a process share them.
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            parallel.tp,
            parallel.pp,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1,  # ep ranks may be tp ranks, whose tokens differ
            create_gloo_process_groups=False,
            # Only the first stage: `reduce_tied_gradients` sums the gradients of tied weights of two stages.
            get_embedding_ranks=lambda ranks, *unused: ranks[:1],
        )
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    wanted = {name: getattr(parallel, name) for name in found}
    if found != wanted:
        raise UnsupportedError(
            f"a trainer of this process has {_format_sizes(found)}. Megatron supports one layout per process, got "
            f"{_format_sizes(wanted)} for another role: use the same training.parallel for all roles"
        )


def _format_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def wrap_data_parallel(network: nn.Module, config: Any) -> Any:
    """Wrap a network in Megatron's data parallelism, which accumulates gradients in one buffer.

    Args:
        network: The network on its device, with its weights.
        config: Megatron's configuration of the layers.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype == torch.bfloat16, use_distributed_optimizer=True
    )
    return DistributedDataParallel(config, settings, network)


def is_expert(parameter: Any) -> bool:
    """Return whether a parameter belongs to experts, whose gradients are summed over ranks with the same experts."""
    return not getattr(parameter, "allreduce", True)  # Megatron's name


@torch.no_grad()
def reduce_tied_gradients(split: PipelineSplit, parameters: Mapping[str, Any]) -> None:
    """Sum the gradients of tied weights over the two stages that share the weights. Collective."""
    for name in split.tied:
        if not parameters[name].requires_grad:  # adapters are trained instead
            continue
        parameters[name].main_grad.add_(split.stage.exchange_between_ends(parameters[name].main_grad))


def all_reduce_gradients(ddp: Any) -> None:
    """Sum all gradients over the data ranks, and gradients of replicated weights also over the tp ranks. Collective."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    finalize_model_grads([ddp])
