"""What critics and a reference need of memory and disk, computed before anything is loaded."""

from __future__ import annotations

from roll.config.estimate import ModelSizes, RoleMemory, element_bytes, num_trained
from roll.config.reinforcing import ReinforcingConfig
from roll.pipelines.online.check.estimate import BatchArithmetic, Further, frozen_memory, trainer_memory

__all__ = ["further_memory"]


def further_memory(
    config: ReinforcingConfig, sizes: ModelSizes, batch: BatchArithmetic, *, critic_sizes: ModelSizes | None = None
) -> Further:
    """Of the critics and the reference.

    Args:
        config: the run.
        sizes: of the model.
        batch: from `batch_arithmetic`.
        critic_sizes: of `algorithm.critic.model`, where it is not the policy's.
    """
    roles, critics = [], config.algorithm.num_critic_models
    if "critic" in config.roles:
        ranks = config.roles["critic"].count
        parts = trainer_memory(config, critic_sizes or sizes, batch, ranks)
        roles.append(RoleMemory(role="critic", count=ranks * critics, parts=parts))
    if "reference" in config.roles:
        roles.append(frozen_memory(config, "reference", sizes, batch))
    held = config.trainer_holds_reference and config.model.lora is None
    frozen = sizes.num_parameters * element_bytes(config.model.dtype) // config.num_ranks
    return Further(
        held={"reference": frozen} if held else {},
        roles=roles,
        num_trained=critics * num_trained(config.model, critic_sizes or sizes),
    )
