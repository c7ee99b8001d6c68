"""The seams of this room. A client of a remote service would implement `Sandbox` and `Session` as well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, Self, runtime_checkable

from roll.sandbox.agent_sandbox import AgentSandbox
from roll.sandbox.types import Chunk, ExecutionResult, Program, SandboxSpec, Snapshot

__all__ = ["Job", "Runtime", "Sandbox", "Session"]


@runtime_checkable
class Job(Protocol):
    """A program or a session's command that was started."""

    def stream(self) -> AsyncIterator[Chunk]:
        """Its output as it comes, from the beginning, until it ends."""
        ...

    async def wait(self) -> ExecutionResult:
        """Its end.

        Raises:
            SandboxError: the sandbox broke.
        """
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def kill(self) -> None:
        """End it (a session's command: interrupt it) now; `wait` then tells how it ended."""
        ...

    async def bound(self, *, wall_s: float, cpu_s: float | None) -> float:
        """New limits of a program, counted from now on.

        Returns:
            the CPU time in seconds that it, and all that it started, has used so far.

        Raises:
            SandboxError: the sandbox broke.
        """
        ...

    def write(self, data: bytes) -> None:
        """More standard input for an `interactive` program; lost where the program has ended."""
        ...

    def end_input(self) -> None:
        """The end of its standard input."""
        ...


@runtime_checkable
class Session(Protocol):
    """A shell that keeps its directory, variables, functions and jobs between commands."""

    @property
    def closed(self) -> bool:
        """Whether the shell has ended: `exit`, or a command that could not be interrupted."""
        ...

    async def run(self, command: str, *, wall_s: float | None = None) -> ExecutionResult:
        """Run a command (any bash text) and wait for it.

        A command that takes longer than `wall_s` is interrupted: outcome `wall_time`; the session goes on.

        Raises:
            SandboxError: the sandbox broke, or the session had ended before.
        """
        ...

    async def start(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command and stream its output; the next one waits for its end."""
        ...

    async def background(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command beside the session, in its directory and with its exported variables."""
        ...

    async def close(self) -> None:
        """End the shell and what it started."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """An isolated file system and the processes in it. Paths are the sandbox's; relative ones are below `home`.

    `async with` closes it at the end.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    @property
    def home(self) -> str: ...

    async def execute(self, program: Program) -> ExecutionResult:
        """Run a program in this sandbox and wait for it.

        Raises:
            SandboxError: the sandbox broke: not the program's doing.
        """
        ...

    async def start(self, program: Program) -> Job:
        """Start a program in this sandbox, beside others."""
        ...

    async def session(self, *, env: dict[str, str] | None = None, cwd: str | None = None) -> Session:
        """Open a shell; a sandbox can have several."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 2**26) -> bytes:
        """Content of a regular file.

        Raises:
            SandboxPathError: there is none, it cannot be read, or it is larger than `max_bytes`.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, and the directories above it.

        Raises:
            SandboxPathError: it cannot be written, for example because the disk is full.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """The files in home and /tmp as they are now."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace home and /tmp. Running processes are not touched."""
        ...

    async def close(self) -> None:
        """End everything in it and forget its files; may be called twice."""
        ...


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

    async def launch(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox; it may be asked for work at once.

        Raises:
            SandboxError: it did not start.
            UntrustedCodeError: this runtime does not run such code.
        """
        ...

    async def close(self) -> None:
        """End every sandbox; may be called twice."""
        ...
