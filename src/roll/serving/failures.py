"""The two ways in which a request fails: at once with an HTTP status, or later through its promise."""

from __future__ import annotations

from typing import Literal, TypeAlias

from roll.errors import RollError, UserError, iterate_leaf_errors

__all__ = ["ApiError", "Category", "RequestFailure", "describe_failure"]

Category: TypeAlias = Literal["user", "server"]
"""The side that caused a failure."""


class ApiError(Exception):
    """Rejects a request with an HTTP status.

    Args:
        status: The HTTP status.
        message: What is wrong, the value, and what to do.
        field: The field of the body that is wrong, such as `lora_config.rank`; empty if no field is.
    """

    def __init__(self, status: int, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field


class RequestFailure(Exception):
    """A request that has a promise failed.

    Args:
        message: What is wrong, the value, and what to do.
        category: The side that caused the failure.
        was_skipped: Whether the request was not run because it or an earlier request of its model arrived too late.
    """

    def __init__(self, message: str, category: Category = "user", was_skipped: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.category: Category = category
        self.was_skipped = was_skipped


def describe_failure(error: BaseException) -> RequestFailure:
    """Return the failure that a client sees for an error."""
    error = next(iterate_leaf_errors(error))
    if isinstance(error, RequestFailure):
        return error
    if isinstance(error, ApiError):
        return RequestFailure(f"{error.field}: {error.message}" if error.field else error.message)
    if isinstance(error, RollError):
        return RequestFailure(str(error), "user" if isinstance(error, UserError) else "server")
    return RequestFailure(f"the server failed: {type(error).__name__}: {error}", "server")
