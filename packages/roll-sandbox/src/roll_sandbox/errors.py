"""Errors of this room: part of the tree in `roll_sandbox.errors`."""

from __future__ import annotations

from roll_sandbox.errors import SandboxError, RollSandboxError, UserError

__all__ = [
    "BadImageError",
    "OversizedUploadError",
    "SandboxAccessError",
    "SandboxDatabaseError",
    "SandboxError",
    "SandboxExpiredError",
    "SandboxLostError",
    "SandboxPathError",
    "SandboxQuotaError",
    "SandboxRequestError",
    "SandboxSessionError",
    "SandboxUnavailableError",
    "UnknownImageError",
    "UnknownSandboxError",
    "UntrustedCodeError",
]


class SandboxUnavailableError(UserError):
    """This machine cannot run such sandboxes; the message says what is missing."""


class UnknownImageError(SandboxUnavailableError):
    """Where the sandbox would run, no image of this name has been pulled or imported."""


class BadImageError(UserError):
    """An image is broken or hostile, or of a kind that sandboxes cannot use."""


class UntrustedCodeError(UserError):
    """A runtime without isolation was given code that is not trusted."""


class SandboxError(SandboxError):
    """A sandbox broke or could not be started: not the program's doing. The work may be issued again."""


class SandboxLostError(SandboxError):
    """A service lost a sandbox, or what a program in it came to: nobody knows how it ended, and it is not run again."""


class SandboxExpiredError(SandboxError):
    """A sandbox reached the end of the lifetime that it was given."""


class SandboxSessionError(SandboxError):
    """A shell session could not be opened, or has ended; the sandbox itself is well."""


class SandboxDatabaseError(SandboxError):
    """A service's database does not answer: nothing was started, and the same may be asked again."""


class UnknownSandboxError(SandboxError):
    """A service has no such sandbox for this owner: never, or no more."""


class SandboxAccessError(UserError):
    """A service refuses a token, or what it was used for."""


class SandboxQuotaError(UserError):
    """More than an owner may have of a service."""


class SandboxRequestError(UserError):
    """A service does not understand a request, or never does what it asks for."""


class SandboxPathError(RollSandboxError, OSError):
    """A file in the sandbox cannot be read or written; `errno` says why."""


class OversizedUploadError(RollSandboxError, ValueError):
    """Files or input do not fit into the sandbox that they are for."""
