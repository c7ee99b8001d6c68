"""Runs untrusted programs in isolated sandboxes. See docs/security.md.

async with SandboxManager() as sandboxes:
    result = await sandboxes.execute(PythonCode(source="print(input())", stdin=b"1\\n", cpu_s=2.0))

`connect(url, token)` returns the same manager for the sandboxes of a service (`roll-sandbox serve`), `connect_sync` a
synchronous manager.

`import roll_sandbox` loads no other module; each name is loaded on its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_sandbox.agent_sandbox import Job as Job
    from roll_sandbox.agent_sandbox import Sandbox as Sandbox
    from roll_sandbox.agent_sandbox import Session as Session
    from roll_sandbox.errors import *  # noqa: F403
    from roll_sandbox.manager import SandboxManager as SandboxManager
    from roll_sandbox.remote import connect as connect
    from roll_sandbox.runtime import Runtime as Runtime
    from roll_sandbox.sync import SyncSandboxes as SyncSandboxes
    from roll_sandbox.sync import connect_sync as connect_sync
    from roll_sandbox.types import *  # noqa: F403
    from roll_sandbox.version import __version__ as __version__

_EXPORTS = {
    "agent_sandbox": "Job Sandbox Session",
    "errors": (
        "BadImageError ConfigError OversizedUploadError RollSandboxError SandboxAccessError SandboxDatabaseError "
        "SandboxError SandboxExpiredError SandboxLostError SandboxPathError SandboxQuotaError SandboxRequestError "
        "SandboxSessionError SandboxUnavailableError UnknownImageError UnknownSandboxError UntrustedCodeError "
        "UserError"
    ),
    "manager": "SandboxManager",
    "remote": "connect",
    "runtime": "Runtime",
    "sync": "SyncSandboxes connect_sync",
    "types": ("Chunk Command ExecutionResult Limit Limits Mount Outcome Program PythonCode SandboxSpec Snapshot"),
    "version": "__version__",
}
"""Public names by module."""
_MODULE_BY_NAME = {name: f"roll_sandbox.{module}" for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_MODULE_BY_NAME)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})
