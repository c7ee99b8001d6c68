"""Tools that a model calls during an episode: see docs/tools.md."""

from __future__ import annotations

from roll.envs.tools.base import Tool, ToolCall, ToolError, ToolResult, ToolSource, describe_tool
from roll.envs.tools.build import TOOLS, build_tools, with_tools
from roll.envs.tools.calls import TOOL_CALL_FORMATS, ToolCallFormat, get_tool_call_format
from roll.envs.tools.environment import ToolEnv, ToolRewards
from roll.envs.tools.toolbox import Toolbox

__all__ = [
    "TOOLS",
    "TOOL_CALL_FORMATS",
    "Tool",
    "ToolCall",
    "ToolCallFormat",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "ToolRewards",
    "ToolSource",
    "Toolbox",
    "build_tools",
    "describe_tool",
    "get_tool_call_format",
    "with_tools",
]
