"""The errors of this package.

RollSandboxError
├── UserError (ValueError)      the caller can fix it
│   ├── ConfigError             an address, a token, a file or an option that cannot be used
│   ├── SandboxUnavailableError this machine cannot run such sandboxes
│   │   └── UnknownImageError   no image has this name
│   ├── BadImageError           an image that is broken or hostile
│   ├── UntrustedCodeError      untrusted code for a runtime without isolation
│   ├── SandboxAccessError      a service refuses a token
│   ├── SandboxQuotaError       a request exceeds an owner's quota
│   └── SandboxRequestError     a service does not understand a request
├── SandboxError (RuntimeError) a sandbox broke, through no fault of the program; the work may be retried
│   ├── SandboxLostError        how a program ended is unknown
│   ├── SandboxExpiredError     a sandbox reached the end of its lifetime
│   ├── SandboxSessionError     a shell session could not be opened, or has ended
│   ├── SandboxDatabaseError    a service's database does not answer
│   └── UnknownSandboxError     a service has no such sandbox of this owner
├── SandboxPathError (OSError)  a file in a sandbox cannot be read or written
└── OversizedUploadError (ValueError)   files or input do not fit
"""

from __future__ import annotations

__all__ = [
    "BadImageError",
    "ConfigError",
    "OversizedUploadError",
    "RollSandboxError",
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
    "UserError",
]


class RollSandboxError(Exception):
    """Base of all errors that this package raises on purpose."""


class UserError(RollSandboxError, ValueError):
    """An error that the caller can fix."""


class ConfigError(UserError):
    """A setting that cannot be used: an address, a token, a file, an option."""


class SandboxUnavailableError(UserError):
    """This machine cannot run such sandboxes; the message says what is missing."""


class UnknownImageError(SandboxUnavailableError):
    """No image of this name has been pulled or imported where the sandbox would run."""


class BadImageError(UserError):
    """An image is broken or hostile, or of a kind that sandboxes cannot use."""


class UntrustedCodeError(UserError):
    """A runtime without isolation was given code that is not trusted."""


class SandboxError(RollSandboxError, RuntimeError):
    """A sandbox broke or could not be started, through no fault of the program. The work may be retried."""


class SandboxLostError(SandboxError):
    """A service lost a sandbox or the result of a program in it. How it ended is unknown, and it is not run again."""


class SandboxExpiredError(SandboxError):
    """A sandbox reached the end of its lifetime."""


class SandboxSessionError(SandboxError):
    """A shell session could not be opened, or has ended; the sandbox itself is intact."""


class SandboxDatabaseError(SandboxError):
    """A service's database does not answer. Nothing was started, and the request may be retried."""


class UnknownSandboxError(SandboxError):
    """A service has no such sandbox for this owner: it never existed, or was stopped."""


class SandboxAccessError(UserError):
    """A service refuses a token, or an operation with it."""


class SandboxQuotaError(UserError):
    """A request exceeds an owner's quota."""


class SandboxRequestError(UserError):
    """A service does not understand a request, or never supports it."""


class SandboxPathError(RollSandboxError, OSError):
    """A file in the sandbox cannot be read or written; `errno` says why."""


class OversizedUploadError(RollSandboxError, ValueError):
    """Files or input do not fit into their sandbox."""
