"""Checks of a run with an `algorithm` before it starts, in addition to those of every online run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from roll.config.activation_memory import ModelSizes, element_bytes
from roll.config.estimate import RoleMemory, frozen_bytes, num_trained
from roll.config.reinforcing import ReinforcingConfig
from roll.config.truncation import truncation_note
from roll.pipelines.online.check.estimate import BatchArithmetic, ExtraMemory, frozen_memory, trainer_memory
from roll.pipelines.online.check.inspection import inspect_run
from roll.preflight.inspection import describe_role
from roll.preflight.report import Report

__all__ = ["further_memory", "inspect"]


C = TypeVar("C", bound=ReinforcingConfig)


def inspect(config: C, *looks: Callable[[Report, C], None]) -> Report:
    """Check a run before it starts.

    Args:
        config: Configuration of the run.
        looks: Additional checks of its pipeline.
    """
    looks = (_look_at_own_functions, _look_at_critic, _look_at_truncation, *looks)
    return inspect_run(config, config.algorithm.type, *looks, further=_further)


def _look_at_own_functions(report: Report, config: ReinforcingConfig) -> None:
    algorithm = config.algorithm
    if algorithm.advantage.function is not None or algorithm.loss is not None or algorithm.gate.type == "python":
        from roll.pipelines.learning.losses import check_own_functions  # imports torch, as user functions do

        check_own_functions(algorithm)


def _look_at_critic(report: Report, config: ReinforcingConfig) -> None:
    if config.algorithm.uses_critic and config.algorithm.critic.model is not None:
        report.critic = describe_role(report, config.algorithm.critic.model, "the critics' model")


def _look_at_truncation(report: Report, config: ReinforcingConfig) -> None:
    truncation = truncation_note(config.algorithm, config.rollout)
    report.notes += [truncation] if truncation else []


def _further(report: Report, config: ReinforcingConfig, batch: BatchArithmetic) -> ExtraMemory:
    assert report.model is not None, "it was looked at"
    on_accelerator = report.machine.has_accelerators
    return further_memory(config, report.model, batch, critic_sizes=report.critic, on_accelerator=on_accelerator)


def further_memory(
    config: ReinforcingConfig,
    sizes: ModelSizes,
    batch: BatchArithmetic,
    *,
    critic_sizes: ModelSizes | None = None,
    on_accelerator: bool = False,
) -> ExtraMemory:
    """Estimate the memory of critics and reference.

    Args:
        config: The run's configuration.
        sizes: Sizes of the policy's model.
        batch: The result of `batch_arithmetic`.
        critic_sizes: Sizes of `algorithm.critic.model`, if it is not the policy's model.
        on_accelerator: Whether to estimate device memory.
    """
    roles, critics = [], config.algorithm.num_critic_models
    if "critic" in config.roles:
        ranks = config.roles["critic"].count
        parts = trainer_memory(config, critic_sizes or sizes, batch, ranks, on_accelerator=on_accelerator)
        roles.append(RoleMemory(role="critic", count=ranks * critics, parts=parts))
    if "reference" in config.roles:
        roles.append(frozen_memory(config, "reference", sizes, batch, on_accelerator=on_accelerator))
    held = config.trainer_holds_reference and config.model.lora is None
    element, parallel = element_bytes(config.model.dtype), config.training.parallel
    frozen = frozen_bytes(sizes, parallel, config.num_ranks, element)
    memory = {"reference": frozen} if held else {}
    if config.num_snapshots and not on_accelerator:  # in host memory, with the current weights
        share = num_trained(config.model, sizes) * parallel.dp_replicate / config.num_ranks
        memory["snapshots"] = round((config.num_snapshots + 1) * element * share)
    return ExtraMemory(
        held=memory,
        roles=roles,
        num_trained=critics * num_trained(config.model, critic_sizes or sizes),
    )
