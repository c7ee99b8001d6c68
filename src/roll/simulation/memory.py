"""Estimate the device memory of a plan's roles."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.activation_memory import estimate_activation_bytes_per_token, estimate_gathered_bytes
from roll.config.estimate import RoleMemory, estimate_training_bytes
from roll.config.model import ModelConfig, VisionConfig
from roll.config.parallel import ParallelConfig
from roll.config.simulation import SimulationConfig
from roll.config.tower_memory import estimate_tower_bytes
from roll.config.training import TrainingConfig
from roll.simulation.costs import compute_kv_capacity
from roll.simulation.hardware import Device, Model

__all__ = [
    "TrainerSettings",
    "compute_switch_s",
    "estimate_memory",
    "estimate_trainer_bytes",
    "find_memory_problem",
]

STATE_BYTES = 12
"""Bytes per trained parameter in addition to its weight: a gradient and two moments in float32."""
MAX_TRAINER_MEMORY_FRACTION = 0.9
"""Fraction of a device's memory that a plan may use for a trainer."""
STATE_PARTS = {"weights", "weights in 4 bits", "master weights", "optimizer", "AdamW"}
"""Parts of a trainer rank's memory that are moved when shared devices switch to another role."""
RESERVED_PROMPT_TOKENS = 1024
"""Number of prompt tokens for which a sequence must have room in addition to its longest answer. If the model accepts
images, all of them may be images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Settings of a run that affect a trainer's memory, and the rules by which it can share devices."""

    model: ModelConfig
    training: TrainingConfig
    can_stream: bool = True
    """False if the run's pipeline or algorithm does not support `cluster.sharing: stream_training`."""


def estimate_trainer_bytes(
    model: Model, device: Device, *, ranks: int, max_length: int, ep: int = 1, trainer: TrainerSettings | None = None
) -> dict[str, int]:
    """Return the memory of one trainer rank in bytes, by component, such as gradients.

    The estimate assumes that all ranks shard the weights, and that a micro-batch is one sample of the maximum length.

    Args:
        model: The trained model.
        device: The device of a rank.
        ranks: Number of the trainer's ranks.
        max_length: Tokens of the longest sample.
        ep: Number of ranks over which the experts are sharded.
        trainer: The settings of a run; by default all weights with AdamW and activation checkpointing.
    """
    if trainer is not None:
        parallel = trainer.training.parallel.model_copy(update={"ep": ep})
        training = trainer.training.model_copy(update={"parallel": parallel})
        accelerator = device.name != "cpu"
        return estimate_training_bytes(
            trainer.model,
            training,
            model,
            max_length,
            ranks,
            micro_batches=1,
            on_accelerator=accelerator,
            media_tokens=RESERVED_PROMPT_TOKENS,
        )
    parameters, element = model.num_parameters, model.element_bytes
    own_copy = element if ranks == 1 and element != 4 else 0  # shards are gathered in the dtype of the computation
    parallel = ParallelConfig(ep=ep)
    return {
        "weights": parameters * (4 + own_copy) // ranks,
        "optimizer": parameters * STATE_BYTES // ranks,
        "activations": max_length * sum(estimate_activation_bytes_per_token(model, element, checkpointing=True)),
        **estimate_tower_bytes(VisionConfig(), model.tower, RESERVED_PROMPT_TOKENS, element, checkpointing=True),
        **estimate_gathered_bytes(parallel, model, ranks, element, is_trained=True, on_accelerator=True),
    }


def estimate_memory(
    config: SimulationConfig, model: Model, device: Device, trainer: TrainerSettings | None = None
) -> list[RoleMemory]:
    """Estimate the memory of a trainer rank and of an engine's device, in bytes."""
    ranks, width = config.placement.num_training_devices, config.engine.width
    max_length, ep = config.rollout.max_new_tokens + RESERVED_PROMPT_TOKENS, config.training.expert_parallel
    train = estimate_trainer_bytes(model, device, ranks=ranks, max_length=max_length, ep=ep, trainer=trainer)
    capacity = config.engine.kv_capacity
    if capacity is None:
        capacity = max(0, compute_kv_capacity(model, device, width, config.engine.memory_share))
    engine = {
        "weights": model.num_parameters * model.element_bytes // width,
        "KV cache": int(capacity * model.kv_bytes_per_token / width),
    }
    return [
        RoleMemory(role="actor_train", count=ranks, parts=train),
        RoleMemory(role="actor_infer", count=config.placement.generation, parts=engine),
    ]


def compute_switch_s(
    config: SimulationConfig, model: Model, device: Device, trainer: TrainerSettings | None = None
) -> float:
    """Return the duration of a switch of shared devices to training and back: the one that the workload gives, or the
    time to load and offload a trainer rank's states.
    """
    given, bandwidth = config.placement.switch_s, device.host_bandwidth
    if given or bandwidth is None:
        return given
    train, _ = estimate_memory(config, model, device, trainer)
    return 2 * sum(size for name, size in train.parts.items() if name in STATE_PARTS) / bandwidth


def find_memory_problem(
    config: SimulationConfig, model: Model, device: Device, trainer: TrainerSettings | None = None
) -> str:
    """Return the reason why a plan does not fit into device memory; an empty string if it fits."""
    train, _ = estimate_memory(config, model, device, trainer)
    if train.bytes_each > MAX_TRAINER_MEMORY_FRACTION * device.memory_bytes:
        needed, available = train.bytes_each / 1e9, device.memory_bytes / 1e9
        return f"a trainer rank requires {needed:.0f} GB, but {device.name} provides {available:.0f} GB"
    engine = config.engine
    capacity = engine.kv_capacity
    if capacity is None:
        capacity = compute_kv_capacity(model, device, engine.width, engine.memory_share)
    num_tokens = config.rollout.max_new_tokens + RESERVED_PROMPT_TOKENS
    if capacity < num_tokens:
        return f"an engine's KV cache has {max(0, capacity):,} tokens, but one answer may require {num_tokens:,}"
    return ""
