"""WebSockets of clients (`/v1/line`) and workers (`/v1/worker`): messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from starlette.websockets import WebSocket, WebSocketDisconnect

from roll.sandbox.errors import SandboxAccessError, SandboxRequestError
from roll.sandbox.service.rates import Rates
from roll.sandbox.wire import Message, decode, encode, failure_said

__all__ = ["Channel"]

_MOST_BYTES = 2**27
"""Waiting for a peer that does not read."""


class Channel:
    """One accepted WebSocket.

    Args:
        rates: how often it may say something; one that says more is read more slowly.
    """

    def __init__(self, socket: WebSocket, owner: str, rates: Rates | None) -> None:
        self._socket = socket
        self._owner = owner
        self._rates = rates
        self._outgoing: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._over = False

    def send(self, message: Message) -> None:
        """Soon; a peer that lets too much wait is hung up on."""
        data = encode(message)
        self._bytes += len(data)
        if self._bytes > _MOST_BYTES:
            self._over = True
        else:
            self._outgoing.append(data)
        self._news.set()

    def close(self) -> None:
        """Hang up."""
        self._over = True
        self._news.set()

    async def serve(self, hear: Callable[[Message], None]) -> None:
        """Until either side hangs up. What `hear` refuses, the peer is told, and hung up on."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read(hear))
        try:
            await asyncio.wait([writing, reading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, reading):
                task.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
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
            while not self._over:
                while self._outgoing:
                    data = self._outgoing.popleft()
                    self._bytes -= len(data)
                    await self._socket.send_bytes(data)
                self._news.clear()
                if not self._over:
                    await self._news.wait()
