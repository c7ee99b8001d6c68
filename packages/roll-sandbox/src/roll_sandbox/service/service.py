"""The service: its database, its dispatcher and, if a runtime is set, the worker in this process."""

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
from roll_sandbox.service.audit import AuditLog
from roll_sandbox.service.dispatcher import ClientConnection, Dispatcher
from roll_sandbox.service.housekeeper import Housekeeper
from roll_sandbox.service.quotas import Quotas
from roll_sandbox.service.records import RecordStore
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.sockets import Channel
from roll_sandbox.service.store import Store
from roll_sandbox.service.tokens import Identity, TokenStore
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.service.workers import LOCAL_NAME, Workers
from roll_sandbox.wire import Message, validate_client_message
from roll_sandbox.worker import Worker

__all__ = ["Service"]

_TOKEN_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a connection's token."""
_HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that a worker has to send its first message."""


class Service:
    """A sandbox service. It may be created in any thread; its methods must be called in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(settings.database)
        # Tables are migrated only under the lock, so never while another server runs.
        self.store.lock()
        self.store.migrate()
        records = RecordStore(self.store)
        self.tokens = TokenStore(self.store)
        self.audit = AuditLog(settings.audit)
        self.quotas = Quotas(settings.quota, records.load_quotas())
        self.dispatcher = Dispatcher(records, self.quotas, self.audit, lifetime_s=settings.lifetime_s)
        self.housekeeper = Housekeeper(self.dispatcher, away_s=settings.away_s, report=self._update_report)
        self.workers = Workers(self.dispatcher, self.housekeeper, records)
        self.manager: SandboxManager | None = None
        self.is_ready = False
        self._worker: Worker | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._num_connections: dict[str, int] = {}
        self._queued_bytes: Counter[str] = Counter()

    async def start(self) -> None:
        """Restore the state of an earlier server, and start the worker and the housekeeping.

        Raises:
            SandboxUnavailableError: this machine cannot run sandboxes.
        """
        self.store.open()
        await asyncio.to_thread(self.workers.recover)
        await self.housekeeper.recover(LOCAL_NAME)
        settings = self.settings
        if settings.runtime is not None:
            self.manager = SandboxManager(
                settings.runtime, spec=settings.spec, warm=settings.warm, max_sandboxes=settings.max_sandboxes
            )
            await self.manager.start()
            self._worker = Worker(
                self.manager,
                mounts=settings.mounts,
                images=ImageCache().list_requestable_names,
                send=self.dispatcher.on_worker_message,
            )
            self.workers.add(WorkerLink(LOCAL_NAME, self._worker.receive, capacity=settings.max_sandboxes))
            self._update_report()
        self._housekeeping = asyncio.create_task(self.housekeeper.run())
        self.is_ready = True

    def _update_report(self) -> None:
        if self._worker is not None and LOCAL_NAME in self.dispatcher.workers:
            self.dispatcher.workers[LOCAL_NAME].update_report(self._worker.make_report())

    async def close(self) -> None:
        """End the sandboxes of the worker in this process, and record their ends."""
        self.is_ready = False
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        # Close the worker first: the ends of its sandboxes go through the dispatcher to the database.
        if self._worker is not None and self.manager is not None:
            await self._worker.close()
            await self.manager.close()
        await asyncio.to_thread(self.store.close)
        self.audit.close()

    async def serve_client(self, socket: WebSocket) -> None:
        """Serve the connection of a client until it is closed; reject it if the client's owner has too many
        connections.
        """
        identity: Identity = socket.scope["identity"]
        owner = identity.owner
        if self._num_connections.get(owner, 0) >= self.settings.max_connections:
            await socket.close(1008, "too many connections of this owner")
            return
        self._num_connections[owner] = self._num_connections.get(owner, 0) + 1
        try:
            await self._serve_accepted(socket, identity)
        finally:
            self._num_connections[owner] -= 1

    async def _serve_accepted(self, socket: WebSocket, identity: Identity) -> None:
        owner = identity.owner
        await socket.accept()
        peer = socket.client.host if socket.client is not None else ""
        channel = Channel(socket, owner, self.get_rate_limiter(identity), self._queued_bytes)
        line = ClientConnection(identity, channel.send, peer=peer)
        fresh = self.manager.runtime.fresh_programs if self.manager is not None else True
        channel.send(
            {
                "op": "hello",
                "fresh_programs": fresh,
                "max_message_bytes": self.settings.max_message_bytes,
                "owner": owner,
            }
        )
        checking = asyncio.create_task(self._watch_token(identity, channel))
        self.audit.record("line", owner=owner, token=identity.token, peer=peer)
        try:
            await channel.serve(
                lambda message: self.dispatcher.on_client_message(line, validate_client_message(message))
            )
        finally:
            checking.cancel()
            self.dispatcher.disconnect(line)

    def get_rate_limiter(self, identity: Identity) -> Any:
        """Return the rate limiter of an identity's owner, or `None` for no limit.

        Without an application, there is no limit; `make_app` replaces this method by the method of `AccessMiddleware`.
        """
        return None

    async def _watch_token(self, identity: Identity, channel: Channel) -> None:
        """Close the channel when the token of `identity` is no longer valid.

        While the database is unavailable, the channel stays open, since no program can be started over it.
        """
        good = True
        while good:
            with contextlib.suppress(SandboxDatabaseError):
                good = await asyncio.to_thread(self.tokens.is_valid, identity)
            if good:
                await asyncio.sleep(_TOKEN_CHECK_INTERVAL_S)
        channel.close()

    async def serve_worker(self, socket: WebSocket) -> None:
        """Serve the connection of a worker that joins, or rejoins with its sandboxes (see `workers.py`)."""
        identity: Identity = socket.scope["identity"]
        await socket.accept()
        channel = Channel(socket, identity.owner, None)
        joined: list[WorkerLink] = []

        def on_message(message: Message) -> None:
            if joined:
                self.workers.on_message(joined[0], message, channel)
            else:
                joined.append(self.workers.join(identity, message, channel))
                self.audit.record("join", owner=identity.owner, token=identity.token, target=joined[0].name)

        checking = asyncio.create_task(self._watch_token(identity, channel))
        loop = asyncio.get_running_loop()
        hurrying = loop.call_later(_HANDSHAKE_TIMEOUT_S, lambda: None if joined else channel.close())
        try:
            await channel.serve(on_message)
        finally:
            checking.cancel()
            hurrying.cancel()
            for link in joined:
                if link.transmit == channel.send:
                    link.mark_disconnected(time.monotonic())
