"""Tracks running requests, and which of them continue after a pause."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["RunningRequest", "RunningRequests"]


@dataclass(eq=False, slots=True)
class RunningRequest:
    """One request that was sent to the server."""

    request_id: str
    is_interrupted: bool = False
    """True if a pause interrupted the request."""
    is_aborted: bool = False
    """True if the caller aborted the request."""

    @property
    def continues(self) -> bool:
        """True if the request continues after the pause."""
        return self.is_interrupted and not self.is_aborted


class RunningRequests:
    """All running requests of an engine."""

    def __init__(self) -> None:
        self._running: set[RunningRequest] = set()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def track(self, request_id: str) -> Iterator[RunningRequest]:
        """Track a request during a `with` block."""
        running = RunningRequest(request_id)
        self._running.add(running)
        try:
            yield running
        finally:
            self._running.discard(running)

    def abort(self, request_ids: Collection[str]) -> None:
        """Record that the caller aborted requests; unknown IDs are ignored."""
        for each in self._running:
            each.is_aborted |= each.request_id in request_ids

    def select(self, request_ids: Collection[str]) -> set[str]:
        """Return those of the IDs whose requests are running."""
        return {each.request_id for each in self._running if each.request_id in request_ids}

    def interrupt(self) -> None:
        """Record that a pause interrupts all running requests."""
        for each in self._running:
            each.is_interrupted = True
