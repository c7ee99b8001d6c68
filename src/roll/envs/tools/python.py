"""The tool `python`: runs each program of the model in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.base import Tool, ToolError
from roll.envs.tools.sandboxes import SandboxLease, SandboxOptions
from roll.sandbox_errors import sandbox_errors
from roll_sandbox import ExecutionResult, Limits, Outcome, OversizedUploadError, PythonCode

__all__ = ["PythonTool", "format_output"]


@dataclass(eq=False)
class PythonTool(SandboxOptions):
    """A `ToolSource` with the tool `python`.

    Args:
        time_limit_s: Timeout of one program.
        memory_bytes: Memory of one program, including its files.
        only_last_error_line: Whether to return only the last line of an exception, without the traceback.
    """

    time_limit_s: float = 5.0
    memory_bytes: int = 512 * 2**20
    only_last_error_line: bool = False

    def __post_init__(self) -> None:
        limits = Limits(wall_s=self.time_limit_s, memory_bytes=self.memory_bytes, output_bytes=2**16)
        self._lease = SandboxLease(self, limits)

    async def open(self) -> Sequence[Tool]:
        """See `ToolSource`."""
        return (_PythonRunner(self._lease, self.only_last_error_line),)

    async def close(self) -> None:
        """See `ToolSource`."""
        await self._lease.release()


class _PythonRunner:
    name = "python"
    description = "Runs a Python program and gives what it prints. Nothing is kept from one program to the next."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}

    def __init__(self, lease: SandboxLease, only_last_line: bool) -> None:
        self._lease, self._only_last_line = lease, only_last_line

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        sandboxes = await self._lease.acquire()
        try:
            with sandbox_errors():
                result = await sandboxes.execute(PythonCode(source=arguments["code"]), spec=self._lease.spec)
        except OversizedUploadError as error:
            raise ToolError(f"the program is too long: {error}") from None
        text = format_output(result, only_last_error_line=self._only_last_line)
        if not result.ok:
            raise ToolError(text)
        return text or "(It printed nothing.)"


def format_output(result: ExecutionResult, *, only_last_error_line: bool = False) -> str:
    """Return a program's output and, if the program failed, the reason."""
    errors = result.stderr.decode(errors="replace").strip()
    if only_last_error_line:
        errors = errors.rpartition("\n")[2]
    ending = ""
    if result.outcome is not Outcome.EXITED:
        ending = f"(Ended: {result.outcome.value.replace('_', ' ')}.)"
    elif result.exit_code:
        ending = f"(Exit code {result.exit_code}.)"
    return "\n".join(part for part in (result.stdout.decode(errors="replace").strip(), errors, ending) if part)
