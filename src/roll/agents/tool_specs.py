"""The tools of a request: functions, custom tools (with one string as input), tool groups, and tools of a vendor.

The model only sees functions. A custom tool of OpenAI becomes a function with one string parameter, and each function
of a group (`namespace`) becomes a separate function. `ToolSpec` has the fields that are needed to convert a call back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.agents import wire
from roll.agents.request_errors import RequestError
from roll.agents.warning_log import WarningLog

__all__ = ["TEXT_PARAMETER", "ToolSpec", "build_text_tool", "read_text_argument", "warn_of_unsupported_tools"]

TEXT_PARAMETER = "input"
"""Name of the parameter of a custom tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """One tool of a request, as the model sees it."""

    name: str
    """The name by which the model calls the tool."""
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    own_name: str = ""
    """The agent's name for the tool if it differs from `name`."""
    namespace: str = ""
    takes_text: bool = False
    deferred: bool = False
    """If True, the model sees the tool only after the conversation refers to it."""

    @property
    def function(self) -> dict[str, Any]:
        """The tool's definition in the format of chat templates."""
        return wire.build_function_tool(self.name, self.description, self.parameters)

    @property
    def name_for_agent(self) -> str:
        """The agent's name for the tool, without its namespace."""
        return self.own_name or self.name


def build_text_tool(name: str, description: str | None, input_format: Mapping[str, Any] | None) -> ToolSpec:
    """Return the spec of a custom tool: a function with one string parameter.

    Args:
        name: The tool's name.
        description: The tool's description.
        input_format: The format of the string: `{"type": "grammar", "syntax", "definition"}`. A grammar becomes part of
            the description; it is not enforced.
    """
    words = [description or ""]
    nested = None if input_format is None else input_format.get("grammar")
    grammar = nested if isinstance(nested, Mapping) else input_format
    definition = grammar.get("definition") if grammar is not None else None
    if isinstance(definition, str):
        words.append(f"The text follows this grammar:\n{definition.strip()}")
    parameter = {"type": "string", "description": "The whole text."}
    schema = {"type": "object", "properties": {TEXT_PARAMETER: parameter}, "required": [TEXT_PARAMETER]}
    return ToolSpec(name=name, description="\n\n".join(filter(None, words)), parameters=schema, takes_text=True)


def read_text_argument(arguments: Mapping[str, Any]) -> str:
    """Return the string argument of a call to a custom tool, or all arguments as JSON if there are other arguments."""
    value = arguments.get(TEXT_PARAMETER)
    return value if isinstance(value, str) else json.dumps(dict(arguments), ensure_ascii=False)


def _make_names_distinct(tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Add the group's name as a prefix to tool names that are not unique; return all tools."""
    times = Counter(spec.name for spec in tools)
    return [
        replace(spec, name=f"{spec.namespace}__{spec.name}", own_name=spec.name)
        if spec.namespace and times[spec.name] > 1
        else spec
        for spec in tools
    ]


def warn_of_unsupported_tools(
    tools: Sequence[ToolSpec], unsupported: Sequence[str], warnings: WarningLog
) -> list[ToolSpec]:
    """Log a warning for each unsupported tool, and return the supported tools with distinct names.

    Args:
        tools: The supported tools.
        unsupported: Names or types of the unsupported tools, which only their vendor can run.
        warnings: Logs the warnings.

    Raises:
        RequestError: The request has tools, but none of them is supported.
    """
    names = [name[:64] for name in unsupported]
    advice = "disable the tool in the agent's settings, or give the agent a function with the same effect"
    if names and not tools:
        listed = ", ".join(sorted(set(names))[:8])
        message = f"unsupported tools: {listed}. Only the vendor's models or servers support them: {advice}."
        raise RequestError(400, "unsupported_parameter", message, field="tools")
    for name in names:
        warnings.warn_once(
            f"tool {name}",
            f"agents send the tool '{name}', which only the vendor's models or servers support: the policy does not "
            f"see this tool ({advice}).",
        )
    return _make_names_distinct(tools)
