"""Refuse requests: what an agent may be told instead of an answer, before a vendor's form is given to it."""

from __future__ import annotations

__all__ = ["Refusal"]


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: in a word, for programs: `context_length_exceeded`.
        message: what is wrong, the value, and what to do.
        field: of the request that is wrong, such as `messages[2].content`; empty where none is.
        retry_after_s: after which the request may be made again; `None`: never.
    """

    def __init__(
        self, status: int, code: str, message: str, *, field: str = "", retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
