"""The server's end of a way to a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from roll.sandbox.wire import Message

__all__ = ["WorkerLink"]

_WAITING = 10_000
"""Messages for a worker that is away."""


@dataclass
class WorkerLink:
    """A worker, also one that is away for a moment and may come back with what it holds."""

    name: str
    transmit: Callable[[Message], None] | None
    """`None` while it is away."""
    capacity: int = 512
    memory_bytes: int | None = None
    draining: bool = False
    away_since: float = 0.0
    held: int = 0
    held_memory_bytes: int = 0
    waiting: list[Message] = field(default_factory=list)

    @property
    def here(self) -> bool:
        """Whether it can be told anything."""
        return self.transmit is not None

    def send(self, message: Message) -> None:
        """To the worker, or, while it is away, when it is back."""
        if self.transmit is not None:
            self.transmit(message)
        elif len(self.waiting) < _WAITING:
            self.waiting.append(message)
