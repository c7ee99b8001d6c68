"""Sandboxes for HTTP routes: clients inside this process, connected directly to the dispatcher."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

from roll_sandbox.agent_sandbox import Job, Session
from roll_sandbox.errors import SandboxExpiredError, SandboxLostError, SandboxRequestError, UnknownSandboxError
from roll_sandbox.remote.connection import RemoteSandbox, ServiceConnection, generate_name
from roll_sandbox.service.dispatcher import ClientConnection, Dispatcher, SandboxEntry
from roll_sandbox.service.tokens import Identity
from roll_sandbox.types import Program, SandboxSpec
from roll_sandbox.wire import Message, validate_client_message

__all__ = ["LocalClients", "OwnerSandboxes"]

_current_identity: ContextVar[Identity] = ContextVar("acting")
"""Identity of the current request, so that the audit log names its token instead of the owner's first token."""


class OwnerSandboxes:
    """The sandboxes of one owner, for HTTP routes. Sandboxes created here run until they are stopped or expire.

    Args:
        dispatcher: the service's dispatcher.
        identity: the owner's identity.
        server_run: identifier of this server process; sessions of an earlier process are lost.
    """

    def __init__(self, dispatcher: Dispatcher, identity: Identity, server_run: str) -> None:
        self.dispatcher = dispatcher
        self.owner = identity.owner
        self._server_run = server_run
        self._service = ServiceConnection(self._send)
        self._client = ClientConnection(identity, self._service.receive, holds_leases=False)
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self._creating: dict[str, asyncio.Task[RemoteSandbox]] = {}
        self._running: dict[tuple[str, str], Job] = {}
        self.sessions: dict[tuple[str, str], Session] = {}

    def _send(self, message: Message) -> None:
        self._client.identity = _current_identity.get(self._client.identity)
        self.dispatcher.on_client_message(self._client, validate_client_message(message))

    async def create(
        self, spec: SandboxSpec, lifetime_s: float | None, *, near: str | None = None, name: str | None = None
    ) -> tuple[RemoteSandbox, bool]:
        """Create a sandbox, or find the live sandbox of this name. Return the sandbox, and True if it is new.

        Raises:
            SandboxRequestError: the sandbox of this name has another spec.
            UnknownSandboxError: the sandbox of this name has ended.
        """
        if name is None:
            return self._cache_sandbox(await self._service.create(spec, lifetime_s=lifetime_s, near=near)), True
        place = f"{self.owner}/{name}"
        if place not in self.dispatcher.entries and name not in self._creating:
            row = await asyncio.to_thread(self.dispatcher.records.load_sandbox, self.owner, name)
            # Another request may have created the sandbox while this one read the database.
            if row is not None and place not in self.dispatcher.entries and name not in self._creating:
                raise UnknownSandboxError(f"the sandbox '{name}' has ended: choose another idempotency key.")
        entry = self.dispatcher.entries.get(place)
        if entry is not None and entry.spec != self.dispatcher.quotas.apply_cpu_limit(self.owner, spec):
            raise SandboxRequestError(
                f"the sandbox '{name}' already exists with a different spec: choose another idempotency key."
            )
        if entry is not None and name not in self._creating and entry.state == "running":
            return await self.get_sandbox(name), False
        new = entry is None and name not in self._creating
        return await self._create_once(name, lambda: self._service.create(spec, lifetime_s=lifetime_s, name=name)), new

    async def _create_once(self, name: str, make: Callable[[], Coroutine[Any, Any, RemoteSandbox]]) -> RemoteSandbox:
        """Create a sandbox once for all concurrent callers, any of which may be canceled."""

        async def make_and_cache() -> RemoteSandbox:
            return self._cache_sandbox(await make())

        if name not in self._creating:
            making = self._creating[name] = asyncio.create_task(make_and_cache())
            # Retrieve the exception, so that asyncio does not log it if every caller was canceled.
            making.add_done_callback(
                lambda task: (self._creating.pop(name, None), task.cancelled() or task.exception())
            )
        return await asyncio.shield(self._creating[name])

    async def get_entry(self, name: str) -> SandboxEntry:
        """Return the service's entry of a sandbox.

        Raises:
            SandboxExpiredError: the sandbox expired within the last hour.
            SandboxLostError: the sandbox was lost within the last hour.
            UnknownSandboxError: the owner has no such sandbox, or it was stopped.
        """
        try:
            return self.dispatcher.find_sandbox(self.owner, name)
        except UnknownSandboxError:
            row = await asyncio.to_thread(self.dispatcher.records.load_sandbox, self.owner, name)
            why = "" if row is None else row.why
            if why == "lost":
                raise SandboxLostError(f"the sandbox '{name}' was lost: its worker or the server ended.") from None
            if why == "expired":
                raise SandboxExpiredError(f"the sandbox '{name}' reached the end of its lifetime.") from None
            raise

    async def get_sandbox(self, name: str) -> RemoteSandbox:
        """Return a sandbox of the owner.

        Raises:
            SandboxExpiredError: the sandbox has expired.
            SandboxLostError: the sandbox was lost.
            UnknownSandboxError: the owner has no such sandbox.
        """
        sandbox = self._sandboxes.get(name)
        if sandbox is None or sandbox.has_ended:
            entry = await self.get_entry(name)
            sandbox = await self._create_once(name, lambda: self._service.attach(name, entry.spec))
        return sandbox

    def _cache_sandbox(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        if self._sandboxes.get(sandbox.name) is not sandbox:
            self._sandboxes[sandbox.name] = sandbox
            sandbox.on_close(lambda: self._drop_sandbox(sandbox.name))
        return sandbox

    def _drop_sandbox(self, name: str) -> None:
        self._sandboxes.pop(name, None)
        for key in [key for key in self.sessions if key[0] == name]:
            del self.sessions[key]

    def begin(self, sandbox: RemoteSandbox, program: Program, *, alone: bool, key: str | None) -> Job:
        """Start a program. If a program was already started with this `key`, return its job."""
        if key is None:
            return sandbox.begin(program, alone=alone)
        place = sandbox.name, key
        if place not in self._running:
            job = self._running[place] = sandbox.begin_named(key, program, alone=alone)
            job.on_end(partial(self._running.__delitem__, place))
        return self._running[place]

    def store_session(self, sandbox: str, session: Session) -> str:
        """Store a new session, and return its name."""
        name = f"{self._server_run}-{generate_name()}"
        self.sessions[sandbox, name] = session
        return name

    async def get_session(self, name: str, session: str) -> Session:
        """Return an open session.

        Raises:
            SandboxLostError: an earlier server process opened the session.
            UnknownSandboxError: the sandbox has no open session of this name.
        """
        await self.get_entry(name)
        found = self.sessions.get((name, session))
        if found is not None and not found.closed:
            return found
        era, dash, _ = session.partition("-")
        if dash and len(era) == len(self._server_run) and era != self._server_run:
            raise SandboxLostError(f"the session '{session}' was lost when the server restarted: open another.")
        raise UnknownSandboxError(f"sandbox '{name}' has no open session '{session[:64]}': open another.")


class LocalClients:
    """Creates and caches one `OwnerSandboxes` per owner, for HTTP routes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._by_owner: dict[str, OwnerSandboxes] = {}
        self._server_run = secrets.token_hex(6)

    def get(self, identity: Identity) -> OwnerSandboxes:
        """Return the sandboxes of an identity's owner, and use this identity in audit lines of the calling task."""
        _current_identity.set(identity)
        if identity.owner not in self._by_owner:
            self._by_owner[identity.owner] = OwnerSandboxes(self._dispatcher, identity, self._server_run)
        return self._by_owner[identity.owner]
