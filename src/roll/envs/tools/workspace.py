"""A shell and files in a sandbox per episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.base import Tool, ToolError
from roll.envs.tools.python import said
from roll.envs.tools.sandboxes import SandboxLease, SandboxOptions
from roll.sandbox_errors import sandbox_errors
from roll_sandbox import (
    Command,
    ExecutionResult,
    Limits,
    Outcome,
    Sandbox,
    SandboxError,
    SandboxPathError,
    Session,
)

__all__ = ["Workspace", "WorkspaceTools"]

_MOST_FILE_BYTES = 2**18


@dataclass(eq=False)
class Workspace(SandboxOptions):
    """One sandbox with a shell that keeps its directory and variables; fresh after every `begin`.

    Args:
        time_limit_s: Timeout of one command, which is then interrupted.
    """

    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        self._lease = SandboxLease(self, Limits(wall_s=self.time_limit_s, output_bytes=2**18))
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The current sandbox."""
        assert self._sandbox is not None, "`begin` comes first"
        return self._sandbox

    async def begin(self) -> None:
        """Replace the sandbox by a new one with an empty home.

        Raises:
            SandboxError: No sandbox could be started.
        """
        await self._drop()
        manager = await self._lease.manager()
        with sandbox_errors():
            self._sandbox = await manager.create(self._lease.spec)

    async def run(self, command: str) -> ExecutionResult:
        """Run bash text. If the model ended its shell, a new one is opened."""
        if "\0" in command:
            raise ToolError("a command holds no zero bytes")
        with sandbox_errors():
            if self._session is None or self._session.closed:
                self._session = await self._opened()
            return await self._session.run(command, wall_s=self.time_limit_s)

    async def _opened(self) -> Session:
        """Open a shell.

        If the sandbox had a shell before and a new one fails, that is the model's mistake.
        """
        try:
            return await self.sandbox.session(cwd=self.sandbox.home)
        except SandboxError as error:
            if self._session is None:
                raise
            await self.sandbox.execute(Command(argv=("/bin/true",)))  # raises if the sandbox itself has ended
            raise ToolError(f"no shell can be started any more; is the home directory still there? ({error})") from None

    async def _drop(self) -> None:
        sandbox, self._sandbox, self._session = self._sandbox, None, None
        if sandbox is not None:
            await sandbox.close()

    async def close(self) -> None:
        """Close the sandbox; may be called twice."""
        await self._drop()
        await self._lease.release()


class WorkspaceTools:
    """A `ToolSource`: `shell`, `read_file`, `write_file` and `edit_file` over one `Workspace` per episode.

    Args: See `Workspace`.
    """

    def __init__(self, **options: Any) -> None:
        self.workspace = Workspace(**options)

    async def open(self) -> Sequence[Tool]:
        """See `ToolSource`."""
        await self.workspace.begin()
        return workspace_tools(self.workspace)

    async def close(self) -> None:
        """See `ToolSource`."""
        await self.workspace.close()


class _Tool:
    """A `Tool` made of a function."""

    def __init__(self, function: Callable[..., Awaitable[str]], description: str, *arguments: str) -> None:
        self._function = function
        self.name, self.description = function.__name__, description
        properties = {argument: {"type": "string"} for argument in arguments}
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": list(arguments),
        }

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        return await self._function(**arguments)


def workspace_tools(workspace: Workspace) -> tuple[Tool, ...]:
    """Return the tools of a workspace that has begun."""

    async def shell(command: str) -> str:
        result = await workspace.run(command)
        text = said(result)
        if result.outcome is not Outcome.EXITED:
            raise ToolError(text)
        return text or "(It printed nothing.)"  # an exit code is part of the text, not a failure of the call

    async def read_file(path: str) -> str:
        try:
            with sandbox_errors():
                data = await workspace.sandbox.read_file(_path(path), max_bytes=_MOST_FILE_BYTES)
        except SandboxPathError as error:
            raise ToolError(f"cannot read '{path[:200]}': {error.strerror or error}") from None
        return data.decode(errors="replace")

    async def write_file(path: str, content: str) -> str:
        try:
            with sandbox_errors():
                await workspace.sandbox.write_file(_path(path), content.encode(errors="replace"))
        except (SandboxPathError, ValueError) as error:
            raise ToolError(f"cannot write '{path[:200]}': {getattr(error, 'strerror', None) or error}") from None
        return f"Wrote {len(content)} characters to {path}."

    async def edit_file(path: str, old: str, new: str) -> str:
        text = await read_file(path)
        times = text.count(old) if old else 0
        if times != 1:
            raise ToolError(f"'old' must be in the file exactly once, and is {times} times: give more of its lines.")
        await write_file(path, text.replace(old, new))
        return f"Replaced it in {path}."

    return (
        _Tool(shell, "Runs bash commands; directory and variables are kept from one call to the next.", "command"),
        _Tool(read_file, "Gives what a file holds.", "path"),
        _Tool(write_file, "Creates or replaces a file.", "path", "content"),
        _Tool(edit_file, "Replaces text that is in a file exactly once.", "path", "old", "new"),
    )


def _path(path: str) -> str:
    if not path or "\0" in path or len(path) > 4_000:
        raise ToolError("that is no path of a file")
    return path
