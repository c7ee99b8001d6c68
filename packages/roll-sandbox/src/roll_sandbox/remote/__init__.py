"""The client of a sandbox service. `connect` returns a manager like the local one; imports happen on its first call."""

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
    """Return a manager of a service's sandboxes: `async with connect(url, token) as sandboxes: ...`

    Args:
        url: `http://host:port` or `https://…`, as `roll-sandbox serve` printed it.
        token: a token of `roll-sandbox token create`.
        spec, warm, max_sandboxes: as for `SandboxManager`; this client holds the warm sandboxes.
        lifetime_s: seconds after which the service ends each sandbox; `None`: the service's default.
        ca_file: CA certificates for the service's certificate; `None`: the system's.
        reconnect_timeout_s: seconds of outage after which running programs count as lost.
        wait_for_quota: whether to wait up to `reconnect_timeout_s` when the owner's quota of sandboxes is used up.

    Raises:
        ConfigError: the address, token or CA file is not usable.
        SandboxUnavailableError: at its start: no service answers.
        SandboxAccessError: at its start: the token is refused.
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
