"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen; and Qwen3-Coder's tags inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.form import MOST_CALLS, NAME, CallForm, Found, Tools, call_of, json_signatures
from roll.envs.tools.calls.xml import typed
from roll.envs.tools.json_text import MalformedJsonError, read_json, shown

__all__ = ["HERMES"]

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s{0,64}<function=([^<>\s]{1,64})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,64})>")


def parse(text: str, tools: Tools) -> Found:
    """See `CallForm`. The last call may lack its end, as engines leave out the text of the stop token."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = text.find(BEGIN)
    while position >= 0:
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"more than {MOST_CALLS} calls at once: the rest was not read.")
            break
        start = position + len(BEGIN)
        try:
            call, end = _call(text, start, tools)
            calls.append(call)
        except MalformedJsonError as error:
            problems.append(f"malformed {BEGIN}: {error}.")
            end = _end(text, start)
        position = text.find(BEGIN, end)
    return Found(calls=tuple(calls), problems=tuple(problems))


def _end(text: str, start: int) -> int:
    end = text.find(END, start)
    return end if end >= 0 else len(text)


def _call(text: str, start: int, tools: Tools) -> tuple[ToolCall, int]:
    """Return the call and the end of its tag: after the JSON, which may contain the text of the closing tag itself."""
    function = _FUNCTION.match(text, start)
    if function:
        end = _end(text, start)
        return _tagged(function[1], text[function.end() : end], tools), end
    value, position = read_json(text, start)
    end = _end(text, position)
    if text[position:end].strip():
        raise MalformedJsonError("there is more inside the tag than one JSON object")
    return call_of(value), end


def _tagged(name: str, body: str, tools: Tools) -> ToolCall:
    """Parse `<parameter=key>value</parameter>` …; a value loses one line break at either end, and is otherwise kept."""
    if not NAME.fullmatch(name):
        raise MalformedJsonError("a function's name is a word")
    arguments: dict[str, object] = {}
    position = 0
    while match := _PARAMETER.search(body, position):
        end = body.find("</parameter>", match.end())
        if end < 0:
            raise MalformedJsonError(f"the parameter '{match[1]}' has no </parameter>")
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = typed(tools.get(name), match[1], value)
        position = end
    return ToolCall(name=name, arguments=arguments)


def render(calls: Sequence[ToolCall]) -> str:
    """See `CallForm`."""
    return "\n".join(f"{BEGIN}\n{shown({'name': c.name, 'arguments': dict(c.arguments)})}\n{END}" for c in calls)


def explain(tools: Sequence[Tool]) -> str:
    """See `CallForm`."""
    example = '{"name": "a tool\'s name", "arguments": {"argument": "value"}}'
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>\n{json_signatures(tools)}\n</tools>\n\n"
        f"To call one, write its name and arguments as JSON between tags:\n{BEGIN}\n{example}\n{END}"
    )


def result(result: ToolResult) -> str:
    """See `CallForm`."""
    return f"<tool_response>\n{result.text}\n</tool_response>"


HERMES = CallForm(parse=parse, render=render, explain=explain, result=result)
