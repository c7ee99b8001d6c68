"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: gpt-oss.

The recipient may also be in front of the channel. Messages without a recipient (reasoning and answers) hold no calls.
If the special tokens are lost, `to=functions.name` in front of a JSON object is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.form import LONGEST_NAME, MOST_CALLS, CallForm, Found, Tools, json_signatures
from roll.envs.tools.json_text import MalformedJsonError, read_json, shown

__all__ = ["CHANNEL", "HARMONY", "is_harmony"]

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_ENDS = re.compile(r"<\|(?:call|end|return|start)\|>")
_LONGEST_HEADER = 256
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z_][\w.-]{0,63})", re.ASCII)
_BARE = re.compile(r"\bto=functions\.([A-Za-z_][\w.-]{0,63}?)(?:commentary)?\s{0,8}(?:json)?\s{0,8}(?=\{)", re.ASCII)


def is_harmony(text: str) -> bool:
    """Return whether a text has this family's marks."""
    return CHANNEL in text or _BARE.search(text) is not None


def parse(text: str, tools: Tools) -> Found:
    """See `CallForm`. The last call may lack its end, as engines leave out the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    for name, begin, end in _addressed(text):
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"more than {MOST_CALLS} calls at once: the rest was not read.")
            break
        body = text[begin:end]
        try:
            value, place = read_json(body)
            if not isinstance(value, dict):
                raise MalformedJsonError("the arguments of a call are an object")
            if end < len(text) and body[place:].strip():
                raise MalformedJsonError("there is more in the message than one JSON object")
            calls.append(ToolCall(name=name[:LONGEST_NAME], arguments=value))
        except MalformedJsonError as error:
            if name == "python" and "python" in tools and body.strip() and not body.lstrip().startswith("{"):
                calls.append(ToolCall(name=name, arguments={"code": body}))
            else:
                problems.append(f"malformed call of '{name}': {error}.")
    return Found(calls=tuple(calls), problems=tuple(problems))


def _addressed(text: str) -> list[tuple[str, int, int]]:
    """Return the tool's name, and start and end of the text, for each message to a tool."""
    if MESSAGE not in text:
        return [(match[1], match.end(), len(text)) for match in _BARE.finditer(text)][: MOST_CALLS + 1]
    found: list[tuple[str, int, int]] = []
    position = 0
    while (place := text.find(MESSAGE, position)) >= 0 and len(found) <= MOST_CALLS:
        header = text[max(position, place - _LONGEST_HEADER) : place]
        begin = place + len(MESSAGE)
        closing = _ENDS.search(text, begin)
        end = len(text) if closing is None else closing.start()
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            found.append((recipient[1], begin, end))
        position = len(text) if closing is None else closing.end()
    return found


def render(calls: Sequence[ToolCall]) -> str:
    """See `CallForm`."""
    return "<|start|>assistant".join(
        f"{CHANNEL}commentary to=functions.{call.name} <|constrain|>json{MESSAGE}{shown(dict(call.arguments))}<|call|>"
        for call in calls
    )


def explain(tools: Sequence[Tool]) -> str:
    """See `CallForm`."""
    return (
        f"Functions that you may call:\n{json_signatures(tools)}\n"
        f'To call one, write {CHANNEL}commentary to=functions.name <|constrain|>json{MESSAGE}{{"argument": "value"}}'
        "<|call|>"
    )


def result(result: ToolResult) -> str:
    """See `CallForm`."""
    return shown({"name": f"functions.{result.call.name}", "content": result.text})


HARMONY = CallForm(parse=parse, render=render, explain=explain, result=result)
