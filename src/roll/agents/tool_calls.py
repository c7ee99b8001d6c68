"""Calls of tools in what a model wrote, in the model's own format, and tools in what it is given.

What a model wrote is hostile: all reading here is linear in its length, bounded, and never raises. What is not a
well-formed call stays text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic_core import from_json

from roll.types import Message

__all__ = ["FORMATS", "ToolCall", "ToolFormat", "format_of", "plainly", "read_calls"]

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "plain", "none"]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "plain", "none")
MOST_CALLS = 128
"""In one answer; the rest stays text."""
LONGEST_NAME = 256
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_PYTHON_TAG = "<|python_tag|>"
_ID_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = field(default_factory=lambda: "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9)))
    """Nine letters and digits: some chat templates accept nothing else."""

    @property
    def arguments_json(self) -> str:
        """As the interfaces of vendors carry them."""
        return json.dumps(self.arguments, ensure_ascii=False)


def format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches; `plain` where it takes no tools."""
    if "tools" not in template:
        return "plain"
    if _MISTRAL in template:
        return "mistral"
    if _OPEN in template:
        return "hermes"
    return "llama3" if '"parameters"' in template else "hermes"


def read_calls(text: str, tool_format: ToolFormat) -> tuple[str, tuple[ToolCall, ...]]:
    """What is said beside calls, and the calls.

    Args:
        text: special tokens included, without the one that ended it.
        tool_format: see `format_of`.
    """
    reader = _READERS.get(tool_format)
    return (text, ()) if reader is None else reader(text)


def plainly(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation for a template that knows no tools: they, calls of them, and what they said, as text."""
    said: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        calls: Sequence[Any] = message.get("tool_calls") or ()  # type: ignore[assignment]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if said and said[-1]["role"] == "user" and said[-1]["content"].endswith("</tool_response>"):
                said[-1] = {"role": "user", "content": f"{said[-1]['content']}\n{content}"}
                continue
        elif calls:
            written = (f"{_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CLOSE}" for call in calls)
            content = "\n".join([*([content] if content else []), *written])
        said.append({"role": role, "content": content})
    if tools:
        first = said[0]["content"] + "\n\n" if said and said[0]["role"] == "system" else ""
        said[: 1 if first else 0] = [{"role": "system", "content": first + _offer(tools)}]
    return said


def _offer(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, described by JSON schemas:\n<tools>\n{listed}\n</tools>\nTo call one, write "
        f'{_OPEN}{{"name": its name, "arguments": {{its arguments}}}}{_CLOSE}, several times for several calls.'
    )


def _hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; the last may be unclosed."""
    calls: list[ToolCall] = []
    rest: list[str] = []
    position = 0
    while (begin := text.find(_OPEN, position)) >= 0 and len(calls) < MOST_CALLS:
        close = text.find(_CLOSE, begin)
        body = text[begin + len(_OPEN) : close if close >= 0 else len(text)]
        end = close + len(_CLOSE) if close >= 0 else len(text)
        found = _calls_of(body)
        rest += [text[position:begin], "" if found else text[begin:end]]
        calls += found
        position = end
    rest.append(text[position:])
    return ("".join(rest).strip() if calls else text), tuple(calls[:MOST_CALLS])


def _llama3(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The whole answer is `{"name": …, "parameters": {…}}`, or several of these with `;` between them."""
    body = text.strip().removeprefix(_PYTHON_TAG).lstrip()
    calls: list[ToolCall] = []
    position = 0
    while position < len(body) and len(calls) < MOST_CALLS:
        value, position = _value_at(body, position)
        found = [call for call in [_call_of(value)] if call is not None]
        if not found:
            return text, ()
        calls += found
        while position < len(body) and body[position] in "; \t\r\n":
            position += 1
    return ("", tuple(calls)) if calls else (text, ())


def _mistral(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or in later models `[TOOL_CALLS]name[ARGS]{…}`, repeated."""
    before, *parts = text.split(_MISTRAL, MOST_CALLS)
    calls: list[ToolCall] = []
    for part in parts:
        name, separator, arguments = part.partition(_ARGUMENTS)
        if separator:
            value, _ = _value_at(arguments, len(arguments) - len(arguments.lstrip()))
            call = _call_of({"name": name.strip(), "arguments": value})
            found = [] if call is None else [call]
        else:
            value, _ = _value_at(part, len(part) - len(part.lstrip()))
            found = _calls_in(value)
        if not found:
            return text, ()
        calls += found
    return (before.strip(), tuple(calls[:MOST_CALLS])) if calls else (text, ())


_READERS: dict[str, Callable[[str], tuple[str, tuple[ToolCall, ...]]]] = {
    "hermes": _hermes,
    "plain": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _value_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins there and where it ends; `None` and the text's end where there is none."""
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, len(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _calls_of(body: str) -> list[ToolCall]:
    try:
        return _calls_in(from_json(body.strip(), allow_inf_nan=False))
    except ValueError:
        return []


def _calls_in(value: Any) -> list[ToolCall]:
    """The calls of an object or a list of objects; none where one of them is no call."""
    calls = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    return [] if any(call is None for call in calls) else [call for call in calls if call is not None]


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            return None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not isinstance(arguments or {}, dict):
        return None
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:  # a number beyond all floats
        return None
    return ToolCall(name=name, arguments=arguments or {})
