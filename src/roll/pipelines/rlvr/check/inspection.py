"""What can be known of an RLVR run before it starts, beside what is known of any that generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from roll.config.reinforcing import ReinforcingConfig
from roll.config.truncation import truncation_note
from roll.pipelines.online.check.estimate import BatchArithmetic, Further
from roll.pipelines.online.check.inspection import inspect_run
from roll.pipelines.rlvr.check.estimate import further_memory
from roll.preflight.inspection import described
from roll.preflight.report import Report

__all__ = ["inspect"]

C = TypeVar("C", bound=ReinforcingConfig)


def inspect(config: C, *looks: Callable[[Report, C], None]) -> Report:
    """Find out all that can be known before a run.

    Args:
        config: of the run.
        looks: of its pipeline, beside these.
    """
    return inspect_run(config, config.algorithm.type, _look_at_critic, _look_at_truncation, *looks, further=_further)


def _look_at_critic(report: Report, config: ReinforcingConfig) -> None:
    if config.algorithm.uses_critic and config.algorithm.critic.model is not None:
        report.critic = described(report, config.algorithm.critic.model, "the critics' model")


def _look_at_truncation(report: Report, config: ReinforcingConfig) -> None:
    truncation = truncation_note(config.algorithm, config.rollout)
    report.notes += [truncation] if truncation else []


def _further(report: Report, config: ReinforcingConfig, batch: BatchArithmetic) -> Further:
    assert report.model is not None, "it was looked at"
    return further_memory(config, report.model, batch, critic_sizes=report.critic)
