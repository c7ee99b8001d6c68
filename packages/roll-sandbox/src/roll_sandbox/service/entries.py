"""A dispatcher's records of live client connections, sandboxes and programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_sandbox.service.tokens import Identity
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.types import SandboxSpec
from roll_sandbox.wire import Message

__all__ = ["ClientConnection", "Entry", "Program"]


@dataclass(eq=False)
class ClientConnection:
    """The server's end of a client's connection."""

    identity: Identity
    deliver: Callable[[Message], None]
    holds_leases: bool = True
    """Whether sandboxes made over this connection end with it."""
    peer: str = ""


@dataclass(eq=False)
class Program:
    """A program or a session, or a command of one."""

    connection: ClientConnection | None
    is_recorded: bool
    queued: list[Message] | None = None
    """Messages that wait until the program is in the database; `None`: it is, or need not be."""
    has_ended: bool = False
    is_end_pending: bool = False
    """Whether it has ended and its end is not in the database yet."""

    def deliver(self, message: Message) -> None:
        """Send a message to the client of the program, if one is connected."""
        if self.connection is not None:
            self.connection.deliver(message)


@dataclass(eq=False)
class Entry:
    """A sandbox that has not ended."""

    owner: str
    name: str
    spec: SandboxSpec
    worker: WorkerLink
    created: float
    """Seconds since 1970."""
    ends_at: float
    """End of its lifetime by the monotonic clock, since the system clock may be set."""
    state: str = "starting"
    is_leased: bool = False
    connections: set[ClientConnection] = field(default_factory=set)
    programs: dict[str, Program] = field(default_factory=dict)
    inspections: dict[str, ClientConnection] = field(default_factory=dict)
    """Clients that wait for an answer to `look`, by its id."""
    orphaned_since: float | None = None
    is_stopping: bool = False
    queued: list[Message] | None = None
    """Messages that wait until the sandbox is in the database; `None`: it is."""
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def qualified_name(self) -> str:
        """The name that is unique among all owners."""
        return f"{self.owner}/{self.name}"

    @property
    def expires(self) -> float:
        """End of the lifetime, in seconds since 1970."""
        return time.time() + self.ends_at - time.monotonic()

    def send(self, message: Message) -> None:
        """Send a message to the sandbox's worker, once the sandbox is in the database."""
        if self.queued is None:
            self.worker.send(message)
        else:
            self.queued.append(message)

    def take_queued(self) -> list[Message]:
        """Stop queueing after the database write has ended, well or not, and return the messages that waited for it."""
        waiting, self.queued = self.queued or [], None
        return waiting

    @property
    def num_running(self) -> int:
        """Number of recorded programs that have not ended."""
        return sum(program.is_recorded and not program.has_ended for program in self.programs.values())
