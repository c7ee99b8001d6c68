"""One service: its database, switchboard and, unless workers only join, the worker in its process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

from starlette.websockets import WebSocket

from roll_sandbox.errors import SandboxDatabaseError
from roll_sandbox.images import ImageCache
from roll_sandbox.manager import SandboxManager
from roll_sandbox.service.audit import Audit
from roll_sandbox.service.keeper import Keeper
from roll_sandbox.service.links import WorkerLink
from roll_sandbox.service.quotas import Quotas
from roll_sandbox.service.records import Records
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.sockets import Channel
from roll_sandbox.service.store import Store
from roll_sandbox.service.switchboard import ClientLine, Switchboard
from roll_sandbox.service.tokens import Identity, Tokens
from roll_sandbox.service.workers import LOCAL, Workers
from roll_sandbox.wire import Message, checked
from roll_sandbox.worker import Worker

__all__ = ["Service"]

_CHECK_S = 1.0
"""Seconds between two checks of a connection's token."""
_GREETING_S = 10.0
"""Timeout of a worker's first message."""


class Service:
    """One service; see the module. It may be made in any thread; its other methods belong to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(settings.database)
        self.store.claim()
        self.store.migrate()
        records = Records(self.store)
        self.tokens = Tokens(self.store)
        self.audit = Audit(settings.audit)
        self.quotas = Quotas(settings.quota, records.quotas())
        self.board = Switchboard(records, self.quotas, self.audit, lifetime_s=settings.lifetime_s)
        self.keeper = Keeper(self.board, away_s=settings.away_s, report=self._report)
        self.workers = Workers(self.board, self.keeper, records)
        self.manager: SandboxManager | None = None
        self.ready = False
        self._worker: Worker | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lines: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()

    async def start(self) -> None:
        """Restore what an earlier server left, and start.

        Raises:
            SandboxUnavailableError: this machine cannot run sandboxes.
        """
        self.store.open()
        await asyncio.to_thread(self.workers.recover)
        await self.keeper.recover(LOCAL)
        settings = self.settings
        if settings.runtime is not None:
            self.manager = SandboxManager(
                settings.runtime, spec=settings.spec, warm=settings.warm, max_sandboxes=settings.max_sandboxes
            )
            await self.manager.start()
            self._worker = Worker(self.manager, mounts=settings.mounts, images=ImageCache().words, tell=self.board.hear)
            self.workers.add(WorkerLink(LOCAL, self._worker.receive, capacity=settings.max_sandboxes))
            self._report()
        self._watching = asyncio.create_task(self.keeper.watch())
        self.ready = True

    def _report(self) -> None:
        if self._worker is not None and LOCAL in self.board.workers:
            self.board.workers[LOCAL].note(self._worker.report())

    async def close(self) -> None:
        """End the sandboxes of this process, and record their end."""
        self.ready = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._worker is not None and self.manager is not None:
            await self._worker.close()
            await self.manager.close()
        await asyncio.to_thread(self.store.close)
        self.audit.close()

    async def line(self, socket: WebSocket) -> None:
        """Serve the connection of a client."""
        identity: Identity = socket.scope["identity"]
        owner = identity.owner
        if self._lines.get(owner, 0) >= self.settings.max_lines:
            await socket.close(1008, "too many lines of this owner")
            return
        self._lines[owner] = self._lines.get(owner, 0) + 1
        try:
            await self._accepted(socket, identity)
        finally:
            self._lines[owner] -= 1

    async def _accepted(self, socket: WebSocket, identity: Identity) -> None:
        owner = identity.owner
        await socket.accept()
        peer = socket.client.host if socket.client is not None else ""
        channel = Channel(socket, owner, self.rates(identity), self._waiting)
        line = ClientLine(identity, channel.send, peer=peer)
        fresh = self.manager.runtime.fresh_programs if self.manager is not None else True
        channel.send(
            {
                "op": "hello",
                "fresh_programs": fresh,
                "max_message_bytes": self.settings.max_message_bytes,
                "owner": owner,
            }
        )
        checking = asyncio.create_task(self._check(identity, channel))
        self.audit.note("line", owner=owner, token=identity.token, peer=peer)
        try:
            await channel.serve(lambda message: self.board.receive(line, checked(message)))
        finally:
            checking.cancel()
            self.board.hang_up(line)

    def rates(self, identity: Identity) -> Any:
        """Return `None`; the application replaces this method by `Access.rates`."""
        return None

    async def _check(self, identity: Identity, channel: Channel) -> None:
        """Close the channel once its token is no longer valid.

        While the database is away the channel stays open, since nothing can be started over it.
        """
        good = True
        while good:
            with contextlib.suppress(SandboxDatabaseError):
                good = await asyncio.to_thread(self.tokens.good, identity)
            if good:
                await asyncio.sleep(_CHECK_S)
        channel.close()

    async def worker(self, socket: WebSocket) -> None:
        """Serve the connection of a worker that joins or rejoins, with the sandboxes it holds: see `workers.py`."""
        identity: Identity = socket.scope["identity"]
        await socket.accept()
        channel = Channel(socket, identity.owner, None)
        joined: list[WorkerLink] = []

        def hear(message: Message) -> None:
            if joined:
                self.workers.hear(joined[0], message, channel)
            else:
                joined.append(self.workers.join(identity, message, channel))
                self.audit.note("join", owner=identity.owner, token=identity.token, what=joined[0].name)

        checking = asyncio.create_task(self._check(identity, channel))
        loop = asyncio.get_running_loop()
        hurrying = loop.call_later(_GREETING_S, lambda: None if joined else channel.close())
        try:
            await channel.serve(hear)
        finally:
            checking.cancel()
            hurrying.cancel()
            for link in joined:
                if link.transmit == channel.send:
                    link.away(time.monotonic())
