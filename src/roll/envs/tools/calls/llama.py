"""Llama 3: `{"name": …, "parameters": {…}}` as the whole reply, several separated by `;`, or after `<|python_tag|>`.

A built-in tool's `name.call(query="…")`, or plain code for the tool `python`, may also follow that tag. The tag is a
special token, which decoding leaves out, so all forms except plain code are also detected without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools, format_signatures, parse_call
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["LLAMA"]

PYTHON_TAG = "<|python_tag|>"
_END_TOKENS = ("<|eom_id|>", "<|eot_id|>")
_BUILT_IN_PATTERN = re.compile(r"([A-Za-z_]\w{0,63})\.call\(", re.ASCII)
_KEYWORD_PATTERN = re.compile(r"\s{0,16}([A-Za-z_]\w{0,63})\s{0,16}=", re.ASCII)


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`."""
    _, tag, after = text.partition(PYTHON_TAG)
    body = (after if tag else text).strip()
    for end in _END_TOKENS:
        body = body.removesuffix(end)
    if body.startswith("{"):
        return _parse_objects(body, bool(tag))
    built_in = _BUILT_IN_PATTERN.match(body)
    if built_in and (tag or built_in[1] in tools):
        try:
            return ParsedCalls(calls=(ToolCall(name=built_in[1], arguments=_parse_keywords(body, built_in.end())),))
        except MalformedJsonError as error:
            return ParsedCalls(problems=(f"malformed call to '{built_in[1]}': {error}.",))
    if tag and body and "python" in tools:
        return ParsedCalls(calls=(ToolCall(name="python", arguments={"code": body}),))
    return ParsedCalls(problems=(f"there is no call after {PYTHON_TAG}.",)) if tag else ParsedCalls()


def _parse_objects(body: str, tagged: bool) -> ParsedCalls:
    calls: list[ToolCall] = []
    position = 0
    try:
        while body.startswith("{", position) and len(calls) < MAX_CALLS:
            value, position = read_json(body, position)
            if not tagged and not (isinstance(value, dict) and "name" in value and len(value.keys() & _ARGUMENT_KEYS)):
                return ParsedCalls()  # JSON that is an answer, not a call
            calls.append(parse_call(value))
            while body[position : position + 1] in _SEPARATORS:
                position += 1
    except MalformedJsonError as error:
        meant = tagged or '"parameters"' in body or '"arguments"' in body
        return ParsedCalls(calls=tuple(calls), problems=(f"malformed call: {error}.",) if meant else ())
    too_many = len(calls) == MAX_CALLS and position < len(body)
    more = (f"more than {MAX_CALLS} calls at once: the rest was not read.",) if too_many else ()
    return ParsedCalls(calls=tuple(calls), problems=more)


_ARGUMENT_KEYS = {"parameters", "arguments"}
_SEPARATORS = tuple(" \n\t;,")


def _parse_keywords(body: str, position: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    while match := _KEYWORD_PATTERN.match(body, position):
        arguments[match[1]], position = read_json(body, match.end())
        if body[position : position + 1] == ",":
            position += 1
    if body[position : position + 1] != ")":
        raise MalformedJsonError('arguments must be written as name="value", with ) at the end')
    return arguments


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "; ".join(dump_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return (
        f"Functions that you may call:\n{format_signatures(tools)}\n"
        'To call one, answer with {"name": "its name", "parameters": {"argument": "value"}} and nothing else.'
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return dump_json({"output": result.text})


LLAMA = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
