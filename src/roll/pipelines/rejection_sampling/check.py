"""Checks of rejection sampling before it starts."""

from __future__ import annotations

from roll.config.pipelines.rejection_sampling import RejectionSamplingConfig
from roll.pipelines.online.check.inspection import inspect_run
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: RejectionSamplingConfig) -> Report:
    """Check a rejection-sampling run before it starts, and return the report."""
    return inspect_run(config, "rejection sampling", trained_per_group=(1, config.rejection.keep))
