"""Errors of requests that the endpoint rejects, independent of a vendor's format."""

from __future__ import annotations

__all__ = ["RequestError", "build_session_over_error"]


class RequestError(Exception):
    """The endpoint rejects a request.

    Args:
        status: HTTP status.
        code: A machine-readable error code, such as `context_length_exceeded`.
        message: States the problem, the value, and a remedy.
        field: The invalid field of the request, such as `messages[2].content`; empty if the error is not in a field.
        retry_after_s: Seconds after which the request may be retried; `None` if a retry does not help.
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


def build_session_over_error() -> RequestError:
    """Return the error for a request of a session that has ended."""
    return RequestError(401, "session_over", "this session is closed because the agent ended or was stopped.")
