"""Device memory of a plan's roles."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.activation_memory import activation_bytes_per_token, gathered_bytes
from roll.config.estimate import RoleMemory, training_bytes
from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.config.simulation import SimulationConfig
from roll.config.training import TrainingConfig
from roll.simulation.costs import kv_capacity_tokens
from roll.simulation.hardware import Device, Model

__all__ = ["TrainerSettings", "find_misfit", "memory_of", "trainer_bytes"]

STATE_BYTES = 12
"""Bytes of a trained parameter in addition to its weight: gradient and two moments in float32."""
TRAINER_SHARE = 0.9
"""Share of a device's memory that a plan may use for a trainer."""
PROMPT_ROOM = 1024
"""Tokens of a prompt for which a sequence must have room in addition to its longest answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Settings of a run that affect a trainer's memory."""

    model: ModelConfig
    training: TrainingConfig


def trainer_bytes(
    made_of: Model, on: Device, *, ranks: int, longest: int, ep: int = 1, trainer: TrainerSettings | None = None
) -> dict[str, int]:
    """Return the memory of one trainer rank in bytes, by content.

    The weights are sharded over all ranks, and one sample of the longest length is processed at a time.

    Args:
        made_of: the trained model.
        on: the device of a rank.
        ranks: number of the trainer's ranks.
        longest: tokens of the longest sample.
        ep: number of ranks that divide the experts.
        trainer: the settings of a run; by default all weights with AdamW and activation checkpointing.
    """
    if trainer is not None:
        parallel = trainer.training.parallel.model_copy(update={"ep": ep})
        training = trainer.training.model_copy(update={"parallel": parallel})
        accelerator = on.name != "cpu"
        return training_bytes(
            trainer.model, training, made_of, longest, ranks, micro_batches=1, on_accelerator=accelerator
        )
    parameters, element = made_of.num_parameters, made_of.element_bytes
    own_copy = element if ranks == 1 and element != 4 else 0  # shards are gathered in the dtype of the computation
    parallel = ParallelConfig(ep=ep)
    return {
        "weights": parameters * (4 + own_copy) // ranks,
        "optimizer": parameters * STATE_BYTES // ranks,
        "activations": longest * sum(activation_bytes_per_token(made_of, element, checkpointing=True)),
        **gathered_bytes(parallel, made_of, ranks, element, learns=True, on_accelerator=True),
    }


def memory_of(
    config: SimulationConfig, made_of: Model, on: Device, trainer: TrainerSettings | None = None
) -> list[RoleMemory]:
    """Return the memory of a trainer rank and of an engine's device, in bytes; see `trainer_bytes`."""
    ranks, width = config.placement.num_training, config.engine.tensor_parallel
    longest, ep = config.rollout.max_new_tokens + PROMPT_ROOM, config.training.expert_parallel
    train = trainer_bytes(made_of, on, ranks=ranks, longest=longest, ep=ep, trainer=trainer)
    capacity = config.engine.kv_capacity
    if capacity is None:
        capacity = max(0, kv_capacity_tokens(made_of, on, width, config.engine.memory_share))
    engine = {
        "weights": made_of.num_parameters * made_of.element_bytes // width,
        "keys and values": int(capacity * made_of.kv_bytes_per_token / width),
    }
    return [
        RoleMemory(role="actor_train", count=ranks, parts=train),
        RoleMemory(role="actor_infer", count=config.placement.generation, parts=engine),
    ]


def find_misfit(config: SimulationConfig, made_of: Model, on: Device, trainer: TrainerSettings | None = None) -> str:
    """Return why a plan does not fit into its devices' memory; empty if it fits."""
    train, _ = memory_of(config, made_of, on, trainer)
    if train.bytes_each > TRAINER_SHARE * on.memory_bytes:
        return f"a trainer's rank needs {train.bytes_each / 1e9:.0f} GB of {on.name}'s {on.memory_bytes / 1e9:.0f} GB"
    engine = config.engine
    capacity = engine.kv_capacity
    if capacity is None:
        capacity = kv_capacity_tokens(made_of, on, engine.tensor_parallel, engine.memory_share)
    needed = config.rollout.max_new_tokens + PROMPT_ROOM
    if capacity < needed:
        return f"an engine's cache holds {max(0, capacity):,} tokens, and one answer may need {needed:,}"
    return ""
