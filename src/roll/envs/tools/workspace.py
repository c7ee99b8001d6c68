"""A shell and files in a sandbox per episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.base import Tool, ToolError
from roll.envs.tools.python import format_output
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

_MAX_FILE_BYTES = 2**18


@dataclass(eq=False)
class Workspace(SandboxOptions):
    """A sandbox with a shell whose working directory and variables persist between commands.

    `begin` replaces the sandbox with a new one.

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
        assert self._sandbox is not None, "call `begin` first"
        return self._sandbox

    async def begin(self) -> None:
        """Replace the sandbox with a new one, whose home directory is empty.

        Raises:
            SandboxError: No sandbox could be started.
        """
        await self._close_sandbox()
        manager = await self._lease.acquire()
        with sandbox_errors():
            self._sandbox = await manager.create(self._lease.spec)

    async def run(self, command: str) -> ExecutionResult:
        """Run bash commands. If the model has ended the shell, a new shell is opened."""
        if "\0" in command:
            raise ToolError("a command must not contain a null byte")
        with sandbox_errors():
            if self._session is None or self._session.closed:
                self._session = await self._open_shell()
            return await self._session.run(command, wall_s=self.time_limit_s)

    async def _open_shell(self) -> Session:
        """Open a shell in the sandbox's home directory.

        Raises:
            SandboxError: The sandbox has ended, or its first shell cannot be opened.
            ToolError: A later shell cannot be opened, for example because the model has deleted the home directory.
        """
        try:
            return await self.sandbox.session(cwd=self.sandbox.home)
        except SandboxError as error:
            if self._session is None:
                raise
            await self.sandbox.execute(Command(argv=("/bin/true",)))  # raises if the sandbox itself has ended
            raise ToolError(f"no shell can be started; check that the home directory still exists ({error})") from None

    async def _close_sandbox(self) -> None:
        sandbox, self._sandbox, self._session = self._sandbox, None, None
        if sandbox is not None:
            await sandbox.close()

    async def close(self) -> None:
        """Close the sandbox. Calling it twice is safe."""
        await self._close_sandbox()
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
        return build_workspace_tools(self.workspace)

    async def close(self) -> None:
        """See `ToolSource`."""
        await self.workspace.close()


class _WorkspaceTool:
    """A `Tool` that calls a function."""

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


def build_workspace_tools(workspace: Workspace) -> tuple[Tool, ...]:
    """Return the tools of a workspace; `workspace.begin` must be called first."""

    async def shell(command: str) -> str:
        result = await workspace.run(command)
        text = format_output(result)
        if result.outcome is not Outcome.EXITED:
            raise ToolError(text)
        return text or "(It printed nothing.)"  # an exit code is part of the text, not a failure of the call

    async def read_file(path: str) -> str:
        try:
            with sandbox_errors():
                data = await workspace.sandbox.read_file(_check_path(path), max_bytes=_MAX_FILE_BYTES)
        except SandboxPathError as error:
            raise ToolError(f"cannot read '{path[:200]}': {error.strerror or error}") from None
        return data.decode(errors="replace")

    async def write_file(path: str, content: str) -> str:
        try:
            with sandbox_errors():
                await workspace.sandbox.write_file(_check_path(path), content.encode(errors="replace"))
        except (SandboxPathError, ValueError) as error:
            raise ToolError(f"cannot write '{path[:200]}': {getattr(error, 'strerror', None) or error}") from None
        return f"Wrote {len(content)} characters to {path}."

    async def edit_file(path: str, old: str, new: str) -> str:
        text = await read_file(path)
        times = text.count(old) if old else 0
        if times != 1:
            raise ToolError(
                f"'old' must occur exactly once in the file, but occurs {times} times: include more of the "
                "surrounding lines."
            )
        await write_file(path, text.replace(old, new))
        return f"Replaced it in {path}."

    return (
        _WorkspaceTool(
            shell, "Runs bash commands; directory and variables are kept from one call to the next.", "command"
        ),
        _WorkspaceTool(read_file, "Returns the content of a file.", "path"),
        _WorkspaceTool(write_file, "Creates or replaces a file.", "path", "content"),
        _WorkspaceTool(edit_file, "Replaces text that is in a file exactly once.", "path", "old", "new"),
    )


def _check_path(path: str) -> str:
    if not path or "\0" in path or len(path) > 4_000:
        raise ToolError("the path must name a file")
    return path
