"""WebSockets of clients (`/v1/line`) and workers (`/v1/worker`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable

from starlette.websockets import WebSocket, WebSocketDisconnect

from roll_sandbox.errors import SandboxAccessError, SandboxRequestError
from roll_sandbox.service.rates import Rates
from roll_sandbox.wire import Message, decode, encode, failure_said

__all__ = ["Channel"]

_MOST_BYTES = 2**27
"""Most queued bytes for a peer that does not read."""
_MOST_OF_OWNER_BYTES = 2**28
_CLOSE_S = 5.0


class Channel:
    """One accepted WebSocket.

    Args:
        socket: the WebSocket.
        owner: owner of the peer's token.
        rates: rate limiter of the peer's messages; a peer that sends more is read more slowly.
        waiting: bytes that wait for all sockets of an owner, which share a bound as well.
    """

    def __init__(self, socket: WebSocket, owner: str, rates: Rates | None, waiting: Counter[str] | None = None) -> None:
        self._socket = socket
        self._owner = owner
        self._rates = rates
        self._outgoing: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._waiting = Counter() if waiting is None else waiting
        self._over = asyncio.Event()

    def send(self, message: Message) -> None:
        """Queue a message. A peer for which too much is queued is disconnected."""
        data = encode(message)
        if self._over.is_set():
            return
        self._count(len(data))
        self._outgoing.append(data)
        self._news.set()
        if self._bytes > _MOST_BYTES or self._waiting[self._owner] > _MOST_OF_OWNER_BYTES:
            self._over.set()

    def _count(self, size: int) -> None:
        self._bytes += size
        self._waiting[self._owner] += size

    def close(self) -> None:
        """Close the connection."""
        self._over.set()

    async def serve(self, hear: Callable[[Message], None]) -> None:
        """Serve until either side closes the connection. A message that `hear` refuses is answered and ends it."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read(hear))
        over = asyncio.create_task(self._over.wait())
        tasks = (writing, reading, over)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outgoing.clear()
            self._count(-self._bytes)
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):  # a peer that reads nothing accepts no close frame
                    await self._socket.close()

    async def _read(self, hear: Callable[[Message], None]) -> None:
        try:
            while True:
                data = await self._socket.receive_bytes()
                hear(decode(data))
                if self._rates is not None and (wait_s := self._rates.wait_s(self._owner)) > 0.01:
                    await asyncio.sleep(wait_s)
        except (WebSocketDisconnect, RuntimeError):
            return
        except (SandboxRequestError, SandboxAccessError, KeyError) as error:
            if isinstance(error, KeyError):
                error = SandboxRequestError("a message without bytes, or without a field that it needs.")
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await self._socket.send_bytes(encode({**failure_said(error), "op": "refused"}))

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while True:
                while self._outgoing:
                    data = self._outgoing.popleft()
                    self._count(-len(data))
                    await self._socket.send_bytes(data)
                self._news.clear()
                await self._news.wait()
