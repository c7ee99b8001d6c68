"""Chooses the workers of new sandboxes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from roll_sandbox.errors import SandboxUnavailableError
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.types import SandboxSpec

__all__ = ["choose_worker", "compute_load"]

MIN_FREE_BYTES = 2**28
"""Minimum free memory of a machine that gets a new sandbox. The memory limits of its sandboxes are ignored, because
sandboxes rarely reach them, and never all at the same time.
"""
IDLE_BYTES = 2_300_000
NEW_SANDBOXES_PER_CORE = 16
"""Number of new sandboxes on a worker that are treated as one busy core until the worker's next report."""
MISSING_IMAGE_LOAD = 0.25
"""Load that is added to a worker that does not have the image."""


def choose_worker(
    workers: Iterable[WorkerLink], spec: SandboxSpec, *, preferred_worker: WorkerLink | None = None
) -> WorkerLink:
    """Choose a new sandbox's worker: `preferred_worker` if it has capacity, else by affinity, else the least loaded.

    Args:
        workers: all workers.
        spec: the sandbox's spec.
        preferred_worker: the preferred worker, for example the worker of the sandbox that the new sandbox copies.

    Raises:
        SandboxUnavailableError: no worker is connected, or no worker has capacity.
    """
    available = [worker for worker in workers if worker.is_connected and not worker.is_draining]
    with_room = [worker for worker in available if _has_capacity(worker, spec)]
    if not with_room:
        raise SandboxUnavailableError(
            f"none of {len(available)} workers has capacity for another sandbox: stop sandboxes, or start a worker "
            "with `roll-sandbox worker --join URL`."
            if available
            else "no worker is connected, or all are draining: start one with `roll-sandbox worker --join URL`."
        )
    if preferred_worker in with_room:
        return preferred_worker
    if spec.affinity:
        return max(with_room, key=lambda worker: _compute_rendezvous_score(spec.affinity, worker.name))
    return min(with_room, key=lambda worker: compute_load(worker) + MISSING_IMAGE_LOAD * _lacks_image(worker, spec))


def compute_load(worker: WorkerLink) -> float:
    """Return the highest utilization among a worker's resources: slots, reserved memory, physical memory and cores."""
    report = worker.report
    shares = [
        worker.num_sandboxes / worker.capacity,
        report.busy + worker.num_placed / (NEW_SANDBOXES_PER_CORE * report.cores),
    ]
    if worker.memory_bytes:
        shares.append(worker.reserved_memory_bytes / worker.memory_bytes)
    if report.memory_bytes and report.free_bytes is not None:
        shares.append(1 - report.free_bytes / report.memory_bytes)
    return max(shares)


def _has_capacity(worker: WorkerLink, spec: SandboxSpec) -> bool:
    free_bytes = worker.report.free_bytes
    return (
        worker.num_sandboxes < worker.capacity
        and (
            worker.memory_bytes is None
            or worker.reserved_memory_bytes + spec.limits.memory_bytes <= worker.memory_bytes
        )
        and (free_bytes is None or free_bytes - worker.num_placed * IDLE_BYTES >= MIN_FREE_BYTES)
    )


def _lacks_image(worker: WorkerLink, spec: SandboxSpec) -> bool:
    return spec.image is not None and spec.image not in worker.report.images


def _compute_rendezvous_score(affinity: str, name: str) -> bytes:
    """Return the score of worker `name` for an affinity; the worker with the highest score is chosen.

    With rendezvous hashing, only few affinities change their worker when a worker joins or leaves.
    """
    return hashlib.sha256(f"{affinity}\0{name}".encode()).digest()
