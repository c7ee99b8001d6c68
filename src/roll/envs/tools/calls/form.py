"""The format of tool calls of a model family, and of the results shown to it.

Parsers read a model's text, which is arbitrary. They take linear time, parse at most `MOST_CALLS` calls, and never
raise: a malformed call becomes a sentence for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.envs.tools.base import Tool, ToolCall, ToolResult, signature
from roll.envs.tools.json_text import MalformedJsonError, read_json, shown

__all__ = ["MOST_CALLS", "NAME", "CallForm", "Found", "Tools", "call_of", "json_signatures", "with_calls"]

MOST_CALLS = 32
"""Most calls of one reply; further ones are not parsed, and the model is told that there are too many."""
LONGEST_NAME = 64
NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)

Tools: TypeAlias = Mapping[str, Tool]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The calls in a reply."""

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """One sentence per malformed call."""

    def __bool__(self) -> bool:
        return bool(self.calls or self.problems)


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """One format. `parse` and `render` are inverse to each other."""

    parse: Callable[[str, Tools], Found]
    """Parses the calls in a reply."""
    render: Callable[[Sequence[ToolCall]], str]
    """Writes calls as the model would: for demonstrations, and for histories from other sources."""
    explain: Callable[[Sequence[Tool]], str]
    """Describes the tools and the format of calls for the model."""
    result: Callable[[ToolResult], str]
    """Formats a result for the model."""


def call_of(value: Any) -> ToolCall:
    """Return the call that a JSON value describes, with its arguments under `arguments` or `parameters`.

    Raises:
        MalformedJsonError: The value does not describe a call.
    """
    match value:
        case {"function": dict(function)}:
            value = {**function, "id": value.get("id", "")}
    if not isinstance(value, dict):
        raise MalformedJsonError("a call is an object with 'name' and 'arguments'")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedJsonError("a call needs a 'name', a string")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's interface
        arguments, _ = read_json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedJsonError("the 'arguments' of a call are an object")
    identity = value.get("id", "")
    return ToolCall(
        name=name[:LONGEST_NAME], arguments=arguments, id=identity[:LONGEST_NAME] if isinstance(identity, str) else ""
    )


def with_calls(value: Any) -> Found:
    """Return the calls of a JSON value: one, or a list of them."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    values = value if isinstance(value, list) else [value]
    for entry in values[:MOST_CALLS]:
        try:
            calls.append(call_of(entry))
        except MalformedJsonError as error:
            problems.append(f"malformed call: {error}.")
    if len(values) > MOST_CALLS:
        problems.append(f"more than {MOST_CALLS} calls at once: the rest was not read.")
    return Found(calls=tuple(calls), problems=tuple(problems))


def json_signatures(tools: Sequence[Tool]) -> str:
    """Return one line of JSON per tool."""
    return "\n".join(shown(signature(tool)) for tool in tools)
