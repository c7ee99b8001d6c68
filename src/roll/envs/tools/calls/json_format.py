"""A JSON object `{"name": …, "arguments": {…}}`, or a list of them, as the whole reply or in fenced blocks."""

from __future__ import annotations

from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools, format_signatures, parse_calls
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["JSON"]

_FENCE = "```"


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`. JSON that does not name a tool is not a call, because an answer may also be JSON."""
    del tools
    if text.lstrip()[:1] in ("{", "["):
        return _parse_body(text)
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    position = text.find(_FENCE)
    for _ in range(MAX_CALLS):
        if position < 0:
            break
        start = position + len(_FENCE)
        end = text.find(_FENCE, start)
        end = len(text) if end < 0 else end
        body = text[start:end].removeprefix("json").removeprefix("tool_call")
        if body.lstrip()[:1] in ("{", "["):
            found = _parse_body(body)
            calls, problems = (*calls, *found.calls), (*problems, *found.problems)
        position = text.find(_FENCE, end + len(_FENCE))
    return ParsedCalls(calls=calls[:MAX_CALLS], problems=problems)


def _parse_body(body: str) -> ParsedCalls:
    try:
        value, _ = read_json(body)
    except MalformedJsonError as error:
        meant = '"name"' in body and ('"arguments"' in body or '"parameters"' in body)
        return ParsedCalls(problems=(f"malformed call: {error}.",)) if meant else ParsedCalls()
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    entries = value if isinstance(value, list) else [value]
    meant = bool(entries) and all(isinstance(entry, dict) and _is_call(entry) for entry in entries)
    return parse_calls(value) if meant else ParsedCalls()


def _is_call(entry: dict[str, object]) -> bool:
    return "function" in entry or ("name" in entry and ("arguments" in entry or "parameters" in entry))


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    values = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return dump_json(values[0] if len(values) == 1 else values)


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return (
        f"Functions that you may call:\n{format_signatures(tools)}\n"
        'To call one, answer with nothing but {"name": "its name", "arguments": {"argument": "value"}}, '
        "or with a list of such objects."
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return dump_json({"name": result.call.name, "content": result.text})


JSON = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
