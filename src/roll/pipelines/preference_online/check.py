"""What can be known of a run that learns from preferences among fresh rollouts before it starts."""

from __future__ import annotations

from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.pipelines.online.check.estimate import BatchArithmetic, Further, frozen_memory
from roll.pipelines.online.check.inspection import inspect_run
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: PreferenceOnlineConfig) -> Report:
    """Find out all that can be known before a run."""
    return inspect_run(config, f"online {config.preference.type}", further=_further)


def _further(report: Report, config: PreferenceOnlineConfig, batch: BatchArithmetic) -> Further:
    assert report.model is not None, "it was looked at"
    return Further(roles=[frozen_memory(config, "reference", report.model, batch)] if config.starts_reference else [])
