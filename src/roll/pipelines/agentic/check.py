"""Checks of an agentic run before it starts, for `roll check` and `roll.check`."""

from __future__ import annotations

from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.demonstration_file import read_demonstrations
from roll.pipelines.reinforcement import check
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: AgenticConfig) -> Report:
    """Check an agentic run before it starts, and return the report."""
    return check.inspect(config, _check_demonstrations)


def _check_demonstrations(report: Report, config: AgenticConfig) -> None:
    shown = read_demonstrations(config)
    report.notes += [f"the run begins with {len(shown)} successful demonstrations"] if shown else []
