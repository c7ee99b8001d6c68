"""The report of a worker about its machine, which is sent with every heartbeat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.pools import PoolReport
from roll_sandbox.wire.programs import parse_dataclass

__all__ = [
    "HEARTBEATS_PER_TIMEOUT",
    "MAX_POOLS",
    "WorkerReport",
    "compute_heartbeat_s",
    "report_from_json",
    "report_to_json",
]

MAX_POOLS = 32
_MAX_TEXTS, _MAX_TEXT_CHARS = 2**14, 512
HEARTBEATS_PER_TIMEOUT = 30
"""Number of heartbeats in `away_s`; after five missed ones, a connection is treated as broken."""


def compute_heartbeat_s(away_s: float) -> float:
    """Return the seconds between two heartbeats if a worker may be disconnected for `away_s` seconds."""
    return away_s / HEARTBEATS_PER_TIMEOUT


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """The resources, images and pools of a worker's machine."""

    cores: int = 1
    busy: float = 0.0
    """Fraction of the machine's cores that were recently busy, with any process."""
    memory_bytes: int | None = None
    """Total memory of the machine; `None` if unknown."""
    free_bytes: int | None = None
    images: tuple[str, ...] = ()
    """Names and digests of images that the worker already has."""
    pools: tuple[PoolReport, ...] = ()


def report_to_json(report: WorkerReport) -> dict[str, Any]:
    """Convert a report to JSON values."""
    return dataclasses.asdict(report)


def report_from_json(values: object) -> WorkerReport:
    """Check received JSON values, and convert them to a report.

    Raises:
        SandboxRequestError: a field is unknown, has the wrong type, or is out of range.
    """
    report = parse_dataclass(WorkerReport, values, "report")
    counts = [report.memory_bytes or 0, report.free_bytes or 0, report.busy]
    counts += [number for pool in report.pools for number in (pool.idle, pool.target, pool.hits, pool.misses)]
    texts = [*report.images, *(pool.pool for pool in report.pools)]
    if report.cores < 1 or min(counts) < 0 or len(report.pools) > MAX_POOLS or len(texts) > _MAX_TEXTS:
        raise SandboxRequestError(
            "a number in a worker's 'report' is out of range, or the report has too many entries."
        )
    if not all(len(text) <= _MAX_TEXT_CHARS and text.isprintable() for text in texts):
        raise SandboxRequestError("a worker's 'report' contains an invalid image or pool name.")
    return report
