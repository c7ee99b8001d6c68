"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`: Gemma 4.

Texts are quoted by `<|"|>`; keys are not quoted; objects and lists nest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.form import MOST_CALLS, CallForm, Found, Tools, json_signatures
from roll.envs.tools.json_text import LONGEST_JSON, MalformedJsonError, read_json, shown

__all__ = ["GEMMA", "MARK"]

MARK, END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
DEEPEST = 32
"""Most levels of nested values."""
_CALL = re.compile(r"\s{0,16}call:([A-Za-z_][\w.-]{0,63})\{", re.ASCII)
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,:{}\[\]<>\"\s][^,:{}\[\]<>\"\n]{0,127}")
_KEY = re.compile(r"[^,:{}\[\]<>\"\s]{1,64}")


def parse(text: str, tools: Tools) -> Found:
    """See `CallForm`. The last call may lack its end, as engines leave out the text of the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = text.find(MARK)
    while position >= 0:
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"more than {MOST_CALLS} calls at once: the rest was not read.")
            break
        start = position + len(MARK)
        try:
            call, end = _call(text, start, tools)
            calls.append(call)
        except MalformedJsonError as error:
            problems.append(f"malformed call: {error}.")
            end = start
        position = text.find(MARK, end)
    return Found(calls=tuple(calls), problems=tuple(problems))


def _call(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    match = _CALL.match(text, start)
    if match is None:
        raise MalformedJsonError("call:name{ follows the mark")
    piece = text[match.end() - 1 : match.end() + LONGEST_JSON]
    tool = tools.get(match[1])
    schema = tool.parameters.get("properties", {}) if tool is not None else {}
    reader = _Reader(piece, schema if isinstance(schema, dict) else {})
    arguments = reader.mapping(1)
    end = match.end() - 1 + reader.skip()
    if end < len(text) and not text.startswith(("<", "\n"), end):
        raise MalformedJsonError("there is more behind the arguments")
    return ToolCall(name=match[1], arguments=arguments), end


@dataclass
class _Reader:
    """Parses one value after the other, in linear time."""

    text: str
    schema: dict[str, Any]
    """Schema of the arguments: an unquoted word is a text if the schema says so."""
    place: int = 0

    def skip(self) -> int:
        """Skip whitespace; return the position."""
        found = _SPACE.match(self.text, self.place)
        self.place = self.place if found is None else found.end()
        return self.place

    def value(self, depth: int, name: str = "") -> Any:
        """Parse any value.

        Args:
            depth: Number of values around it.
            name: Name of the argument; empty inside other values.
        """
        self.skip()
        if depth > DEEPEST:
            raise MalformedJsonError(f"it is deeper than {DEEPEST} levels")
        if self.text.startswith(QUOTE, self.place):
            return self.quoted()
        first = self.text[self.place : self.place + 1]
        if first == "{":
            return self.mapping(depth + 1)
        if first == "[":
            return self.listing(depth + 1)
        if first == '"':
            value, self.place = read_json(self.text, self.place)
            return value
        bare = self.matched(_BARE, "a value").rstrip()
        schema = self.schema.get(name)
        if name and isinstance(schema, dict) and schema.get("type") == "string":
            return bare
        try:
            value, end = read_json(bare)
        except MalformedJsonError:
            return bare
        return value if end == len(bare) else bare

    def quoted(self) -> str:
        """Read a text between quotes."""
        begin = self.place + len(QUOTE)
        end = self.text.find(QUOTE, begin)
        if end < 0:
            raise MalformedJsonError(f"a text has no closing {QUOTE}")
        self.place = end + len(QUOTE)
        value = self.text[begin:end]
        try:
            value.encode()
        except UnicodeEncodeError:
            raise MalformedJsonError("a string holds half of a surrogate pair") from None
        return value

    def mapping(self, depth: int) -> dict[str, Any]:
        """Read `{key:value,…}`."""
        found: dict[str, Any] = {}
        self.place += 1
        while not self.closes("}"):
            self.skip()
            key = self.quoted() if self.text.startswith(QUOTE, self.place) else self.matched(_KEY, "a key")
            self.skip()
            if not self.text.startswith(":", self.place):
                raise MalformedJsonError(f"':' must follow the key '{key[:64]}'")
            self.place += 1
            found[key] = self.value(depth, key if depth == 1 else "")
            self.separated("}")
        return found

    def listing(self, depth: int) -> list[Any]:
        """Read `[value,…]`."""
        found: list[Any] = []
        self.place += 1
        while not self.closes("]"):
            found.append(self.value(depth))
            self.separated("]")
        return found

    def closes(self, end: str) -> bool:
        """Return whether the end follows, and skip it."""
        closes = self.text.startswith(end, self.skip())
        self.place += closes
        return closes

    def separated(self, end: str) -> None:
        """Skip a comma, unless the end follows."""
        follows = self.text[self.skip() : self.place + 1]
        if follows == ",":
            self.place += 1
        elif follows != end:
            raise MalformedJsonError(f"',' or '{end}' must follow a value")

    def matched(self, pattern: re.Pattern[str], what: str) -> str:
        """Read the text that matches the pattern."""
        found = pattern.match(self.text, self.place)
        if found is None:
            raise MalformedJsonError(f"{what} is missing")
        self.place = found.end()
        return found.group()


def render(calls: Sequence[ToolCall]) -> str:
    """See `CallForm`."""
    return "".join(f"{MARK}call:{call.name}{_written(dict(call.arguments), bare_keys=True)}{END}" for call in calls)


def _written(value: Any, *, bare_keys: bool = False) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        keys = {key: key if bare_keys and _KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}" for key in value}
        return "{" + ",".join(f"{keys[key]}:{_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return shown(value)


def explain(tools: Sequence[Tool]) -> str:
    """See `CallForm`."""
    return (
        f"You may call these functions:\n{json_signatures(tools)}\n"
        f"To call one, write {MARK}call:name{{argument:{QUOTE}text{QUOTE},other:1}}{END}"
    )


def result(result: ToolResult) -> str:
    """See `CallForm`."""
    return shown({"name": result.call.name, "response": result.text})


GEMMA = CallForm(parse=parse, render=render, explain=explain, result=result)
