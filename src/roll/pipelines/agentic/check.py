"""What can be known of an agentic run before it starts: what `roll check` prints, and `roll.check` returns."""

from __future__ import annotations

from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.reading import read_demonstrations
from roll.pipelines.reinforcement import check
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: AgenticConfig) -> Report:
    """Find out all that can be known before a run."""
    return check.inspect(config, _look_at_demonstrations)


def _look_at_demonstrations(report: Report, config: AgenticConfig) -> None:
    shown = read_demonstrations(config)
    report.notes += [f"begins with {len(shown)} successful episodes of yours"] if shown else []
