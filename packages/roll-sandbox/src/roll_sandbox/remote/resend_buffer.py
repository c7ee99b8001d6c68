"""The messages that a client sent to one running program, kept until the program has ended."""

from __future__ import annotations

from roll_sandbox.connection import AgentJob
from roll_sandbox.wire import Message

__all__ = ["ResendBuffer"]

_MAX_KEPT_BYTES = 2**24
"""Most bytes of a running program's input to keep: with more input, a program cannot be resumed over a new connection.
"""


class ResendBuffer:
    """The messages sent to a running program, all of which are sent again over a new connection."""

    def __init__(self, job: AgentJob) -> None:
        self.job = job
        self.messages: list[Message] = []
        self.num_received = 0
        self.last_answered = 0
        self.requested_at = -1
        """Number of received pieces when the rest was last requested again."""
        self.kept_bytes: int | None = 0
        """Bytes of kept input; `None`: too many to keep."""

    def store(self, message: Message) -> None:
        """Keep one more message."""
        size = len(message.get("data", b""))
        if self.kept_bytes is not None:
            self.kept_bytes = self.kept_bytes + size if self.kept_bytes + size <= _MAX_KEPT_BYTES else None
        if self.kept_bytes is not None:
            self.messages.append(message)
