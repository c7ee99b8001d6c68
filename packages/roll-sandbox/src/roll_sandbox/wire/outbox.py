"""Queues the outgoing messages of a client, or of a worker that joins a service."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Outbox"]


class Outbox:
    """A queue of messages, which are sent in order over the current connection.

    Args:
        max_bytes: maximum number of queued bytes, beyond which `is_full` is set; `None` for no limit.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self.is_full = asyncio.Event()
        """Set when the peer reads more slowly than messages are queued."""
        self._has_messages = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Queue one message, without waiting."""
        self._queue.append(data)
        self._bytes += len(data)
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            self.is_full.set()
        self._has_messages.set()

    def clear(self) -> None:
        """Drop the queued messages."""
        self._queue.clear()
        self._bytes = 0
        self.is_full.clear()

    async def send_over(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send messages until the connection breaks or this call is canceled."""
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            while True:
                while self._queue:
                    # A message that is lost with the connection is not kept, since both sides resend unfinished
                    # requests.
                    data = self._queue.popleft()
                    self._bytes -= len(data)
                    await socket.send_bytes(data)
                self._has_messages.clear()
                await self._has_messages.wait()
