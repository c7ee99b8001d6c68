"""The format in which a model family writes tool calls and reads their results.

Parsers read arbitrary model output. They take linear time, parse at most `MAX_CALLS` calls, and never
raise: a malformed call is converted to an error message for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.envs.tools.base import Tool, ToolCall, ToolResult, describe_tool
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = [
    "MAX_CALLS",
    "NAME_PATTERN",
    "ParsedCalls",
    "ToolCallFormat",
    "Tools",
    "format_signatures",
    "parse_call",
    "parse_calls",
]

MAX_CALLS = 32
"""Maximum number of calls in one reply; further calls are not parsed, and the model is told that there are too many."""
MAX_NAME_LENGTH = 64
NAME_PATTERN = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)

Tools: TypeAlias = Mapping[str, Tool]


@dataclass(frozen=True, kw_only=True)
class ParsedCalls:
    """The tool calls in a model's reply."""

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """One error message per malformed call."""

    def __bool__(self) -> bool:
        return bool(self.calls or self.problems)


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """A format of tool calls. `parse` and `render` are inverses of each other."""

    parse: Callable[[str, Tools], ParsedCalls]
    """Parses the calls in a reply."""
    render: Callable[[Sequence[ToolCall]], str]
    """Formats calls as the model would generate them, for demonstrations and for conversations from other sources."""
    explain: Callable[[Sequence[Tool]], str]
    """Describes the tools and the format of calls for the model."""
    format_result: Callable[[ToolResult], str]
    """Formats a result for the model."""


def parse_call(value: Any) -> ToolCall:
    """Return the call that a JSON value describes, with its arguments under `arguments` or `parameters`.

    Raises:
        MalformedJsonError: The value does not describe a call.
    """
    match value:
        case {"function": dict(function)}:
            value = {**function, "id": value.get("id", "")}
    if not isinstance(value, dict):
        raise MalformedJsonError("a call must be an object with 'name' and 'arguments'")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedJsonError("a call must have a 'name', which must be a string")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's interface
        arguments, _ = read_json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedJsonError("the 'arguments' of a call must be an object")
    identity = value.get("id", "")
    return ToolCall(
        name=name[:MAX_NAME_LENGTH],
        arguments=arguments,
        id=identity[:MAX_NAME_LENGTH] if isinstance(identity, str) else "",
    )


def parse_calls(value: Any) -> ParsedCalls:
    """Return the calls in a JSON value, which is one call or a list; malformed calls are returned as problems."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    values = value if isinstance(value, list) else [value]
    for entry in values[:MAX_CALLS]:
        try:
            calls.append(parse_call(entry))
        except MalformedJsonError as error:
            problems.append(f"malformed call: {error}.")
    if len(values) > MAX_CALLS:
        problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def format_signatures(tools: Sequence[Tool]) -> str:
    """Return one line of JSON per tool, with its name, description and parameters."""
    return "\n".join(dump_json(describe_tool(tool)) for tool in tools)
