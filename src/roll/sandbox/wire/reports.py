"""What a worker says of its machine, with every beat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from roll.sandbox.pools import PoolReport
from roll.sandbox.wire.programs import built

__all__ = ["BEATS", "Report", "beat_s", "report_of", "report_said"]

BEATS = 30
"""In the time for which either side may be away: a line is broken once it was silent for five."""


def beat_s(away_s: float) -> float:
    """How often a worker and its server say that they are there."""
    return away_s / BEATS


@dataclass(frozen=True, kw_only=True)
class Report:
    """See the module."""

    cores: int = 1
    busy: float = 0.0
    """Share of the cores that worked lately, for whomever."""
    memory_bytes: int | None = None
    """Of the machine; `None`: it does not say."""
    free_bytes: int | None = None
    images: tuple[str, ...] = ()
    """Names and digests of images that need not be fetched."""
    pools: tuple[PoolReport, ...] = ()


def report_said(report: Report) -> dict[str, Any]:
    """In JSON's words."""
    return dataclasses.asdict(report)


def report_of(said: object) -> Report:
    """The report.

    Raises:
        SandboxRequestError: a field is unknown or not of its kind.
    """
    return built(Report, said, "report")
