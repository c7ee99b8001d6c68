"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}`.

Decoding may omit the markers, since they are special tokens: both forms are also detected without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools, format_signatures, parse_calls
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["MISTRAL"]

TOOL_CALLS_TOKEN = "[TOOL_CALLS]"
_NAMED_PATTERN = re.compile(
    r"\s{0,16}(?:\[TOOL_CALLS\])?\s{0,16}([A-Za-z_][\w.-]{0,63})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?\s{0,16}(?=\{)",
    re.ASCII,
)


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`."""
    _, mark, after = text.partition(TOOL_CALLS_TOKEN)
    body = after if mark else text
    named = _NAMED_PATTERN.match(body)
    if named and (mark or named[1] in tools):
        return _parse_named(body)
    if body.lstrip()[:1] not in (("[", "{") if mark else ("[",)):
        return ParsedCalls(problems=(f"there is no call after {TOOL_CALLS_TOKEN}.",)) if mark else ParsedCalls()
    try:
        value, _ = read_json(body)
    except MalformedJsonError as error:
        meant = mark or ('"name"' in body and '"arguments"' in body)
        return ParsedCalls(problems=(f"malformed call: {error}.",)) if meant else ParsedCalls()
    entries = value if isinstance(value, list) else [value]
    if mark or (entries and all(isinstance(e, dict) and "name" in e and "arguments" in e for e in entries)):
        return parse_calls(value)
    return ParsedCalls()


def _parse_named(body: str) -> ParsedCalls:
    calls: list[ToolCall] = []
    position = 0
    while match := _NAMED_PATTERN.match(body, position):
        if len(calls) == MAX_CALLS:
            return ParsedCalls(calls=tuple(calls), problems=(f"more than {MAX_CALLS} calls: the rest was not read.",))
        try:
            value, position = read_json(body, match.end())
        except MalformedJsonError as error:
            return ParsedCalls(calls=tuple(calls), problems=(f"malformed call to '{match[1]}': {error}.",))
        calls.append(ToolCall(name=match[1], arguments=value, id=match[2] or ""))
    return ParsedCalls(calls=tuple(calls))


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return TOOL_CALLS_TOKEN + dump_json(
        [
            {"name": call.name, "arguments": dict(call.arguments)} | ({"id": call.id} if call.id else {})
            for call in calls
        ]
    )


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    listed = ", ".join(format_signatures(tools).splitlines())
    return f"[AVAILABLE_TOOLS][{listed}][/AVAILABLE_TOOLS]"


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return f"[TOOL_RESULTS]{dump_json({'content': result.text, 'call_id': result.call.id})}[/TOOL_RESULTS]"


MISTRAL = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
