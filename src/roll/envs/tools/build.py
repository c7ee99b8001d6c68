"""Tools from a configuration's names and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolSource
from roll.envs.tools.environment import ToolEnv
from roll.errors import ConfigError, UserError
from roll.registry import Registry, load_function

__all__ = ["TOOLS", "build_tools", "with_tools"]

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
"""What makes tools, by name. A user's own is named `package.module:Class` or `file.py:Class`."""


def build_tools(entries: Sequence[str | Mapping[str, Any]]) -> list[Tool | ToolSource]:
    """Tools from `calculator`, or from `{tool: search, folder: docs}`: a name, and options.

    Raises:
        ConfigError: there is none of this name, or it refuses its options.
    """
    return [_built(entry) for entry in entries]


def _built(entry: str | Mapping[str, Any]) -> Tool | ToolSource:
    if isinstance(entry, str):
        name, options = entry, {}
    else:
        options = dict(entry)
        name = options.pop("tool", None)
        if not isinstance(name, str):
            raise ConfigError(f"a tool is a name, or a mapping with its name under 'tool'; got {dict(entry)}.")
    kind = load_function(name, "tool") if ":" in name else TOOLS.get(name)
    try:
        tool = kind(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool '{name}' refuses its options {options}: {error}") from error
    if not isinstance(tool, (Tool, ToolSource)):
        raise ConfigError(
            f"'{name}' is no tool: it needs `name`, `description`, `parameters` and `call`, or `open` and `close`."
        )
    return tool


def with_tools(env: Any, tools: Sequence[str | Mapping[str, Any]], **options: Any) -> ToolEnv:
    """An environment with tools, all from a configuration; `options` are those of `ToolEnv`.

    Raises:
        ConfigError: see `build_tools`.
    """
    return ToolEnv(env, build_tools(tools), **options)
