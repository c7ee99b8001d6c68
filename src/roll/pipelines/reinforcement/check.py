"""Checks of a run with an `algorithm` before it starts, in addition to those of every online run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from roll.config.activation_memory import ModelSizes, get_element_bytes
from roll.config.estimate import RoleMemory, count_trained_parameters, estimate_frozen_bytes
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.config.truncation import describe_truncation
from roll.pipelines.online.check.estimate import (
    ExtraMemory,
    RunSizes,
    estimate_frozen_memory,
    estimate_trainer_memory,
)
from roll.pipelines.online.check.inspection import inspect_run
from roll.preflight.inspection import inspect_model
from roll.preflight.report import Report

__all__ = ["estimate_extra_memory", "inspect"]


C = TypeVar("C", bound=ReinforcementRunConfig)


def inspect(config: C, *checks: Callable[[Report, C], None]) -> Report:
    """Check a reinforcement learning run before it starts, and return the report.

    Args:
        config: Configuration of the run.
        checks: Additional checks of its pipeline.
    """
    own_checks = (_check_user_functions, _check_critic, _check_truncation)
    return inspect_run(
        config, config.algorithm.type, *own_checks, *checks, extra_memory=_estimate_extra_memory_from_report
    )


def _check_user_functions(report: Report, config: ReinforcementRunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.advantage.function is not None or algorithm.loss is not None or algorithm.gate.type == "python":
        from roll.pipelines.learning.losses import check_user_functions  # imports torch, as user functions do

        check_user_functions(algorithm)


def _check_critic(report: Report, config: ReinforcementRunConfig) -> None:
    if config.algorithm.uses_critic and config.algorithm.critic.model is not None:
        report.critic = inspect_model(report, config.algorithm.critic.model, "the critics' model")


def _check_truncation(report: Report, config: ReinforcementRunConfig) -> None:
    truncation = describe_truncation(config.algorithm, config.rollout)
    report.notes += [truncation] if truncation else []


def _estimate_extra_memory_from_report(report: Report, config: ReinforcementRunConfig, batch: RunSizes) -> ExtraMemory:
    assert report.model is not None, "the model was described"
    on_accelerator = report.machine.has_accelerators
    return estimate_extra_memory(config, report.model, batch, critic_sizes=report.critic, on_accelerator=on_accelerator)


def estimate_extra_memory(
    config: ReinforcementRunConfig,
    sizes: ModelSizes,
    batch: RunSizes,
    *,
    critic_sizes: ModelSizes | None = None,
    on_accelerator: bool = False,
) -> ExtraMemory:
    """Estimate the memory of the critics and the reference model.

    Args:
        config: The run's configuration.
        sizes: Sizes of the policy's model.
        batch: The result of `compute_run_sizes`.
        critic_sizes: Sizes of `algorithm.critic.model`, if it is not the policy's model.
        on_accelerator: Whether to estimate device memory.
    """
    roles, critics = [], config.algorithm.num_critic_models
    if "critic" in config.roles:
        ranks = config.roles["critic"].count
        parts = estimate_trainer_memory(config, critic_sizes or sizes, batch, ranks, on_accelerator=on_accelerator)
        roles.append(RoleMemory(role="critic", count=ranks * critics, parts=parts))
    if "reference" in config.roles:
        roles.append(estimate_frozen_memory(config, "reference", sizes, batch, on_accelerator=on_accelerator))
    held = config.trainer_loads_reference and config.model.lora is None
    element, parallel = get_element_bytes(config.model.dtype), config.training.parallel
    frozen = estimate_frozen_bytes(sizes, parallel, config.num_ranks, element)
    memory = {"reference": frozen} if held else {}
    if config.num_snapshots and not on_accelerator:  # in host memory, with the current weights
        share = count_trained_parameters(config.model, sizes) * parallel.dp_replicate / config.num_ranks
        memory["snapshots"] = round((config.num_snapshots + 1) * element * share)
    return ExtraMemory(
        policy_bytes=memory,
        roles=roles,
        num_trained=critics * count_trained_parameters(config.model, critic_sizes or sizes),
    )
