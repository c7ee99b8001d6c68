"""The server's state of a worker, and its connection to the worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from roll_sandbox.wire import Message, WorkerReport, encode

__all__ = ["WorkerLink"]

_MAX_QUEUED = 10_000
"""Maximum number of queued messages for a worker that is disconnected."""
_MAX_QUEUED_BYTES = 2**27


@dataclass
class WorkerLink:
    """The server's state of a worker. After a disconnection, a worker may reconnect with its sandboxes."""

    name: str
    transmit: Callable[[Message], None] | None
    """Sends a message to the worker; `None` while the worker is disconnected."""
    capacity: int = 512
    """Maximum number of concurrent sandboxes."""
    memory_bytes: int | None = None
    """Maximum sum of the memory limits of the worker's sandboxes; `None` for no limit."""
    is_drained: bool = False
    """True if an admin has requested that the worker gets no new sandboxes."""
    is_leaving: bool = False
    """True if the worker itself accepts no new sandboxes, since it exits when its current sandboxes have ended."""
    process: str = ""
    """Identifier of the worker's process; no other process can join by the same name while the worker is connected."""
    disconnect: Callable[[], None] | None = None
    """Closes the connection to the worker."""
    last_message_at: float = math.inf
    """Time of the worker's last message on the monotonic clock; infinite for a worker in this process."""
    last_seen: float = 0.0
    """Time of the worker's last message, in seconds since 1970."""
    report: WorkerReport = field(default_factory=WorkerReport)
    num_placed: int = 0
    """Number of sandboxes that were placed on the worker since its last report."""
    disconnected_since: float = 0.0
    num_sandboxes: int = 0
    reserved_memory_bytes: int = 0
    queued: list[Message] = field(default_factory=list)
    queued_bytes: int = 0
    uploads: set[str] = field(default_factory=set)
    """Digests of the uploaded directories that the worker has received since it joined."""

    @property
    def is_connected(self) -> bool:
        """True if the worker is connected."""
        return self.transmit is not None

    @property
    def is_draining(self) -> bool:
        """True if no new sandboxes are started on the worker."""
        return self.is_drained or self.is_leaving

    @property
    def state(self) -> str:
        """The state to display: `away` (disconnected), `draining` or `ready`."""
        return "away" if not self.is_connected else "draining" if self.is_draining else "ready"

    def update_report(self, report: WorkerReport) -> None:
        """Store the worker's latest report of its machine."""
        self.report, self.num_placed, self.last_seen = report, 0, time.time()

    def mark_disconnected(self, monotonic: float) -> None:
        """Close the worker's connection, if any, and mark the worker as disconnected at the time `monotonic`."""
        hang_up, self.transmit, self.disconnect, self.disconnected_since = self.disconnect, None, None, monotonic
        if hang_up is not None:
            hang_up()

    def send(self, message: Message) -> None:
        """Send a message to the worker; while it is disconnected, queue the message until it reconnects."""
        if self.transmit is not None:
            self.transmit(message)
        elif len(self.queued) < _MAX_QUEUED and self.queued_bytes < _MAX_QUEUED_BYTES:
            self.queued.append(message)
            self.queued_bytes += len(encode(message))
