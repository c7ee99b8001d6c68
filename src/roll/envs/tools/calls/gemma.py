"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`: Gemma 4.

Strings are quoted with `<|"|>`; keys are not quoted; objects and lists nest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools, format_signatures
from roll.envs.tools.json_text import MAX_JSON_LENGTH, MalformedJsonError, dump_json, read_json

__all__ = ["GEMMA", "MARK"]

MARK, END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
MAX_DEPTH = 32
"""Maximum nesting depth of values."""
_CALL_PATTERN = re.compile(r"\s{0,16}call:([A-Za-z_][\w.-]{0,63})\{", re.ASCII)
_SPACE_PATTERN = re.compile(r"\s*")
_BARE_PATTERN = re.compile(r"[^,:{}\[\]<>\"\s][^,:{}\[\]<>\"\n]{0,127}")
_KEY_PATTERN = re.compile(r"[^,:{}\[\]<>\"\s]{1,64}")


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`. The last call may lack its end marker, since engines omit the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = text.find(MARK)
    while position >= 0:
        if len(calls) + len(problems) >= MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
            break
        start = position + len(MARK)
        try:
            call, end = _parse_call(text, start, tools)
            calls.append(call)
        except MalformedJsonError as error:
            problems.append(f"malformed call: {error}.")
            end = start
        position = text.find(MARK, end)
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def _parse_call(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    match = _CALL_PATTERN.match(text, start)
    if match is None:
        raise MalformedJsonError(f"call:name{{ must follow {MARK}")
    piece = text[match.end() - 1 : match.end() + MAX_JSON_LENGTH]
    tool = tools.get(match[1])
    schema = tool.parameters.get("properties", {}) if tool is not None else {}
    reader = _ValueReader(piece, schema if isinstance(schema, dict) else {})
    arguments = reader.read_mapping(1)
    end = match.end() - 1 + reader.skip_space()
    if end < len(text) and not text.startswith(("<", "\n"), end):
        raise MalformedJsonError("there is more text after the arguments")
    return ToolCall(name=match[1], arguments=arguments), end


@dataclass
class _ValueReader:
    """Parses the values in `text` from `position`, in linear time."""

    text: str
    schema: dict[str, Any]
    """Schema of the arguments: an unquoted word is a string if the schema says so."""
    position: int = 0

    def skip_space(self) -> int:
        """Skip whitespace; return the new position."""
        found = _SPACE_PATTERN.match(self.text, self.position)
        self.position = self.position if found is None else found.end()
        return self.position

    def read_value(self, depth: int, name: str = "") -> Any:
        """Parse any value.

        Args:
            depth: Number of values that enclose this one.
            name: Name of the argument; empty for a value inside another value.
        """
        self.skip_space()
        if depth > MAX_DEPTH:
            raise MalformedJsonError(f"a value is nested deeper than {MAX_DEPTH} levels")
        if self.text.startswith(QUOTE, self.position):
            return self.read_quoted()
        first = self.text[self.position : self.position + 1]
        if first == "{":
            return self.read_mapping(depth + 1)
        if first == "[":
            return self.read_list(depth + 1)
        if first == '"':
            value, self.position = read_json(self.text, self.position)
            return value
        bare = self.read_match(_BARE_PATTERN, "a value").rstrip()
        schema = self.schema.get(name)
        if name and isinstance(schema, dict) and schema.get("type") == "string":
            return bare
        try:
            value, end = read_json(bare)
        except MalformedJsonError:
            return bare
        return value if end == len(bare) else bare

    def read_quoted(self) -> str:
        """Read a quoted string."""
        begin = self.position + len(QUOTE)
        end = self.text.find(QUOTE, begin)
        if end < 0:
            raise MalformedJsonError(f"a string has no closing {QUOTE}")
        self.position = end + len(QUOTE)
        value = self.text[begin:end]
        try:
            value.encode()
        except UnicodeEncodeError:
            raise MalformedJsonError("a string contains an unpaired surrogate") from None
        return value

    def read_mapping(self, depth: int) -> dict[str, Any]:
        """Read `{key:value,…}`."""
        entries: dict[str, Any] = {}
        self.position += 1
        while not self.skip_end("}"):
            self.skip_space()
            key = (
                self.read_quoted()
                if self.text.startswith(QUOTE, self.position)
                else self.read_match(_KEY_PATTERN, "a key")
            )
            self.skip_space()
            if not self.text.startswith(":", self.position):
                raise MalformedJsonError(f"':' must follow the key '{key[:64]}'")
            self.position += 1
            entries[key] = self.read_value(depth, key if depth == 1 else "")
            self.skip_comma("}")
        return entries

    def read_list(self, depth: int) -> list[Any]:
        """Read `[value,…]`."""
        values: list[Any] = []
        self.position += 1
        while not self.skip_end("]"):
            values.append(self.read_value(depth))
            self.skip_comma("]")
        return values

    def skip_end(self, end: str) -> bool:
        """Skip the closing bracket `end` if it comes next; return whether it was skipped."""
        closes = self.text.startswith(end, self.skip_space())
        self.position += closes
        return closes

    def skip_comma(self, end: str) -> None:
        """Skip a comma, unless the closing bracket `end` comes next."""
        follows = self.text[self.skip_space() : self.position + 1]
        if follows == ",":
            self.position += 1
        elif follows != end:
            raise MalformedJsonError(f"',' or '{end}' must follow a value")

    def read_match(self, pattern: re.Pattern[str], expected: str) -> str:
        """Read the text at the current position that matches the pattern.

        Raises:
            MalformedJsonError: Nothing matches; the message says that `expected` is missing.
        """
        found = pattern.match(self.text, self.position)
        if found is None:
            raise MalformedJsonError(f"{expected} is missing")
        self.position = found.end()
        return found.group()


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "".join(
        f"{MARK}call:{call.name}{_format_value(dict(call.arguments), bare_keys=True)}{END}" for call in calls
    )


def _format_value(value: Any, *, bare_keys: bool = False) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        keys = {key: key if bare_keys and _KEY_PATTERN.fullmatch(key) else f"{QUOTE}{key}{QUOTE}" for key in value}
        return "{" + ",".join(f"{keys[key]}:{_format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_value, value)) + "]"
    return dump_json(value)


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return (
        f"You may call these functions:\n{format_signatures(tools)}\n"
        f"To call one, write {MARK}call:name{{argument:{QUOTE}text{QUOTE},other:1}}{END}"
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return dump_json({"name": result.call.name, "response": result.text})


GEMMA = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
