"""Sandboxes for HTTP routes: the code of remote clients, connected to the dispatcher inside this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

from roll_sandbox.agent_sandbox import Job, Session
from roll_sandbox.errors import SandboxExpiredError, SandboxLostError, SandboxRequestError, UnknownSandboxError
from roll_sandbox.remote.connection import RemoteSandbox, ServiceConnection, new_name
from roll_sandbox.service.dispatcher import ClientConnection, Dispatcher, Entry
from roll_sandbox.service.tokens import Identity
from roll_sandbox.types import Program, SandboxSpec
from roll_sandbox.wire import Message, validate_client_message

__all__ = ["LocalClients", "OwnerSandboxes"]

_current_identity: ContextVar[Identity] = ContextVar("acting")
"""Identity of the present request, so that the audit log names its token and not the owner's first one."""


class OwnerSandboxes:
    """The sandboxes of one owner, for HTTP routes. A sandbox that is created here lives until it is stopped or expires.

    Args:
        dispatcher: the switchboard.
        identity: the owner's identity.
        server_run: identifier of this run of the server: sessions of an earlier run are lost.
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
        """Create a sandbox, or return the live one of this name; and return whether it is new. See `Line.create`.

        Raises:
            SandboxRequestError: the sandbox of this name has another spec.
            UnknownSandboxError: the sandbox of this name has ended.
        """
        if name is None:
            return self._remember(await self._service.create(spec, lifetime_s=lifetime_s, near=near)), True
        place = f"{self.owner}/{name}"
        if place not in self.dispatcher.entries and name not in self._creating:
            row = await asyncio.to_thread(self.dispatcher.records.load_sandbox, self.owner, name)
            if row is not None and place not in self.dispatcher.entries and name not in self._creating:
                raise UnknownSandboxError(f"the sandbox '{name}' has ended: choose another idempotency key.")
        entry = self.dispatcher.entries.get(place)
        if entry is not None and entry.spec != self.dispatcher.quotas.apply_cpu_limit(self.owner, spec):
            raise SandboxRequestError(f"the sandbox '{name}' has another spec: choose another idempotency key.")
        if entry is not None and name not in self._creating and entry.state == "running":
            return await self.sandbox(name), False
        new = entry is None and name not in self._creating
        return await self._create_once(name, lambda: self._service.create(spec, lifetime_s=lifetime_s, name=name)), new

    async def _create_once(self, name: str, make: Callable[[], Coroutine[Any, Any, RemoteSandbox]]) -> RemoteSandbox:
        """Make a sandbox once for all concurrent callers, any of which may be canceled."""

        async def made() -> RemoteSandbox:
            return self._remember(await make())

        if name not in self._creating:
            making = self._creating[name] = asyncio.create_task(made())
            making.add_done_callback(
                lambda task: (self._creating.pop(name, None), task.cancelled() or task.exception())
            )
        return await asyncio.shield(self._creating[name])

    async def entry(self, name: str) -> Entry:
        """Return the service's entry of a sandbox.

        Raises:
            SandboxExpiredError: the sandbox expired within the last hour.
            SandboxLostError: the sandbox was lost within the last hour.
            UnknownSandboxError: the owner has no such sandbox, or it was stopped.
        """
        try:
            return self.dispatcher.find(self.owner, name)
        except UnknownSandboxError:
            row = await asyncio.to_thread(self.dispatcher.records.load_sandbox, self.owner, name)
            why = "" if row is None else row.why
            if why == "lost":
                raise SandboxLostError(f"the sandbox '{name}' was lost: its worker or the server ended.") from None
            if why == "expired":
                raise SandboxExpiredError(f"the sandbox '{name}' reached the end of its lifetime.") from None
            raise

    async def sandbox(self, name: str) -> RemoteSandbox:
        """Return a sandbox of the owner.

        Raises:
            SandboxExpiredError: the sandbox has expired.
            SandboxLostError: the sandbox was lost.
            UnknownSandboxError: the owner has no such sandbox.
        """
        found = self._sandboxes.get(name)
        if found is None or found.broken:
            entry = await self.entry(name)
            found = await self._create_once(name, lambda: self._service.attach(name, entry.spec))
        return found

    def _remember(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        if self._sandboxes.get(sandbox.name) is not sandbox:
            self._sandboxes[sandbox.name] = sandbox
            sandbox.on_close(lambda: self._forget(sandbox.name))
        return sandbox

    def _forget(self, name: str) -> None:
        self._sandboxes.pop(name, None)
        for key in [key for key in self.sessions if key[0] == name]:
            del self.sessions[key]

    def begin(self, sandbox: RemoteSandbox, program: Program, *, alone: bool, key: str | None) -> Job:
        """Start a program; with a known `key`, return the job that was started with it."""
        if key is None:
            return sandbox.begin(program, alone=alone)
        place = sandbox.name, key
        if place not in self._running:
            job = self._running[place] = sandbox.begin_named(key, program, alone=alone)
            job.on_end(partial(self._running.__delitem__, place))
        return self._running[place]

    def store_session(self, sandbox: str, session: Session) -> str:
        """Store a new session, and return its name."""
        name = f"{self._server_run}-{new_name()}"
        self.sessions[sandbox, name] = session
        return name

    async def session(self, name: str, session: str) -> Session:
        """Return a session that was opened here.

        Raises:
            SandboxLostError: an earlier run of the server opened it.
            UnknownSandboxError: there is no such session.
        """
        await self.entry(name)
        found = self.sessions.get((name, session))
        if found is not None and not found.closed:
            return found
        era, dash, _ = session.partition("-")
        if dash and len(era) == len(self._server_run) and era != self._server_run:
            raise SandboxLostError(f"the session '{session}' was lost when the server restarted: open another.")
        raise UnknownSandboxError(f"sandbox '{name}' has no open session '{session[:64]}': open another.")


class LocalClients:
    """Creates and caches the `OwnerSandboxes` of each owner."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._by_owner: dict[str, OwnerSandboxes] = {}
        self._server_run = secrets.token_hex(6)

    def get(self, identity: Identity) -> OwnerSandboxes:
        """Return the sandboxes of an identity's owner; later audit lines of the calling task name this identity."""
        _current_identity.set(identity)
        if identity.owner not in self._by_owner:
            self._by_owner[identity.owner] = OwnerSandboxes(self._dispatcher, identity, self._server_run)
        return self._by_owner[identity.owner]
