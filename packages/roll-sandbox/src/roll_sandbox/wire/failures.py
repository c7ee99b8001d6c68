"""Errors as messages, so that a client raises the errors of a local manager."""

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

__all__ = ["STATUS", "failure_of", "failure_said"]

_KINDS: dict[str, type[RollSandboxError]] = {
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
_NAMES = {error: kind for kind, error in _KINDS.items()}
STATUS = {
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
"""HTTP status of each kind."""


def failure_said(error: Exception) -> dict[str, Any]:
    """Convert an error to `{"error": kind, "message": …}`, with `errno` and `path` for a `SandboxPathError`."""
    if isinstance(error, SandboxPathError):
        return {"error": "path", "message": error.strerror, "errno": error.errno, "path": error.filename}
    kind = next((_NAMES[each] for each in type(error).__mro__ if each in _NAMES), None)
    if kind is None:
        kind = "request" if isinstance(error, ValueError) else "broken"
    return {"error": kind, "message": str(error)[:2000]}


def failure_of(said: dict[str, Any]) -> RollSandboxError:
    """Convert a message to its error; an unknown kind becomes `SandboxError`."""
    message = str(said.get("message", ""))
    if said.get("error") == "path":
        number, path = said.get("errno"), said.get("path")
        return SandboxPathError(number if type(number) is int else 0, message, path if isinstance(path, str) else None)
    return _KINDS.get(str(said.get("error")), SandboxError)(message)
