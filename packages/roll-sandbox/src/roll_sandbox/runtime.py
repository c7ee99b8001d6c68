"""What a way to isolate must do; there are `bubblewrap`, `docker` and `subprocess`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.types import SandboxSpec

__all__ = ["Runtime"]


@runtime_checkable
class Runtime(Protocol):
    """A way to isolate. One asyncio loop drives it."""

    name: str
    fresh_programs: bool
    """Whether one sandbox can run many programs one after another, each with its own namespaces and files."""

    async def start(self) -> None:
        """Check that it works here.

        Raises:
            SandboxUnavailableError: it does not; says why and what to do.
        """
        ...

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec of the very sandboxes that `launch` would start now: a name of an image may mean another one later.

        Raises:
            UnknownImageError: there is no such image.
        """
        ...

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; it may be asked for work at once.

        Raises:
            SandboxError: it did not start.
            UntrustedCodeError: this runtime does not run such code.
        """
        ...

    async def close(self) -> None:
        """End every sandbox; may be called twice."""
        ...
