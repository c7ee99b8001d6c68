"""Checks of an agentic run before it starts, for `roll check` and `roll.check`."""

from __future__ import annotations

from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.reading import read_demonstrations
from roll.pipelines.reinforcement import check
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: AgenticConfig) -> Report:
    """Check a run before it starts."""
    return check.inspect(config, _look_at_demonstrations)


def _look_at_demonstrations(report: Report, config: AgenticConfig) -> None:
    shown = read_demonstrations(config)
    report.notes += [f"begins with {len(shown)} successful episodes of yours"] if shown else []
