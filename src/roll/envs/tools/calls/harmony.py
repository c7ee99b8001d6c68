"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: gpt-oss.

The recipient may also come before the channel. Messages without a recipient (reasoning and answers) contain no calls.
If the special tokens are lost, `to=functions.name` before a JSON object is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, MAX_NAME_LENGTH, ParsedCalls, ToolCallFormat, Tools, format_signatures
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["CHANNEL", "HARMONY", "is_harmony"]

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_MESSAGE_END_PATTERN = re.compile(r"<\|(?:call|end|return|start)\|>")
_MAX_HEADER_LENGTH = 256
_RECIPIENT_PATTERN = re.compile(r"\bto=(?:functions\.)?([A-Za-z_][\w.-]{0,63})", re.ASCII)
_BARE_PATTERN = re.compile(
    r"\bto=functions\.([A-Za-z_][\w.-]{0,63}?)(?:commentary)?\s{0,8}(?:json)?\s{0,8}(?=\{)", re.ASCII
)


def is_harmony(text: str) -> bool:
    """Return whether the text has the markers of this format."""
    return CHANNEL in text or _BARE_PATTERN.search(text) is not None


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`. The last call may lack its end marker, since engines omit the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    for name, begin, end in _find_tool_messages(text):
        if len(calls) + len(problems) >= MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
            break
        body = text[begin:end]
        try:
            value, place = read_json(body)
            if not isinstance(value, dict):
                raise MalformedJsonError("the arguments of a call must be an object")
            if end < len(text) and body[place:].strip():
                raise MalformedJsonError("the message must contain only one JSON object")
            calls.append(ToolCall(name=name[:MAX_NAME_LENGTH], arguments=value))
        except MalformedJsonError as error:
            if name == "python" and "python" in tools and body.strip() and not body.lstrip().startswith("{"):
                calls.append(ToolCall(name=name, arguments={"code": body}))
            else:
                problems.append(f"malformed call to '{name}': {error}.")
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def _find_tool_messages(text: str) -> list[tuple[str, int, int]]:
    """Return, for each message to a tool, the tool's name and the start and end of the message's text."""
    if MESSAGE not in text:
        return [(match[1], match.end(), len(text)) for match in _BARE_PATTERN.finditer(text)][: MAX_CALLS + 1]
    addressed: list[tuple[str, int, int]] = []
    position = 0
    while (place := text.find(MESSAGE, position)) >= 0 and len(addressed) <= MAX_CALLS:
        header = text[max(position, place - _MAX_HEADER_LENGTH) : place]
        begin = place + len(MESSAGE)
        closing = _MESSAGE_END_PATTERN.search(text, begin)
        end = len(text) if closing is None else closing.start()
        recipient = _RECIPIENT_PATTERN.search(header)
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            addressed.append((recipient[1], begin, end))
        position = len(text) if closing is None else closing.end()
    return addressed


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "<|start|>assistant".join(
        f"{CHANNEL}commentary to=functions.{call.name} <|constrain|>json{MESSAGE}"
        f"{dump_json(dict(call.arguments))}<|call|>"
        for call in calls
    )


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return (
        f"Functions that you may call:\n{format_signatures(tools)}\n"
        f'To call one, write {CHANNEL}commentary to=functions.name <|constrain|>json{MESSAGE}{{"argument": "value"}}'
        "<|call|>"
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return dump_json({"name": f"functions.{result.call.name}", "content": result.text})


HARMONY = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
