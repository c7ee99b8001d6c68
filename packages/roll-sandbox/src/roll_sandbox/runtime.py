"""The interface of isolation runtimes: `bubblewrap`, `docker`, `subprocess`, and `remote` for a service."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.types import SandboxSpec

__all__ = ["Runtime"]


@runtime_checkable
class Runtime(Protocol):
    """An isolation runtime, used from one asyncio loop."""

    name: str
    fresh_programs: bool
    """Whether one sandbox can run many programs one after another, each with its own namespaces and files."""

    async def start(self) -> None:
        """Check that the runtime works here.

        Raises:
            SandboxUnavailableError: it does not; the message says why and what to do.
        """
        ...

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with its image pinned to what `launch` would start now: names may refer to another image
        later.

        Raises:
            UnknownImageError: there is no such image.
        """
        ...

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, which accepts programs at once.

        Raises:
            SandboxError: it did not start.
            UntrustedCodeError: this runtime does not run untrusted code.
        """
        ...

    async def close(self) -> None:
        """End every sandbox; may be called twice."""
        ...
