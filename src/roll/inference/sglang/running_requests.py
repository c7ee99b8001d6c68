"""Sends requests to the server, and tracks which of them run, and which continue after a pause."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from roll.inference.sglang.client import SGLangClient
from roll.inference.sglang.conversion import ABORTED_REPLY, is_aborted
from roll.running import is_cancelled

__all__ = ["RunningRequests"]

POLL_S = 0.05
ABORT_TIMEOUT_S = 10.0
"""Time for the server to end an aborted request; then the request ends without tokens."""


@dataclass(eq=False, slots=True)
class _Running:
    """One request that was sent to the server."""

    request_id: str
    server_id: str
    call: asyncio.Task[tuple[int, dict[str, Any]]]
    is_interrupted: bool = False
    """True if a pause interrupted the request."""
    is_aborted: bool = False
    """True if the caller aborted the request."""
    is_abandoned: bool = False
    """True if the server did not end the request after an abort."""


class RunningRequests:
    """All running requests of an engine."""

    def __init__(self) -> None:
        self._running: set[_Running] = set()
        self._names = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count(1))

    def __len__(self) -> int:
        return len(self._running)

    async def send(
        self, client: SGLangClient, request_id: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], bool]:
        """Run a request of `/generate`; return the status and the reply, and whether it continues after a pause.

        Each call has an ID of its own at the server. SGLang refuses an ID that it has not released yet, for example
        after a lost connection, and aborts every request whose ID begins with the given one: an abort of `train-1.1`
        would also abort `train-1.10`.

        Raises:
            EngineDiedError: The server ended, or the client was closed.
        """
        server_id = f"{next(self._names)}|{request_id}"
        call = asyncio.ensure_future(client.post("/generate", {**body, "rid": server_id}, None))
        running = _Running(request_id, server_id, call)
        self._running.add(running)
        try:
            status, reply = await call
        except asyncio.CancelledError:
            if not running.is_abandoned or is_cancelled():
                raise
            status, reply = 200, dict(ABORTED_REPLY)
        finally:
            call.cancel()
            self._running.discard(running)
        return status, reply, running.is_interrupted and not running.is_aborted and is_aborted(reply)

    async def abort(self, client: SGLangClient, request_ids: Collection[str]) -> None:
        """Abort requests, and return when they have ended; unknown IDs are ignored.

        Raises:
            InfraError: The server does not accept an abort.
            EngineDiedError: The server ended.
        """
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        found = [each for each in self._running if each.request_id in request_ids]
        for each in found:
            each.is_aborted = True
        # Not the IDs: as soon as a request has ended, its caller may send another one with this ID.
        while found := [each for each in found if each in self._running]:
            if time.monotonic() > deadline:
                for each in found:
                    # SGLang loses an abort that arrives after the request, but before it is given to the scheduler, and
                    # ignores further aborts of this ID.
                    each.is_abandoned = True
                    each.call.cancel()
            # Repeated, because the server ignores the abort of a request that has not arrived yet.
            await asyncio.gather(*(client.call("/abort_request", {"rid": each.server_id}) for each in found))
            await asyncio.sleep(POLL_S)

    async def end_all(self, client: SGLangClient, *, interrupt: bool) -> None:
        """Abort all requests at the server, and return when they have ended.

        Args:
            client: The client.
            interrupt: Whether the requests continue after the pause.

        Raises:
            InfraError: The server does not accept an abort.
            EngineDiedError: The server ended.
        """
        for each in self._running if interrupt else ():
            each.is_interrupted = True
        while True:
            await client.call("/abort_request", {"abort_all": True})
            if not self._running:
                return
            await asyncio.sleep(POLL_S)
