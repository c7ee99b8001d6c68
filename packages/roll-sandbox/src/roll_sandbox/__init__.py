"""Isolated execution of programs that nobody vouches for. See docs/security.md.

async with SandboxManager() as sandboxes:
    result = await sandboxes.execute(PythonCode(source="print(input())", stdin=b"1\\n", cpu_s=2.0))

`connect(url, token)` gives the same manager for sandboxes of a service (`roll-sandbox serve`), `connect_sync` one for
code that is not asynchronous.

Importing `roll_sandbox` imports nothing else; each name is fetched on its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_sandbox.agent_sandbox import Job, Sandbox, Session
    from roll_sandbox.errors import (
        BadImageError,
        ConfigError,
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
        UserError,
    )
    from roll_sandbox.manager import SandboxManager
    from roll_sandbox.remote import connect
    from roll_sandbox.runtime import Runtime
    from roll_sandbox.sync import SyncSandboxes, connect_sync
    from roll_sandbox.types import (
        Chunk,
        Command,
        ExecutionResult,
        Limit,
        Limits,
        Mount,
        Outcome,
        Program,
        PythonCode,
        SandboxSpec,
        Snapshot,
    )
    from roll_sandbox.version import __version__

__all__ = [
    "BadImageError",
    "Chunk",
    "Command",
    "ConfigError",
    "ExecutionResult",
    "Job",
    "Limit",
    "Limits",
    "Mount",
    "Outcome",
    "OversizedUploadError",
    "Program",
    "PythonCode",
    "RollSandboxError",
    "Runtime",
    "Sandbox",
    "SandboxAccessError",
    "SandboxDatabaseError",
    "SandboxError",
    "SandboxExpiredError",
    "SandboxLostError",
    "SandboxManager",
    "SandboxPathError",
    "SandboxQuotaError",
    "SandboxRequestError",
    "SandboxSessionError",
    "SandboxSpec",
    "SandboxUnavailableError",
    "Session",
    "Snapshot",
    "SyncSandboxes",
    "UnknownImageError",
    "UnknownSandboxError",
    "UntrustedCodeError",
    "UserError",
    "__version__",
    "connect",
    "connect_sync",
]

_HOMES = {
    name: f"roll_sandbox.{module}"
    for module, names in {
        "agent_sandbox": ["Job", "Sandbox", "Session"],
        "errors": [
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
        ],
        "manager": ["SandboxManager"],
        "remote": ["connect"],
        "runtime": ["Runtime"],
        "sync": ["SyncSandboxes", "connect_sync"],
        "types": [
            "Chunk",
            "Command",
            "ExecutionResult",
            "Limit",
            "Limits",
            "Mount",
            "Outcome",
            "Program",
            "PythonCode",
            "SandboxSpec",
            "Snapshot",
        ],
        "version": ["__version__"],
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
