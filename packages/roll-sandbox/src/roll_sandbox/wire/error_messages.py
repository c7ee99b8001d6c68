"""Converts errors to messages and back, so that a client gets the same errors as with a local manager."""

from __future__ import annotations

from typing import Any

from roll_sandbox.errors import (
    OversizedUploadError,
    RollSandboxError,
    SandboxAccessError,
    SandboxDatabaseError,
    SandboxError,
    SandboxExpiredError,
    SandboxLostError,
    SandboxPathError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxSessionError,
    SandboxUnavailableError,
    UnknownImageError,
    UnknownSandboxError,
    UntrustedCodeError,
)

__all__ = ["HTTP_STATUS", "error_from_json", "error_to_json"]

_ERROR_TYPES: dict[str, type[RollSandboxError]] = {
    "access": SandboxAccessError,
    "broken": SandboxError,
    "database": SandboxDatabaseError,
    "expired": SandboxExpiredError,
    "image": UnknownImageError,
    "lost": SandboxLostError,
    "oversized": OversizedUploadError,
    "path": SandboxPathError,
    "quota": SandboxQuotaError,
    "request": SandboxRequestError,
    "session": SandboxSessionError,
    "unavailable": SandboxUnavailableError,
    "unknown": UnknownSandboxError,
    "untrusted": UntrustedCodeError,
}
_ERROR_NAMES = {error: kind for kind, error in _ERROR_TYPES.items()}
HTTP_STATUS = {
    "access": 403,
    "broken": 502,
    "database": 503,
    "expired": 410,
    "image": 422,
    "lost": 410,
    "oversized": 413,
    "path": 422,
    "quota": 429,
    "request": 400,
    "session": 409,
    "unavailable": 503,
    "unknown": 404,
    "untrusted": 400,
}
"""HTTP status of each type of error."""


def error_to_json(error: Exception) -> dict[str, Any]:
    """Convert an error to `{"error": kind, "message": …}`, with `errno` and `path` for a `SandboxPathError`."""
    if isinstance(error, SandboxPathError):
        return {"error": "path", "message": error.strerror, "errno": error.errno, "path": error.filename}
    kind = next((_ERROR_NAMES[each] for each in type(error).__mro__ if each in _ERROR_NAMES), None)
    if kind is None:
        kind = "request" if isinstance(error, ValueError) else "broken"
    return {"error": kind, "message": str(error)[:2000]}


def error_from_json(message: dict[str, Any]) -> RollSandboxError:
    """Convert a message to an error; an unknown kind becomes `SandboxError`."""
    text = str(message.get("message", ""))
    if message.get("error") == "path":
        number, path = message.get("errno"), message.get("path")
        return SandboxPathError(number if type(number) is int else 0, text, path if isinstance(path, str) else None)
    return _ERROR_TYPES.get(str(message.get("error")), SandboxError)(text)
