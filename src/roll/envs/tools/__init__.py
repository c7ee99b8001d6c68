"""Tools that a model calls while it acts: see docs/tools.md."""

from __future__ import annotations

from roll.envs.tools.base import Tool, ToolCall, ToolError, ToolResult, ToolSource, signature
from roll.envs.tools.build import TOOLS, build_tools, with_tools
from roll.envs.tools.calls import FORMS, CallForm, form_named
from roll.envs.tools.environment import ToolEnv, ToolRewards
from roll.envs.tools.toolbox import Toolbox

__all__ = [
    "FORMS",
    "TOOLS",
    "CallForm",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "ToolRewards",
    "ToolSource",
    "Toolbox",
    "build_tools",
    "form_named",
    "signature",
    "with_tools",
]
