"""Which worker a new sandbox goes to."""

from __future__ import annotations

from collections.abc import Iterable

from roll.sandbox.errors import SandboxUnavailableError
from roll.sandbox.service.links import WorkerLink
from roll.sandbox.types import SandboxSpec

__all__ = ["choose"]


def choose(workers: Iterable[WorkerLink], spec: SandboxSpec) -> WorkerLink:
    """The one with the most room, by the larger share of sandboxes and memory that is taken.

    Raises:
        SandboxUnavailableError: none is here, or none has room.
    """
    here = [worker for worker in workers if worker.here and not worker.draining]
    with_room = [worker for worker in here if worker.held < worker.capacity and _fits(worker, spec)]
    if not with_room:
        raise SandboxUnavailableError(
            f"none of {len(here)} workers has room for another sandbox: stop some, or start a worker with "
            "`roll sandbox worker --join URL`."
            if here
            else "no worker is connected: start one with `roll sandbox worker --join URL`."
        )
    return min(with_room, key=_share)


def _fits(worker: WorkerLink, spec: SandboxSpec) -> bool:
    return worker.memory_bytes is None or worker.held_memory_bytes + spec.limits.memory_bytes <= worker.memory_bytes


def _share(worker: WorkerLink) -> float:
    memory = worker.held_memory_bytes / worker.memory_bytes if worker.memory_bytes else 0.0
    return max(worker.held / worker.capacity, memory)
