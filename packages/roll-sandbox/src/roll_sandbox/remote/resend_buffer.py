"""Keeps the messages to a running program until the program has ended, to resend them over a new connection."""

from __future__ import annotations

from roll_sandbox.connection import AgentJob
from roll_sandbox.wire import Message

__all__ = ["ResendBuffer"]

_MAX_KEPT_BYTES = 2**24
"""Maximum bytes of input to keep for a running program; beyond it, the program cannot be resumed over a new
connection."""


class ResendBuffer:
    """Stores the messages that were sent to one running program, to send them again over a new connection."""

    def __init__(self, job: AgentJob) -> None:
        self.job = job
        self.messages: list[Message] = []
        self.num_received = 0
        self.last_answered = 0
        self.requested_at = -1
        """Number of output chunks that had been received when missing output was last requested."""
        self.kept_bytes: int | None = 0
        """Bytes of input that are kept; `None` if the input was too large to keep."""

    def store(self, message: Message) -> None:
        """Store a message. If the stored input becomes too large, discard this message and all later messages."""
        size = len(message.get("data", b""))
        if self.kept_bytes is not None:
            self.kept_bytes = self.kept_bytes + size if self.kept_bytes + size <= _MAX_KEPT_BYTES else None
        if self.kept_bytes is not None:
            self.messages.append(message)
