"""A queue for requests while the engine is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

__all__ = ["PauseQueue"]


class PauseQueue:
    """Queues requests that arrive during a pause, or that a pause interrupts.

    SGLang also queues new requests during a pause, but ignores aborts until it continues.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._waiting: list[tuple[str, asyncio.Future[bool]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: str) -> bool:
        """Wait until the end of the pause; return False if the request is aborted."""
        while self.is_paused:
            entry = request_id, asyncio.get_running_loop().create_future()
            self._waiting.append(entry)
            try:
                if not await entry[1]:
                    return False
            finally:
                self._waiting.remove(entry)
        return True

    def pause(self) -> None:
        """Queue requests until `resume`."""
        self.is_paused = True

    def abort(self, request_ids: Collection[str]) -> None:
        """Abort queued requests; other IDs are ignored."""
        self._finish([future for name, future in self._waiting if name in request_ids], False)

    def resume(self) -> None:
        """Let all requests continue."""
        self.is_paused = False
        self._finish([future for _, future in self._waiting], True)

    def _finish(self, futures: Collection[asyncio.Future[bool]], result: bool) -> None:
        for future in futures:
            if not future.done():
                future.set_result(result)
