"""Tools of MCP (Model Context Protocol) servers, through the official SDK (the package `mcp`).

The SDK's client must be entered and exited by the same task, while each episode runs in its own task. Therefore a
dedicated task keeps the connection open, from the first episode until `close`.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolError
from roll.errors import ConfigError, InfraError

__all__ = ["McpTools"]

_INVALID_PARAMS = -32602
"""JSON-RPC error code with which a server may reject arguments, instead of returning an error result."""
_END_TIME_LIMIT_S = 5.0
_INVALID_NAME_CHARACTER_PATTERN = re.compile(r"\W", re.ASCII)


class McpTools:
    """A `ToolSource` that offers all or some of the tools of one MCP server.

    Args:
        command: A program and its arguments, to start a server that communicates through stdin and stdout.
        url: Address of a running server (streamable HTTP). Exactly one of `command` and `url` must be given.
        env: Environment variables of the command, in addition to the inherited variables.
        only: Names of the tools to offer; `None` offers all.
        connect_time_limit_s: Timeout of connecting and listing the tools.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        connect_time_limit_s: float = 30.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ValueError("exactly one of `command` (a list of strings) and `url` must be set")
        if isinstance(command, str):
            raise ValueError(f"command must be a list of strings, got the string '{command}'")
        try:
            importlib.import_module("mcp")
        except ImportError as error:
            raise ConfigError(f"tools of MCP servers require the package 'mcp': pip install mcp ({error}).") from error
        self._command, self._url, self._env = tuple(command), url, dict(env) if env else None
        self._only = None if only is None else tuple(only)
        self._time_limit_s = connect_time_limit_s
        self._task: asyncio.Task[None] | None = None
        self._leave: asyncio.Event
        self._ready: asyncio.Future[None]
        self._broken = False
        self._client: Any = None
        self._tools: tuple[Tool, ...] = ()

    @property
    def _name(self) -> str:
        return self._url or " ".join(self._command)

    async def open(self) -> Sequence[Tool]:
        """Return the tools of the server; connect first if there is no connection.

        Raises:
            InfraError: The server does not start, or does not answer in time.
            ConfigError: The server does not have one of the tools in `only`.
        """
        if self._broken:
            await self.close()
        if self._task is None or self._task.done():
            self._leave, self._broken = asyncio.Event(), False
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._keep_connection(self._leave, self._ready))
        try:
            async with asyncio.timeout(self._time_limit_s):
                await asyncio.shield(self._ready)  # several spawned environments may wait for it
        except ConfigError:
            raise
        except Exception as error:
            await self.close()
            timed_out = isinstance(error, TimeoutError)
            reason = f"it did not respond within {self._time_limit_s:g} s" if timed_out else repr(error)
            raise InfraError(f"cannot connect to MCP server '{self._name}': {reason}") from error
        return self._tools

    async def _keep_connection(self, stop: asyncio.Event, ready: asyncio.Future[None]) -> None:
        """Connect, report the result in `ready`, and keep the connection open until `stop` is set."""
        sdk, stdio = importlib.import_module("mcp"), importlib.import_module("mcp.client.stdio")
        server: Any = self._url
        if server is None:
            program, *arguments = self._command
            server = stdio.stdio_client(sdk.StdioServerParameters(command=program, args=arguments, env=self._env))
        problem: Exception = ConnectionError("it was closed while it connected")
        try:
            async with sdk.Client(server) as client:
                self._client = client
                self._tools = self._choose_tools(await _list_tools(client))
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            problem = error
        finally:
            if not ready.done():
                ready.set_exception(problem)
                ready.exception()  # marks the exception as retrieved, as there may be no waiter

    def _choose_tools(self, descriptions: Sequence[Any]) -> tuple[Tool, ...]:
        by_name = {tool.name: tool for tool in descriptions}
        wanted = list(by_name) if self._only is None else list(self._only)
        missing = sorted(set(wanted) - set(by_name))
        if missing:
            raise ConfigError(f"MCP server '{self._name}' has no tools {missing}: choose from {sorted(by_name)}.")
        return tuple(_McpTool(self, by_name[name]) for name in wanted)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool of the server.

        Raises:
            ToolError: The server rejects the arguments.
            InfraError: The connection was lost.
        """
        try:
            return await self._client.call_tool(name, dict(arguments))
        except Exception as error:
            if getattr(error, "code", None) == _INVALID_PARAMS:  # the model's mistake, not the server's
                raise ToolError(str(error) or "the server rejected these arguments") from None
            self._broken = getattr(error, "code", None) is None  # the error does not come from the server
            raise InfraError(f"MCP server '{self._name}' failed to run the tool '{name}': {error!r}") from error

    async def close(self) -> None:
        """See `ToolSource`. A server that does not end in time is abandoned."""
        task, self._task = self._task, None
        if task is None:
            return
        self._leave.set()
        if not self._tools:  # still connecting: no task waits for the event yet
            task.cancel()
        self._client, self._tools = None, ()
        asyncio.get_running_loop().call_later(_END_TIME_LIMIT_S, task.cancel)  # even if this wait is canceled
        await asyncio.wait({task}, timeout=_END_TIME_LIMIT_S + 1.0)


async def _list_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = getattr(page, "next_cursor", None)
        if not cursor:
            return tools


class _McpTool:
    def __init__(self, server: McpTools, described: Any) -> None:
        self._server, self._theirs = server, described.name
        self.name = _INVALID_NAME_CHARACTER_PATTERN.sub("_", described.name)
        self.description = described.description or ""
        schema = getattr(described, "input_schema", None) or getattr(described, "inputSchema", None)
        self.parameters: Mapping[str, Any] = schema or {"type": "object", "properties": {}}

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        result = await self._server.call_tool(self._theirs, arguments)
        parts = [getattr(part, "text", None) or f"({part.type})" for part in result.content]
        text = "\n".join(parts)
        if getattr(result, "is_error", False):
            raise ToolError(text or "the tool failed without an error message")
        return text
