"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later.

String values are not quoted; other values are JSON. The tool's schema determines the type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, NAME_PATTERN, ParsedCalls, ToolCallFormat, Tools, format_signatures
from roll.envs.tools.calls.xml import convert_argument
from roll.envs.tools.json_text import MalformedJsonError, dump_json

__all__ = ["ARGUMENT_TAG", "GLM", "is_glm"]

BEGIN, END = "<tool_call>", "</tool_call>"
ARGUMENT_TAG = "<arg_key>"
_KEY_END, _VALUE, _VALUE_END = "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_AFTER_TAG_PATTERN = re.compile(r"\s{0,64}([^<>\s{}\[\]\"]{1,64})\s{0,64}(?=<arg_key>|</tool_call>|$)")
_SPACE_PATTERN = re.compile(r"\s{0,64}")


def is_glm(text: str) -> bool:
    """Return whether the first call in the text has this format: a name instead of JSON after the tag."""
    position = text.find(BEGIN)
    return position >= 0 and _NAME_AFTER_TAG_PATTERN.match(text, position + len(BEGIN)) is not None


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`. The last call may lack its end marker, since engines omit the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = text.find(BEGIN)
    while position >= 0:
        if len(calls) + len(problems) >= MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
            break
        position += len(BEGIN)
        try:
            call, position = _parse_call(text, position, tools)
            calls.append(call)
        except MalformedJsonError as error:
            problems.append(f"malformed {BEGIN}: {error}.")
        position = text.find(BEGIN, position)
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def _parse_call(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    """Return the call whose opening tag ends at `start`, and the position where the call ends.

    An argument's value may contain the text of the call's closing tag.
    """
    match = _NAME_AFTER_TAG_PATTERN.match(text, start)
    if match is None or not NAME_PATTERN.fullmatch(match[1]):
        raise MalformedJsonError(f"the opening tag must be followed by a function's name, then {ARGUMENT_TAG} or {END}")
    name, position = match[1], match.end()
    arguments: dict[str, object] = {}
    while text.startswith(ARGUMENT_TAG, position):
        key_end = text.find(_KEY_END, position)
        if key_end < 0:
            raise MalformedJsonError(f"{ARGUMENT_TAG} has no {_KEY_END}")
        key = text[position + len(ARGUMENT_TAG) : key_end].strip()
        begin = _skip_space(text, key_end + len(_KEY_END))
        end = text.find(_VALUE_END, begin) if text.startswith(_VALUE, begin) else -1
        if end < 0:
            raise MalformedJsonError(f"the argument '{key[:64]}' has no {_VALUE}…{_VALUE_END}")
        arguments[key] = convert_argument(tools.get(name), key, text[begin + len(_VALUE) : end])
        position = _skip_space(text, end + len(_VALUE_END))
    if position < len(text) and not text.startswith(END, position):
        raise MalformedJsonError(f"only {ARGUMENT_TAG} may follow a value, but there is other text before {END}")
    return ToolCall(name=name, arguments=arguments), position


def _skip_space(text: str, position: int) -> int:
    found = _SPACE_PATTERN.match(text, position)
    return position if found is None else found.end()


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "\n".join(_render_call(call) for call in calls)


def _render_call(call: ToolCall) -> str:
    lines = [f"{BEGIN}{call.name}"]
    for key, value in call.arguments.items():
        lines.append(f"{ARGUMENT_TAG}{key}{_KEY_END}")
        lines.append(f"{_VALUE}{value if isinstance(value, str) else dump_json(value)}{_VALUE_END}")
    return "\n".join([*lines, END])


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>\n{format_signatures(tools)}\n</tools>\n\n"
        f"To call one, write its name and arguments between tags:\n{BEGIN}name\n{ARGUMENT_TAG}argument{_KEY_END}\n"
        f"{_VALUE}value{_VALUE_END}\n{END}"
    )


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return f"<tool_response>\n{result.text}\n</tool_response>"


GLM = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
