"""The interface of isolation runtimes: `bubblewrap`, `docker`, `subprocess`, and `remote` for a service."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.types import SandboxSpec

__all__ = ["Runtime"]


@runtime_checkable
class Runtime(Protocol):
    """An isolation runtime, which starts sandboxes. All calls must come from one event loop."""

    name: str
    fresh_programs: bool
    """True if one sandbox can run many programs in turn, each with its own namespaces and files."""

    async def start(self) -> None:
        """Check that the runtime works on this machine.

        Raises:
            SandboxUnavailableError: the runtime does not work on this machine; the message states the reason and a
                remedy.
        """
        ...

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with its image pinned to the version that `launch` would use now, since the name may later
        refer to another image.

        Raises:
            UnknownImageError: no image has this name.
        """
        ...

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Programs can be started in it immediately.

        Raises:
            SandboxError: the sandbox did not start.
            UntrustedCodeError: this runtime does not run untrusted code.
        """
        ...

    async def close(self) -> None:
        """End every sandbox. Calling it twice is safe."""
        ...
