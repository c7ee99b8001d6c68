"""Import Megatron, and set up its process groups, data parallelism and optimizer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from roll.config.training import TrainingConfig
from roll.errors import ModelError, UnsupportedError
from roll.training.network.pipeline_split import PipelineSplit
from roll.training.spec import TrainerSpec
from roll.version import build_install_command

__all__ = [
    "SUPPORTED_DEVICE_TYPES",
    "all_reduce_gradients",
    "build_optimizer",
    "check_spec",
    "create_process_groups",
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
    """Raise an error if Megatron cannot train a spec, before anything is loaded.

    Raises:
        ModelError: Megatron is not installed, the device is not supported, or adapters are configured.
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
    if spec.model.lora is not None:
        raise ModelError(
            "training.backend 'megatron' does not support LoRA: remove model.lora, or set training.backend to 'torch'"
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

    tp, pp = spec.training.parallel.tp, spec.training.parallel.pp
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    # Megatron keeps its groups in global variables, so all trainers of a process share them.
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            create_gloo_process_groups=False,
            get_embedding_ranks=lambda ranks, *unused: ranks[
                :1
            ],  # `reduce_tied_gradients` sums tied weights of two stages
        )
    found_tp = parallel_state.get_tensor_model_parallel_world_size()
    found_pp = parallel_state.get_pipeline_model_parallel_world_size()
    if (found_tp, found_pp) != (tp, pp):
        raise UnsupportedError(
            f"a trainer of this process has tp {found_tp} and pp {found_pp}. Megatron supports one layout per "
            f"process, got tp {tp} and pp {pp} for another role: use the same training.parallel for all roles"
        )


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


@torch.no_grad()
def reduce_tied_gradients(split: PipelineSplit, parameters: Mapping[str, Any]) -> None:
    """Sum the gradients of tied weights over the two stages that share the weights. Collective."""
    for name in split.tied:
        parameters[name].main_grad.add_(split.stage.exchange_between_ends(parameters[name].main_grad))


def all_reduce_gradients(ddp: Any) -> None:
    """Sum all gradients over the data ranks, and gradients of replicated weights also over the tp ranks. Collective."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    finalize_model_grads([ddp])


def build_optimizer(
    ddp: Any, trainable: Mapping[str, nn.Parameter], factors: Mapping[str, float], training: TrainingConfig
) -> Any:
    """Build Megatron's distributed optimizer: each data rank updates a part of all weights with PyTorch's AdamW.

    Args:
        ddp: The result of `wrap_data_parallel`.
        trainable: The trainable weights by name; weight decay applies to matrices only.
        factors: Learning rate factors of some weights, by name.
        training: The training configuration, with AdamW's hyperparameters.
    """
    with suppress_import_warnings():
        from megatron.core import parallel_state
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer_config import OptimizerConfig

    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        decay = training.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, factors.get(name, 1.0)), []).append(parameter)
    adamw = torch.optim.AdamW(
        [
            {"params": own, "weight_decay": decay, "factor": factor, "is_expert_parallel": False}
            for (decay, factor), own in groups.items()
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )
    dtype = next(iter(trainable.values())).dtype
    optimizer = DistributedOptimizer(
        adamw,
        OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            # Non-finite gradients must be found before anything changes, so the back-end computes the norm and clips.
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[ddp],
        per_model_buffers={0: ddp.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=dist.get_rank(parallel_state.get_model_parallel_group()),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = None  # all ranks, because each has its part of the gradients
    optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
    return optimizer
