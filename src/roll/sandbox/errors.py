"""Errors of this room: part of the tree in `roll.errors`."""

from __future__ import annotations

from roll.errors import InfraError, RollError, UserError

__all__ = ["OversizedUploadError", "SandboxError", "SandboxPathError", "SandboxUnavailableError", "UntrustedCodeError"]


class SandboxUnavailableError(UserError):
    """This machine cannot run such sandboxes; the message says what is missing."""


class UntrustedCodeError(UserError):
    """A runtime without isolation was given code that is not trusted."""


class SandboxError(InfraError):
    """A sandbox broke or could not be started: not the program's doing. The work may be issued again."""


class SandboxPathError(RollError, OSError):
    """A file in the sandbox cannot be read or written; `errno` says why."""


class OversizedUploadError(RollError, ValueError):
    """Files or input do not fit into the sandbox that they are for."""
