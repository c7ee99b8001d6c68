"""WebSockets of clients (`/v1/line`) and workers (`/v1/worker`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable

from starlette.websockets import WebSocket, WebSocketDisconnect

from roll_sandbox.errors import SandboxAccessError, SandboxRequestError
from roll_sandbox.service.rate_limits import RateLimiter
from roll_sandbox.wire import Message, decode, encode, error_to_json

__all__ = ["Channel"]

_MAX_QUEUED_BYTES = 2**27
"""Maximum number of bytes that are queued for a peer; with more, it is disconnected."""
_MAX_QUEUED_BYTES_PER_OWNER = 2**28
_CLOSE_TIMEOUT_S = 5.0


class Channel:
    """One accepted WebSocket: sends queued messages, and receives messages at a limited rate.

    Args:
        socket: the WebSocket.
        owner: owner of the peer's token.
        rates: rate limiter for the peer's messages; if the peer exceeds the rate, its messages are read more slowly.
        queued_bytes_by_owner: number of queued bytes in all sockets of each owner, which is also limited.
    """

    def __init__(
        self,
        socket: WebSocket,
        owner: str,
        rates: RateLimiter | None,
        queued_bytes_by_owner: Counter[str] | None = None,
    ) -> None:
        self._socket = socket
        self._owner = owner
        self._rates = rates
        self._outgoing: deque[bytes] = deque()
        self._queued_bytes = 0
        self._has_messages = asyncio.Event()
        self._queued_bytes_by_owner = Counter() if queued_bytes_by_owner is None else queued_bytes_by_owner
        self._closed = asyncio.Event()

    def send(self, message: Message) -> None:
        """Queue a message; disconnect the peer if too much is queued for it."""
        data = encode(message)
        if self._closed.is_set():
            return
        self._add_queued_bytes(len(data))
        self._outgoing.append(data)
        self._has_messages.set()
        if (
            self._queued_bytes > _MAX_QUEUED_BYTES
            or self._queued_bytes_by_owner[self._owner] > _MAX_QUEUED_BYTES_PER_OWNER
        ):
            self._closed.set()

    def _add_queued_bytes(self, size: int) -> None:
        self._queued_bytes += size
        self._queued_bytes_by_owner[self._owner] += size

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()

    async def serve(self, on_message: Callable[[Message], None]) -> None:
        """Send and receive messages until either side closes the connection or `on_message` fails; report errors to the
        peer.
        """
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read(on_message))
        over = asyncio.create_task(self._closed.wait())
        tasks = (writing, reading, over)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outgoing.clear()
            self._add_queued_bytes(-self._queued_bytes)
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # a peer that does not read gets no close frame
                    await self._socket.close()

    async def _read(self, on_message: Callable[[Message], None]) -> None:
        try:
            while True:
                data = await self._socket.receive_bytes()
                on_message(decode(data))
                # While this side does not read, TCP slows the peer down.
                if self._rates is not None and (wait_s := self._rates.consume(self._owner)) > 0.01:
                    await asyncio.sleep(wait_s)
        except (WebSocketDisconnect, RuntimeError):
            return
        except (SandboxRequestError, SandboxAccessError, KeyError) as error:
            if isinstance(error, KeyError):
                error = SandboxRequestError("a message is not binary, or lacks a required field.")
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await self._socket.send_bytes(encode({**error_to_json(error), "op": "refused"}))

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while True:
                while self._outgoing:
                    data = self._outgoing.popleft()
                    self._add_queued_bytes(-len(data))
                    await self._socket.send_bytes(data)
                self._has_messages.clear()
                await self._has_messages.wait()
