"""Builds tools from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolSource
from roll.envs.tools.environment import ToolEnv
from roll.envs.tools.function import FunctionTool
from roll.errors import ConfigError, UserError
from roll.registry import Registry
from roll.user_code import load_function

__all__ = ["SANDBOXED_TOOLS", "TOOLS", "build_tools", "get_tool_name", "with_tools"]

TOOLS: Registry[Any] = Registry(
    "tool",
    {
        "calculator": "roll.envs.tools.calculator:Calculator",
        "python": "roll.envs.tools.python:PythonTool",
        "search": "roll.envs.tools.search:FolderSearch",
        "http_search": "roll.envs.tools.search:HttpSearch",
        "workspace": "roll.envs.tools.workspace:WorkspaceTools",
        "mcp": "roll.envs.tools.mcp:McpTools",
    },
)
"""Tool constructors by name. A user-defined class or function is named `package.module:name` or `file.py:name`."""


SANDBOXED_TOOLS = ("python", "workspace")
"""Names of the tools that run programs of the model, for which sandboxes are started."""


def build_tools(entries: Sequence[str | Mapping[str, Any]]) -> list[Tool | ToolSource]:
    """Build tools from entries: a name such as `calculator`, or a name with options, `{tool: search, folder: docs}`.

    Raises:
        ConfigError: A tool does not exist, or rejects its options.
    """
    return [_build_tool(entry) for entry in entries]


def get_tool_name(entry: str | Mapping[str, Any]) -> str:
    """Return the name of the tool in an entry for `build_tools`.

    Raises:
        ConfigError: The entry has no name.
    """
    name = entry if isinstance(entry, str) else entry.get("tool")
    if not isinstance(name, str):
        raise ConfigError(f"a tool must be a name, or a mapping with its name under 'tool', got {entry!r}.")
    return name


def _build_tool(entry: str | Mapping[str, Any]) -> Tool | ToolSource:
    name = get_tool_name(entry)
    options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "tool"}
    kind = load_function(name, "tool") if ":" in name else TOOLS.get(name)
    try:
        tool = FunctionTool(kind, options) if inspect.isfunction(kind) else kind(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool '{name}' rejected the options {options}: {error}") from error
    if not isinstance(tool, (Tool, ToolSource)):
        raise ConfigError(
            f"'{name}' is not a tool: it must have `name`, `description`, `parameters` and `call`, or `open` and "
            "`close`."
        )
    return tool


def with_tools(env: Any, tools: Sequence[str | Mapping[str, Any]], **options: Any) -> ToolEnv:
    """Return an environment with tools from a configuration; `options` are arguments of `ToolEnv`.

    Raises:
        ConfigError: See `build_tools`.
    """
    return ToolEnv(env, build_tools(tools), **options)
