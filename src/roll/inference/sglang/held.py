"""Holds requests while the engine is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

__all__ = ["HeldRequests"]


class HeldRequests:
    """The requests that arrived during a pause, or that a pause interrupted.

    SGLang holds new requests, too, but ignores their abort until it continues.
    """

    def __init__(self) -> None:
        self.is_holding = False
        self._waiting: list[tuple[str, asyncio.Future[bool]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: str) -> bool:
        """Wait until requests are released; return False if this one is aborted."""
        while self.is_holding:
            entry = request_id, asyncio.get_running_loop().create_future()
            self._waiting.append(entry)
            try:
                if not await entry[1]:
                    return False
            finally:
                self._waiting.remove(entry)
        return True

    def hold(self) -> None:
        """Hold all requests that arrive from now on."""
        self.is_holding = True

    def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests; those that are not here are ignored."""
        self._finish([future for name, future in self._waiting if name in request_ids], False)

    def release(self) -> None:
        """Let all requests continue."""
        self.is_holding = False
        self._finish([future for _, future in self._waiting], True)

    def _finish(self, futures: Collection[asyncio.Future[bool]], result: bool) -> None:
        for future in futures:
            if not future.done():
                future.set_result(result)
