"""What can be known of an RLVR run before it starts, beside what is known of any that generates."""

from __future__ import annotations

from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.truncation import truncation_note
from roll.pipelines.online.check.estimate import BatchArithmetic, Further
from roll.pipelines.online.check.inspection import inspect_run
from roll.pipelines.rlvr.check.estimate import further_memory
from roll.preflight.inspection import described
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: RLVRConfig) -> Report:
    """Find out all that can be known before a run."""
    return inspect_run(config, config.algorithm.type, _look_at_critic, _look_at_truncation, further=_further)


def _look_at_critic(report: Report, config: RLVRConfig) -> None:
    if config.algorithm.uses_critic and config.algorithm.critic.model is not None:
        report.critic = described(report, config.algorithm.critic.model, "the critics' model")


def _look_at_truncation(report: Report, config: RLVRConfig) -> None:
    truncation = truncation_note(config.algorithm, config.rollout)
    report.notes += [truncation] if truncation else []


def _further(report: Report, config: RLVRConfig, batch: BatchArithmetic) -> Further:
    assert report.model is not None, "it was looked at"
    return further_memory(config, report.model, batch, critic_sizes=report.critic)
