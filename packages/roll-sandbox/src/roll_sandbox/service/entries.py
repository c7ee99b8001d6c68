"""The dispatcher's state: client connections, live sandboxes and their programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_sandbox.service.tokens import Identity
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.types import SandboxSpec
from roll_sandbox.wire import Message

__all__ = ["ClientConnection", "ProgramEntry", "SandboxEntry"]


@dataclass(eq=False)
class ClientConnection:
    """The server's side of a client connection."""

    identity: Identity
    deliver: Callable[[Message], None]
    holds_leases: bool = True
    """True if sandboxes created over this connection are stopped when no client has been connected for a while."""
    peer: str = ""


@dataclass(eq=False)
class ProgramEntry:
    """A program, a session, or a command in a session."""

    connection: ClientConnection | None
    is_recorded: bool
    queued: list[Message] | None = None
    """Messages that wait until the program is in the database; `None` if no message has to wait."""
    has_ended: bool = False
    is_end_pending: bool = False
    """True if the program has ended, but its end is not in the database yet."""

    def deliver(self, message: Message) -> None:
        """Send a message to the program's client, if it is connected."""
        if self.connection is not None:
            self.connection.deliver(message)


@dataclass(eq=False)
class SandboxEntry:
    """A sandbox that has not ended."""

    owner: str
    name: str
    spec: SandboxSpec
    worker: WorkerLink
    created: float
    """Time of the request to create the sandbox, in seconds since 1970."""
    ends_at: float
    """End of the sandbox's lifetime on the monotonic clock, since the system clock may be changed."""
    state: str = "starting"
    is_leased: bool = False
    connections: set[ClientConnection] = field(default_factory=set)
    programs: dict[str, ProgramEntry] = field(default_factory=dict)
    inspections: dict[str, ClientConnection] = field(default_factory=dict)
    """Clients that wait for the sandbox's usage and programs (message `look`), by the id of the request."""
    orphaned_since: float | None = None
    is_stopping: bool = False
    queued: list[Message] | None = None
    """Messages that wait until the sandbox is in the database; `None` once it is."""
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def qualified_name(self) -> str:
        """`owner/name`, which is unique in the service; the name alone is unique only for its owner."""
        return f"{self.owner}/{self.name}"

    @property
    def expires(self) -> float:
        """End of the sandbox's lifetime, in seconds since 1970."""
        return time.time() + self.ends_at - time.monotonic()

    def send(self, message: Message) -> None:
        """Send a message to the sandbox's worker, once the sandbox is in the database."""
        if self.queued is None:
            self.worker.send(message)
        else:
            self.queued.append(message)

    def pop_queued(self) -> list[Message]:
        """Return the queued messages, and stop queueing later messages. Called when the database write is complete."""
        waiting, self.queued = self.queued or [], None
        return waiting

    @property
    def num_running(self) -> int:
        """Number of recorded programs that have not ended."""
        return sum(program.is_recorded and not program.has_ended for program in self.programs.values())
