"""Isolated execution of programs that nobody vouches for. See docs/security.md.

async with SandboxManager() as sandboxes:
    result = await sandboxes.execute(PythonCode(source="print(input())", stdin=b"1\\n", cpu_s=2.0))
"""

from __future__ import annotations

from roll.sandbox.agent_sandbox import Job, Sandbox, Session
from roll.sandbox.errors import (
    OversizedUploadError,
    SandboxError,
    SandboxPathError,
    SandboxUnavailableError,
    UntrustedCodeError,
)
from roll.sandbox.manager import SandboxManager
from roll.sandbox.runtime import Runtime
from roll.sandbox.types import (
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
    "SandboxError",
    "SandboxManager",
    "SandboxPathError",
    "SandboxSpec",
    "SandboxUnavailableError",
    "Session",
    "Snapshot",
    "UntrustedCodeError",
]
