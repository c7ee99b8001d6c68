"""The client of a sandbox service. `connect` returns a `SandboxManager`; it loads its modules on its first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_sandbox.manager import SandboxManager
from roll_sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from roll_sandbox.remote.runtime import RemoteRuntime

__all__ = ["RemoteRuntime", "connect"]


def __getattr__(name: str) -> Any:
    if name != "RemoteRuntime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roll_sandbox.remote.runtime import RemoteRuntime

    return RemoteRuntime


def connect(
    url: str,
    token: str,
    *,
    spec: SandboxSpec | None = None,
    warm: int | None = None,
    max_sandboxes: int = 512,
    lifetime_s: float | None = None,
    ca_file: str | None = None,
    reconnect_timeout_s: float = 30.0,
    wait_for_quota: bool = False,
) -> SandboxManager:
    """Return a manager whose sandboxes run in a service: `async with connect(url, token) as sandboxes: ...`

    Args:
        url: address of the service, `http://host:port` or `https://…`, as `roll-sandbox serve` prints it.
        token: a token from `roll-sandbox token create`.
        spec, warm, max_sandboxes: as for `SandboxManager`; idle sandboxes are reserved for this client.
        lifetime_s: seconds after which the service ends each sandbox; `None` for the service's default.
        ca_file: file of CA certificates to verify the service's certificate; `None` for the system's certificates.
        reconnect_timeout_s: seconds without a connection after which running programs are treated as lost.
        wait_for_quota: if true, wait up to `reconnect_timeout_s` when the owner's quota of sandboxes is used up.

    Raises:
        ConfigError: the address, token or CA file is invalid.
        SandboxUnavailableError: no service answers (raised when the manager is started).
        SandboxAccessError: the service rejects the token (raised when the manager is started).
    """
    from roll_sandbox.remote.runtime import RemoteRuntime

    runtime = RemoteRuntime(
        url,
        token,
        lifetime_s=lifetime_s,
        ca_file=ca_file,
        reconnect_timeout_s=reconnect_timeout_s,
        wait_for_quota=wait_for_quota,
    )
    return SandboxManager(runtime, spec=spec, warm=warm, max_sandboxes=max_sandboxes)
