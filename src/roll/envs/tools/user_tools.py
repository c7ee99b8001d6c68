"""User-defined tools in the worker pool, in a separate process for each episode.

episode ─► call(name, arguments) ─► process: tool.call ─► (success, text)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolError, ToolSource
from roll.envs.tools.build import build_tools, get_tool_name
from roll.errors import InfraError
from roll.protocols import ActorHandle, WorkerPool
from roll.user_code import load_function

__all__ = ["UserTools"]


class UserTools:
    """A `ToolSource` that runs a configured tool in a process of the worker pool.

    Args:
        pool: The pool, which is not closed with the tools. Its memory limit applies to each process.
        entry: The tool's name, or a mapping with its name and options: see `build_tools`.
        time_limit_s: Timeout of opening the tool.
    """

    def __init__(self, pool: WorkerPool, entry: str | Mapping[str, Any], time_limit_s: float) -> None:
        self._pool, self._entry, self._time_limit_s = pool, entry, time_limit_s
        self._kept: ActorHandle | None = None

    async def open(self) -> Sequence[Tool]:
        """See `ToolSource`.

        Raises:
            ConfigError: The tool does not exist, or rejects its options.
            InfraError: The tool fails to open, or does not open in time.
        """
        name = get_tool_name(self._entry)
        try:
            async with asyncio.timeout(self._time_limit_s):
                if self._kept is None:
                    self._kept = await self._pool.create_actor(
                        _ToolProcess, self._entry, prepare=(load_function, (name, "tool"))
                    )
                described: list[tuple[str, str, dict[str, Any]]] = await self._kept.call("open")
        except TimeoutError as error:
            raise InfraError(f"opening tool '{name}' exceeded the time limit of {self._time_limit_s:g} s") from error
        return [_ProcessTool(self._kept, *each) for each in described]

    async def close(self) -> None:
        """See `ToolSource`."""
        actor, self._kept = self._kept, None
        if actor is not None:
            await actor.close()


class _ProcessTool:
    """A `Tool` whose implementation is in another process."""

    def __init__(self, actor: ActorHandle, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self._kept, self.name, self.description, self.parameters = actor, name, description, parameters

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        worked, text = await self._kept.call("call", self.name, dict(arguments))
        if not worked:
            raise ToolError(text)
        return text


class _ToolProcess:
    """Builds a configured tool in its own process, and runs the calls that `UserTools` sends."""

    def __init__(self, entry: str | Mapping[str, Any]) -> None:
        (self._own,) = build_tools([entry])
        self._tools: dict[str, Tool] = {}

    async def open(self) -> list[tuple[str, str, dict[str, Any]]]:
        opened = await self._own.open() if isinstance(self._own, ToolSource) else [self._own]
        self._tools = {tool.name: tool for tool in opened}
        return [(tool.name, tool.description, dict(tool.parameters)) for tool in opened]

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        try:
            result = self._tools[name].call(arguments)
            text = await result if inspect.isawaitable(result) else result
        except ToolError as error:
            return False, str(error)
        if not isinstance(text, str):
            raise TypeError(f"tool '{name}' must return a string, got {type(text).__name__}")
        return True, text
