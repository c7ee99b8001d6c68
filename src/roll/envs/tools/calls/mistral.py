"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}`.

Decoding may leave out the marks, since they are special tokens: both forms are also detected without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.form import MOST_CALLS, CallForm, Found, Tools, json_signatures, with_calls
from roll.envs.tools.json_text import MalformedJsonError, read_json, shown

__all__ = ["MISTRAL"]

MARK = "[TOOL_CALLS]"
_NAMED = re.compile(
    r"\s{0,16}(?:\[TOOL_CALLS\])?\s{0,16}([A-Za-z_][\w.-]{0,63})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?\s{0,16}(?=\{)",
    re.ASCII,
)


def parse(text: str, tools: Tools) -> Found:
    """See `CallForm`."""
    _, mark, behind = text.partition(MARK)
    body = behind if mark else text
    named = _NAMED.match(body)
    if named and (mark or named[1] in tools):
        return _named(body)
    if body.lstrip()[:1] not in (("[", "{") if mark else ("[",)):
        return Found(problems=(f"there is no call behind {MARK}.",)) if mark else Found()
    try:
        value, _ = read_json(body)
    except MalformedJsonError as error:
        meant = mark or ('"name"' in body and '"arguments"' in body)
        return Found(problems=(f"malformed call: {error}.",)) if meant else Found()
    entries = value if isinstance(value, list) else [value]
    if mark or (entries and all(isinstance(e, dict) and "name" in e and "arguments" in e for e in entries)):
        return with_calls(value)
    return Found()


def _named(body: str) -> Found:
    calls: list[ToolCall] = []
    position = 0
    while match := _NAMED.match(body, position):
        if len(calls) == MOST_CALLS:
            return Found(calls=tuple(calls), problems=(f"more than {MOST_CALLS} calls: the rest was not read.",))
        try:
            value, position = read_json(body, match.end())
        except MalformedJsonError as error:
            return Found(calls=tuple(calls), problems=(f"malformed call of '{match[1]}': {error}.",))
        calls.append(ToolCall(name=match[1], arguments=value, id=match[2] or ""))
    return Found(calls=tuple(calls))


def render(calls: Sequence[ToolCall]) -> str:
    """See `CallForm`."""
    return MARK + shown(
        [
            {"name": call.name, "arguments": dict(call.arguments)} | ({"id": call.id} if call.id else {})
            for call in calls
        ]
    )


def explain(tools: Sequence[Tool]) -> str:
    """See `CallForm`."""
    listed = ", ".join(json_signatures(tools).splitlines())
    return f"[AVAILABLE_TOOLS][{listed}][/AVAILABLE_TOOLS]"


def result(result: ToolResult) -> str:
    """See `CallForm`."""
    return f"[TOOL_RESULTS]{shown({'content': result.text, 'call_id': result.call.id})}[/TOOL_RESULTS]"


MISTRAL = CallForm(parse=parse, render=render, explain=explain, result=result)
