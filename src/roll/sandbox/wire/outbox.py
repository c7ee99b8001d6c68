"""Messages on their way out, for whoever dials: a client, and a worker that joins."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Outbox"]


class Outbox:
    """Takes messages at any time and sends them in order, over whichever connection there is."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, data: bytes) -> None:
        """One more; never waits."""
        self._waiting.append(data)
        self._news.set()

    def clear(self) -> None:
        """Forget what has not been sent."""
        self._waiting.clear()

    async def send_over(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Until the connection breaks, or this is cancelled."""
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            while True:
                while self._waiting:
                    await socket.send_bytes(self._waiting.popleft())
                self._news.clear()
                await self._news.wait()
