"""The client of a sandbox service. `connect` gives a manager like the local one; nothing is imported before that."""

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
    patience_s: float = 30.0,
    wait_for_quota: bool = False,
) -> SandboxManager:
    """Sandboxes of a service, used like those of this machine: `async with connect(url, token) as sandboxes: ...`

    Args:
        url: `http://host:port` or `https://…`, as `roll-sandbox serve` printed it.
        token: of `roll-sandbox token create`.
        spec, warm, max_sandboxes: as for `SandboxManager`; what is warm is held by this client.
        lifetime_s: after which the service ends each sandbox; `None`: what it gives to those that do not say.
        ca_file: certificates that the service's is checked with; `None`: those of the system.
        patience_s: how long the service may be away before what ran there counts as lost.
        wait_for_quota: whether to wait as long for a sandbox where the owner has as many as may be.

    Raises:
        ConfigError: an address, a token or a file of certificates that is none.
        SandboxUnavailableError: when it is started: no service answers there.
        SandboxAccessError: when it is started: the token is refused.
    """
    from roll_sandbox.remote.runtime import RemoteRuntime

    runtime = RemoteRuntime(
        url, token, lifetime_s=lifetime_s, ca_file=ca_file, patience_s=patience_s, wait_for_quota=wait_for_quota
    )
    return SandboxManager(runtime, spec=spec, warm=warm, max_sandboxes=max_sandboxes)
