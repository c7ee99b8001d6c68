"""A switchboard's records of live client connections, sandboxes and programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_sandbox.service.links import WorkerLink
from roll_sandbox.service.tokens import Identity
from roll_sandbox.types import SandboxSpec
from roll_sandbox.wire import Message

__all__ = ["ClientLine", "Entry", "Program"]


@dataclass(eq=False)
class ClientLine:
    """The server's end of a client's connection."""

    identity: Identity
    deliver: Callable[[Message], None]
    leases: bool = True
    """Whether sandboxes made over this connection end with it."""
    peer: str = ""


@dataclass(eq=False)
class Program:
    """A program or a session, or a command of one."""

    line: ClientLine | None
    recorded: bool
    waiting: list[Message] | None = None
    """Messages that wait until the program is in the database; `None`: it is, or need not be."""
    over: bool = False
    ending: bool = False
    """Whether it has ended and its end is not in the database yet."""


@dataclass(eq=False)
class Entry:
    """A sandbox that has not ended."""

    owner: str
    name: str
    spec: SandboxSpec
    worker: WorkerLink
    created: float
    """Seconds since 1970."""
    ends: float
    """End of its lifetime by the monotonic clock, since the system clock may be set."""
    state: str = "starting"
    leased: bool = False
    lines: set[ClientLine] = field(default_factory=set)
    programs: dict[str, Program] = field(default_factory=dict)
    looks: dict[str, ClientLine] = field(default_factory=dict)
    """Clients that wait for an answer to `look`, by its id."""
    alone_since: float | None = None
    stopping: bool = False
    waiting: list[Message] | None = None
    """Messages that wait until the sandbox is in the database; `None`: it is."""
    traits: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The name that is unique among all owners."""
        return f"{self.owner}/{self.name}"

    @property
    def expires(self) -> float:
        """End of the lifetime, in seconds since 1970."""
        return time.time() + self.ends - time.monotonic()

    def send(self, message: Message) -> None:
        """Send a message to the sandbox's worker, once the sandbox is in the database."""
        if self.waiting is None:
            self.worker.send(message)
        else:
            self.waiting.append(message)

    def written(self) -> list[Message]:
        """Stop queueing after the database write has ended, well or not, and return the messages that waited for it."""
        waiting, self.waiting = self.waiting or [], None
        return waiting

    @property
    def running(self) -> int:
        """Number of recorded programs that have not ended."""
        return sum(program.recorded and not program.over for program in self.programs.values())
