"""What a switchboard knows of clients' lines, sandboxes and programs while they are alive."""

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
    """The server's end of a line."""

    identity: Identity
    deliver: Callable[[Message], None]
    leases: bool = True
    """Whether sandboxes that were made over it end with it."""
    peer: str = ""


@dataclass(eq=False)
class Program:
    """A program or a session, or a command of one."""

    line: ClientLine | None
    recorded: bool
    waiting: list[Message] | None = None
    """What came for it before it was written down."""
    over: bool = False
    ending: bool = False
    """Over, and its end not written down yet."""


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
    """When its lifetime does, by the monotonic clock: one that is set anew ends no sandbox, and keeps none."""
    state: str = "starting"
    leased: bool = False
    lines: set[ClientLine] = field(default_factory=set)
    programs: dict[str, Program] = field(default_factory=dict)
    looks: dict[str, ClientLine] = field(default_factory=dict)
    """Who waits to hear how it stands."""
    alone_since: float | None = None
    stopping: bool = False
    waiting: list[Message] | None = None
    """What came for its worker before it was written down; `None`: it has been."""
    traits: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Its name among all owners'."""
        return f"{self.owner}/{self.name}"

    @property
    def expires(self) -> float:
        """When its lifetime ends, in seconds since 1970."""
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
        """Recorded programs that have not ended."""
        return sum(program.recorded and not program.over for program in self.programs.values())
