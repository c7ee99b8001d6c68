"""Import, configure and start DeepSpeed for a network.

PyTorch's AdamW is used: DeepSpeed's implementations are compiled at first use, which takes minutes, and round
differently.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from roll.config.training import TrainingConfig
from roll.errors import ModelError
from roll.process_environment import override_environment
from roll.training.network.value import ValueNetwork
from roll.training.spec import TrainerSpec
from roll.version import build_install_command

__all__ = [
    "PERSISTENT_NUMEL",
    "build_deepspeed_config",
    "check_spec",
    "get_local_rank",
    "initialize_frozen",
    "initialize_trained",
    "set_launcher_environment",
]

PERSISTENT_NUMEL = 10_000
"""Stage 3: maximum number of elements of a weight that is replicated on every rank, which is cheaper than gathering."""


def import_deepspeed(device: torch.device) -> Any:
    """Import and return the `deepspeed` package.

    Raises:
        ModelError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # default: the machine's accelerator, not this device
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError as error:
        raise ModelError(
            f"training.backend 'deepspeed' requires DeepSpeed, which cannot be imported ({error}): install it with "
            f"`{build_install_command('deepspeed')}`, or set training.backend to 'torch'"
        ) from error
    # Not used: it takes a minute or two to compile, and names its shared memory by machine and port, which several
    # trainers may share. PyTorch's own collectives suffice.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # the back-end reports or handles its warnings
    return deepspeed


def check_spec(spec: TrainerSpec, device: torch.device) -> None:
    """Reject a spec that cannot be trained, before anything is loaded.

    Raises:
        ModelError: DeepSpeed is not installed, or its stage does not support the model's dtype.
    """
    import_deepspeed(device)
    if spec.role != "reference" and spec.training.deepspeed.zero_stage == 0 and spec.model.dtype != "float32":
        raise ModelError(
            f"training.deepspeed.zero_stage 0 supports only float32, got model.dtype '{spec.model.dtype}': set "
            "zero_stage to 1 or higher"
        )


def build_deepspeed_config(training: TrainingConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a training configuration of ROLL.

    Since the number of micro-batches per batch depends on packing, the back-end marks the last micro-batch, and no
    value is divided by the number of micro-batches.
    """
    settings = training.deepspeed
    zero = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        **({"stage3_param_persistence_threshold": PERSISTENT_NUMEL} if settings.zero_stage == 3 else {}),
        **({"offload_optimizer": {"device": "cpu"}} if settings.offload_optimizer else {}),
        **({"offload_param": {"device": "cpu"}} if settings.offload_parameters else {}),
    }
    float32_sums = {  # gradients are summed and reduced in float32
        # By default DeepSpeed checks only float16 gradients, and a bfloat16 step with NaN would be applied.
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    return {
        # Placeholders: DeepSpeed requires them, but `set_gradient_accumulation_boundary` decides.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm,
        "steps_per_print": 2**31,
        "zero_optimization": zero,
        # With optimizer offload DeepSpeed would otherwise accept only its own CPU AdamW.
        "zero_force_ds_cpu_optimizer": False,
        **(float32_sums if dtype == torch.bfloat16 else {}),
    }


def initialize_trained(
    spec: TrainerSpec,
    network: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    factors: Mapping[str, float],
    *,
    device: torch.device,
) -> Any:
    """Build DeepSpeed's engine around a network, with AdamW; weight decay applies to matrices only.

    The engine returns a network's predictions as a plain tuple.

    Args:
        spec: The spec of the rank, which has joined its process group.
        network: The network on its device.
        trainable: The network's trainable weights, by name.
        factors: Learning rate factors of some weights, by name.
        device: The device of the rank.
    """
    training = spec.training
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        decay = training.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((decay, factors.get(name, 1.0)), []).append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": own, "weight_decay": decay, "factor": factor} for (decay, factor), own in groups.items()],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        fused=True,
    )
    return _initialize(spec, network, device, optimizer=adamw)


def initialize_frozen(spec: TrainerSpec, network: nn.Module, *, device: torch.device) -> Any:
    """Build DeepSpeed's engine around a network that only runs forward passes, partitioned over the ranks."""
    return _initialize(spec, network, device)


def _initialize(spec: TrainerSpec, network: nn.Module, device: torch.device, **options: Any) -> Any:
    deepspeed = import_deepspeed(device)
    if not dist.is_initialized():  # with several ranks the group exists already
        dist.init_process_group("gloo" if device.type == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1)
    config = build_deepspeed_config(spec.training, getattr(torch, spec.model.dtype))
    with set_launcher_environment(get_local_rank(spec, device)):
        root = _TupleOutput(network)
        engine = deepspeed.initialize(model=root, config=config, dist_init_required=False, **options)[0]
        if spec.training.deepspeed.zero_stage == 3:
            # Log-probs are computed from the weight of the projection, without calling the module.
            for parameter in _list_projection_weights(network):
                deepspeed.zero.register_external_parameter(root, parameter)
        return engine


class _TupleOutput(nn.Module):
    """Wraps a network so that it returns a plain tuple, the only output in which DeepSpeed's stage 3 finds tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        return tuple(self.network(*arguments))


def _list_projection_weights(network: Any) -> list[nn.Parameter]:
    """Return the weights of projections and heads, which a network uses without calling their modules.

    DeepSpeed gathers a weight only when its module is called, so these weights must be registered.
    """
    if isinstance(network, ValueNetwork):
        return list(network.score.parameters())
    models = [network.model, *network.frozen_models]
    return [*(model.get_output_embeddings().weight for model in models), *network.heads.values()]


def get_local_rank(spec: TrainerSpec, device: torch.device) -> int:
    """Return the local rank that DeepSpeed's launcher would set: the index of the rank's device."""
    return spec.rank % spec.node_ranks if device.index is None else device.index


@contextlib.contextmanager
def set_launcher_environment(local_rank: int) -> Iterator[None]:
    """Set the environment that DeepSpeed needs for every call, and restore it afterwards.

    `LOCAL_RANK` is set to `local_rank`, and warnings about deprecated names of collectives, which DeepSpeed uses, are
    ignored.
    """
    with override_environment({"LOCAL_RANK": str(local_rank)}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
