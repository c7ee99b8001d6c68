"""The server's end of a worker's connection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from roll_sandbox.wire import Message, Report, encode

__all__ = ["WorkerLink"]

_MAX_QUEUED = 10_000
"""Most queued messages for a worker that is away."""
_MAX_QUEUED_BYTES = 2**27


@dataclass
class WorkerLink:
    """A worker. One that is away for a moment may come back with its sandboxes."""

    name: str
    transmit: Callable[[Message], None] | None
    """`None` while it is away."""
    capacity: int = 512
    """Most sandboxes at once."""
    memory_bytes: int | None = None
    """Bound on the sum of its sandboxes' memory limits; `None`: no bound."""
    is_drained: bool = False
    """Whether an admin requested that it gets no new sandboxes."""
    is_leaving: bool = False
    """Whether the worker itself requested that, and exits when it has no sandboxes."""
    process: str = ""
    """Identifier of the process that has the name: one at a time."""
    disconnect: Callable[[], None] | None = None
    """Closes the connection to it."""
    last_message_at: float = math.inf
    """Time of its last message (monotonic); infinite for a worker in this process."""
    last_seen: float = 0.0
    """Time of its last message, in seconds since 1970."""
    report: Report = field(default_factory=Report)
    num_placed: int = 0
    """Sandboxes placed since its last report."""
    away_since: float = 0.0
    num_sandboxes: int = 0
    reserved_memory_bytes: int = 0
    queued: list[Message] = field(default_factory=list)
    queued_bytes: int = 0
    uploads: set[str] = field(default_factory=set)
    """Digests of the directories that were sent to it since it joined."""

    @property
    def is_connected(self) -> bool:
        """Whether the worker is connected."""
        return self.transmit is not None

    @property
    def is_draining(self) -> bool:
        """Whether the worker gets no new sandboxes."""
        return self.is_drained or self.is_leaving

    @property
    def state(self) -> str:
        """State for display: `away`, `draining` or `ready`."""
        return "away" if not self.is_connected else "draining" if self.is_draining else "ready"

    def update_report(self, report: Report) -> None:
        """Store the worker's latest report of its machine."""
        self.report, self.num_placed, self.last_seen = report, 0, time.time()

    def mark_away(self, monotonic: float) -> None:
        """Mark the worker as away: its connection broke, or is silent."""
        hang_up, self.transmit, self.disconnect, self.away_since = self.disconnect, None, None, monotonic
        if hang_up is not None:
            hang_up()

    def send(self, message: Message) -> None:
        """Send a message to the worker; while it is away, queue it until the worker is back."""
        if self.transmit is not None:
            self.transmit(message)
        elif len(self.queued) < _MAX_QUEUED and self.queued_bytes < _MAX_QUEUED_BYTES:
            self.queued.append(message)
            self.queued_bytes += len(encode(message))
