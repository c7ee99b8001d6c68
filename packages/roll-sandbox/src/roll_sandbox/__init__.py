"""Isolated execution of programs that nobody vouches for. See docs/security.md.

async with SandboxManager() as sandboxes:
    result = await sandboxes.execute(PythonCode(source="print(input())", stdin=b"1\\n", cpu_s=2.0))

`connect(url, token)` gives the same manager for sandboxes of a service (`roll-sandbox serve`), `connect_sync` one for
code that is not asynchronous.
"""

from __future__ import annotations

from roll_sandbox.agent_sandbox import Job, Sandbox, Session
from roll_sandbox.errors import (
    BadImageError,
    OversizedUploadError,
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

__all__ = [
    "BadImageError",
    "Chunk",
    "Command",
    "ExecutionResult",
    "Job",
    "Limit",
    "Limits",
    "Mount",
    "Outcome",
    "OversizedUploadError",
    "Program",
    "PythonCode",
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
    "connect",
    "connect_sync",
]
