"""The client of a sandbox service. `connect` gives a manager like the local one."""

from __future__ import annotations

from roll.sandbox.manager import SandboxManager
from roll.sandbox.remote.runtime import RemoteRuntime
from roll.sandbox.types import SandboxSpec

__all__ = ["RemoteRuntime", "connect"]


def connect(
    url: str,
    token: str,
    *,
    spec: SandboxSpec | None = None,
    warm: int | None = None,
    max_sandboxes: int = 512,
    lifetime_s: float | None = None,
    ca_file: str | None = None,
) -> SandboxManager:
    """Sandboxes of a service, used like those of this machine: `async with connect(url, token) as sandboxes: ...`

    Args:
        url: `http://host:port` or `https://…`, as `roll sandbox serve` printed it.
        token: of `roll sandbox token create`.
        spec, warm, max_sandboxes: as for `SandboxManager`; what is warm is held by this client.
        lifetime_s: after which the service ends each sandbox; `None`: what it gives to those that do not say.
        ca_file: certificates that the service's is checked with; `None`: those of the system.

    Raises:
        SandboxUnavailableError: when it is started: no service answers there.
        SandboxAccessError: when it is started: the token is refused.
    """
    runtime = RemoteRuntime(url, token, lifetime_s=lifetime_s, ca_file=ca_file)
    return SandboxManager(runtime, spec=spec, warm=warm, max_sandboxes=max_sandboxes)
