"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen; and Qwen3-Coder's tags inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import (
    MAX_CALLS,
    NAME_PATTERN,
    ParsedCalls,
    ToolCallFormat,
    Tools,
    format_signatures,
    parse_call,
)
from roll.envs.tools.calls.xml import convert_argument
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["HERMES"]

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION_PATTERN = re.compile(r"\s{0,64}<function=([^<>\s]{1,64})>")
_PARAMETER_PATTERN = re.compile(r"<parameter=([^<>\s]{1,64})>")


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`. The last call may lack its end marker, since engines omit the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = text.find(BEGIN)
    while position >= 0:
        if len(calls) + len(problems) >= MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
            break
        start = position + len(BEGIN)
        try:
            call, end = _parse_call_at(text, start, tools)
            calls.append(call)
        except MalformedJsonError as error:
            problems.append(f"malformed {BEGIN}: {error}.")
            end = _find_end(text, start)
        position = text.find(BEGIN, end)
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def _find_end(text: str, start: int) -> int:
    end = text.find(END, start)
    return end if end >= 0 else len(text)


def _parse_call_at(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    """Return the call whose opening tag ends at `start`, and the position where the call ends.

    The JSON may itself contain the text of the closing tag.
    """
    function = _FUNCTION_PATTERN.match(text, start)
    if function:
        end = _find_end(text, start)
        return _parse_tags(function[1], text[function.end() : end], tools), end
    value, position = read_json(text, start)
    end = _find_end(text, position)
    if text[position:end].strip():
        raise MalformedJsonError("the tag must contain only one JSON object")
    return parse_call(value), end


def _parse_tags(name: str, body: str, tools: Tools) -> ToolCall:
    """Parse a call to `name` from tags `<parameter=key>value</parameter>`.

    One line break is removed at the beginning and at the end of a value.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise MalformedJsonError("a function's name must be one word")
    arguments: dict[str, object] = {}
    position = 0
    while match := _PARAMETER_PATTERN.search(body, position):
        end = body.find("</parameter>", match.end())
        if end < 0:
            raise MalformedJsonError(f"the parameter '{match[1]}' has no </parameter>")
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = convert_argument(tools.get(name), match[1], value)
        position = end
    return ToolCall(name=name, arguments=arguments)


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "\n".join(f"{BEGIN}\n{dump_json({'name': c.name, 'arguments': dict(c.arguments)})}\n{END}" for c in calls)


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    example = '{"name": "a tool\'s name", "arguments": {"argument": "value"}}'
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>\n{format_signatures(tools)}\n</tools>\n\n"
        f"To call one, write its name and arguments as JSON between tags:\n{BEGIN}\n{example}\n{END}"
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return f"<tool_response>\n{result.text}\n</tool_response>"


HERMES = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
