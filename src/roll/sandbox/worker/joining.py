"""A worker in a process of its own: it dials out to the server, and again whenever the line breaks.

    worker ── join {name, capacity, holds}, ends that may not have been heard ──► server ── what to stop, what waits ──►

What nobody claims it stops: a server that comes back names what it does not know; one that stays away is given up.
"""

from __future__ import annotations

import asyncio
import ssl
import time

import aiohttp

from roll.sandbox.errors import SandboxAccessError, SandboxUnavailableError
from roll.sandbox.wire import Message, Outbox, decode, encode
from roll.sandbox.worker.worker import Worker

__all__ = ["Joined"]

_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0)


class Joined:
    """A worker and its line to a server.

    Args:
        url: of the server.
        token: with the scope `worker`.
        name: by which the server knows it again.
        away_s: how long the server may be away before the sandboxes here are stopped.
    """

    def __init__(
        self,
        worker: Worker,
        url: str,
        token: str,
        *,
        name: str,
        capacity: int,
        memory_bytes: int | None = None,
        ca_file: str | None = None,
        away_s: float = 60.0,
    ) -> None:
        self._worker = worker
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._greeting: Message = {"op": "join", "name": name, "capacity": capacity, "memory_bytes": memory_bytes}
        self._ca_file = ca_file
        self._away_s = away_s
        self._outgoing = Outbox()

    async def serve(self) -> None:
        """Until it is cancelled.

        Raises:
            SandboxAccessError: the token is refused.
        """
        context: ssl.SSLContext | bool = ssl.create_default_context(cafile=self._ca_file) if self._ca_file else True
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(headers=self._headers, connector=connector) as session:
            heard, attempt = time.monotonic(), 0
            while True:
                try:
                    socket = await self._dial(session)
                except SandboxUnavailableError:
                    if time.monotonic() - heard > self._away_s:
                        await self._worker.close()
                    await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
                    attempt += 1
                else:
                    attempt = 0
                    try:
                        await self._follow(socket)
                    finally:
                        self._worker.listen(None)
                        heard = time.monotonic()

    async def _dial(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            return await session.ws_connect(f"{self._url}/v1/worker", max_msg_size=0, heartbeat=10.0)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise SandboxAccessError(
                    f"the sandbox service at {self._url} refuses this token ({error.status}): a worker needs one of "
                    "scope worker (`roll sandbox token create OWNER --scope worker`)."
                ) from None
            raise SandboxUnavailableError(f"{self._url} answers {error.status} to a worker") from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise SandboxUnavailableError(f"no sandbox service answers at '{self._url}': {error}") from None

    async def _follow(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """One connection, as long as it lasts."""
        self._outgoing.clear()
        await socket.send_bytes(encode({**self._greeting, "holds": self._worker.holds()}))
        self._worker.listen(self._say)
        for message in self._worker.unheard():
            self._say(message)
        writing = asyncio.create_task(self._outgoing.send_over(socket))
        try:
            async for received in socket:
                if received.type is aiohttp.WSMsgType.BINARY:
                    message = decode(received.data)
                    if "sandbox" in message:
                        self._worker.receive(message)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await socket.close()

    def _say(self, message: Message) -> None:
        self._outgoing.put(encode(message))
