"""The errors of this package.

RollSandboxError
├── UserError (ValueError)      an error that the caller can fix
│   ├── ConfigError             an address, a token, a file or an option that cannot be used
│   ├── SandboxUnavailableError this machine cannot run sandboxes of the requested type
│   │   └── UnknownImageError   no image has this name
│   ├── BadImageError           an image that is broken or malicious
│   ├── UntrustedCodeError      a runtime without isolation was given untrusted code
│   ├── SandboxAccessError      a service refuses a token
│   ├── SandboxQuotaError       a request exceeds an owner's quota
│   └── SandboxRequestError     a request is invalid or not supported
├── SandboxError (RuntimeError) a sandbox failed, and the program is not the cause; the work may be retried
│   ├── SandboxLostError        the end of a program is unknown
│   ├── SandboxExpiredError     a sandbox reached the end of its lifetime
│   ├── SandboxSessionError     a shell session could not be opened, or has ended
│   ├── SandboxDatabaseError    a service's database fails
│   └── UnknownSandboxError     a service has no sandbox of this name for this owner
├── SandboxPathError (OSError)  a file in a sandbox cannot be read or written
└── OversizedUploadError (ValueError)   files or input do not fit into their sandbox
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
    """Base class of the errors that this package raises."""


class UserError(RollSandboxError, ValueError):
    """An error that the caller can fix."""


class ConfigError(UserError):
    """A setting is invalid, such as an address, a token, a file or an option."""


class SandboxUnavailableError(UserError):
    """This machine cannot run sandboxes of the requested type; the message states what is missing."""


class UnknownImageError(SandboxUnavailableError):
    """No image of this name exists on the machine on which the sandbox would run: pull or import it there."""


class BadImageError(UserError):
    """An image is broken or malicious, or sandboxes do not support it."""


class UntrustedCodeError(UserError):
    """A runtime without isolation was asked to run untrusted code."""


class SandboxError(RollSandboxError, RuntimeError):
    """A sandbox failed or could not be started, and the program is not the cause. The work may be retried."""


class SandboxLostError(SandboxError):
    """A service lost a sandbox, or the result of a program in it. The program may have run, so it is not run again."""


class SandboxExpiredError(SandboxError):
    """A sandbox reached the end of its lifetime."""


class SandboxSessionError(SandboxError):
    """A shell session could not be opened, or has ended; the sandbox itself is intact."""


class SandboxDatabaseError(SandboxError):
    """A service's database does not respond or fails, for example because it is full, locked or read-only.

    Nothing was started, and the request may be retried.
    """


class UnknownSandboxError(SandboxError):
    """The owner has no sandbox of this name in the service: it never existed, or was stopped."""


class SandboxAccessError(UserError):
    """A service rejects a token, or the token does not allow an operation."""


class SandboxQuotaError(UserError):
    """A request exceeds an owner's quota."""


class SandboxRequestError(UserError):
    """A request to a service is invalid or not supported."""


class SandboxPathError(RollSandboxError, OSError):
    """A file in the sandbox cannot be read or written; `errno` contains the reason."""


class OversizedUploadError(RollSandboxError, ValueError):
    """Files or input do not fit into their sandbox."""
