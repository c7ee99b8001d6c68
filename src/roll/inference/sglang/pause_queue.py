"""A queue for requests while the engine is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["PauseQueue"]


@dataclass(eq=False, slots=True)
class _Waiting:
    """One request that waits for the end of a pause."""

    request_id: str
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    is_aborted: bool = False


class PauseQueue:
    """Queues requests that arrive during a pause, or that a pause interrupts.

    SGLang also queues new requests during a pause, but ignores aborts until it continues.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: str) -> bool:
        """Wait until the end of the pause; return False if the request is aborted."""
        if not self.is_paused:
            return True
        waiting = _Waiting(request_id)
        self._waiting.append(waiting)
        try:
            while self.is_paused and not waiting.is_aborted:
                waiting.wakes.clear()
                await waiting.wakes.wait()
        finally:
            self._waiting.remove(waiting)
        return not waiting.is_aborted

    def pause(self) -> None:
        """Queue requests until `resume`."""
        self.is_paused = True

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Abort queued requests; `None` aborts all of them, and IDs of other requests are ignored."""
        for each in self._waiting:
            if request_ids is None or each.request_id in request_ids:
                each.is_aborted = True
                each.wakes.set()

    def resume(self) -> None:
        """Let all requests continue."""
        self.is_paused = False
        for each in self._waiting:
            each.wakes.set()
