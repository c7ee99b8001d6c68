"""Sandboxes for HTTP routes: the client's own code, over a line that stays in this process."""

from __future__ import annotations

from roll.sandbox.agent_sandbox import Session
from roll.sandbox.errors import UnknownSandboxError
from roll.sandbox.remote.line import Line, RemoteSandbox
from roll.sandbox.service.switchboard import ClientLine, Switchboard
from roll.sandbox.service.tokens import Identity
from roll.sandbox.types import SandboxSpec
from roll.sandbox.wire import checked

__all__ = ["Inside", "Owned"]


class Owned:
    """One owner's sandboxes, as routes use them. What was made here lives until it is stopped or expires."""

    def __init__(self, board: Switchboard, identity: Identity) -> None:
        self.board = board
        self.owner = identity.owner
        self._client: ClientLine
        self._line = Line(lambda message: board.receive(self._client, checked(message)))
        self._client = ClientLine(identity, self._line.receive, leases=False)
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self.sessions: dict[tuple[str, str], Session] = {}

    async def create(self, spec: SandboxSpec, lifetime_s: float | None, *, near: str | None = None) -> RemoteSandbox:
        """See `Line.create`."""
        return self._kept(await self._line.create(spec, lifetime_s=lifetime_s, near=near))

    async def sandbox(self, name: str) -> RemoteSandbox:
        """One that the owner has.

        Raises:
            UnknownSandboxError: there is none of this name.
        """
        found = self._sandboxes.get(name)
        if found is None or found.broken:
            entry = self.board.find(self.owner, name)
            found = self._kept(await self._line.attach(name, entry.spec))
        return found

    def _kept(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        self._sandboxes[sandbox.name] = sandbox
        sandbox.on_close(lambda: self._forget(sandbox.name))
        return sandbox

    def _forget(self, name: str) -> None:
        self._sandboxes.pop(name, None)
        for key in [key for key in self.sessions if key[0] == name]:
            del self.sessions[key]

    def session(self, name: str, session: str) -> Session:
        """One that was opened here.

        Raises:
            UnknownSandboxError: there is none, or this server did not open it.
        """
        self.board.find(self.owner, name)
        found = self.sessions.get((name, session))
        if found is None:
            raise UnknownSandboxError(f"sandbox '{name}' has no session '{session[:64]}', or no more: open another.")
        return found


class Inside:
    """`Owned` by owner."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._owned: dict[str, Owned] = {}

    def of(self, identity: Identity) -> Owned:
        """Of whoever asks."""
        if identity.owner not in self._owned:
            self._owned[identity.owner] = Owned(self._board, identity)
        return self._owned[identity.owner]
