"""`<search>words</search>`: a tool's name as a tag around its one argument, or around a tag per argument.

A tool named `python` is also called by a fenced block of Python, as in GEM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools
from roll.envs.tools.json_text import MalformedJsonError, dump_json, read_json

__all__ = ["XML", "convert_argument", "get_main_argument"]

_FENCE, _FENCE_END = "```python\n", "```"


def get_main_argument(tool: Tool) -> str | None:
    """Return the name of the argument to which a tag's content is assigned.

    It is the first required argument, otherwise the first argument; None if the tool has no arguments.
    """
    properties = list(tool.parameters.get("properties", {}))
    required = [name for name in tool.parameters.get("required", ()) if name in properties]
    return next(iter(required or properties), None)


def convert_argument(tool: Tool | None, argument: str, text: str) -> Any:
    """Return the value of an argument: parsed as JSON unless its type in the schema is `string` or missing.

    Text that is not valid JSON is returned unchanged.
    """
    schema = tool.parameters.get("properties", {}).get(argument, {}) if tool is not None else {}
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        value, end = read_json(text)
    except MalformedJsonError:
        return text  # the schema check reports the mistake to the model
    return text if text[end:].strip() else value


def parse(text: str, tools: Tools) -> ParsedCalls:
    """See `ToolCallFormat`."""
    if not tools:
        return ParsedCalls()
    fence = f"|{re.escape(_FENCE)}" if "python" in tools else ""
    opening = re.compile("<(" + "|".join(map(re.escape, tools)) + f")>{fence}")
    calls: list[ToolCall] = []
    problems: list[str] = []
    unclosed: set[str] = set()
    position = 0
    while match := opening.search(text, position):
        position = match.end()
        name = match[1] or "python"
        closing = f"</{name}>" if match[1] else _FENCE_END
        # A missing end tag is searched once per tool, so that the time stays linear.
        if closing in unclosed:
            continue
        if len(calls) + len(problems) >= MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls at once: the rest was not read.")
            break
        end = text.find(closing, position)
        if end < 0:
            unclosed.add(closing)
            problems.append(f"<{name}> has no {closing}.")
            continue
        calls.append(_parse_call(tools[name], text[position:end]))
        position = end + len(closing)
    return ParsedCalls(calls=tuple(calls), problems=tuple(problems))


def _parse_call(tool: Tool, body: str) -> ToolCall:
    main = get_main_argument(tool)
    if main is None:
        return ToolCall(name=tool.name, arguments={})
    arguments = _parse_tags(tool, body)
    if arguments is None:
        arguments = {main: convert_argument(tool, main, body.strip())}
    return ToolCall(name=tool.name, arguments=arguments)


def _parse_tags(tool: Tool, body: str) -> dict[str, Any] | None:
    """Parse one tag per argument; return `None` if the body does not have this format."""
    opening = re.compile(r"\s{0,64}<(" + "|".join(map(re.escape, tool.parameters["properties"])) + ")>")
    arguments: dict[str, Any] = {}
    position = 0
    while match := opening.match(body, position):
        closing = f"</{match[1]}>"
        end = body.find(closing, match.end())
        if end < 0:
            return None
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = convert_argument(tool, match[1], value)
        position = end + len(closing)
    return arguments if arguments and not body[position:].strip() else None


def render(calls: Sequence[ToolCall]) -> str:
    """See `ToolCallFormat`."""
    return "\n".join(_render_call(call) for call in calls)


def _render_call(call: ToolCall) -> str:
    body = "".join(
        f"<{name}>\n{value if isinstance(value, str) else dump_json(value)}\n</{name}>"
        for name, value in call.arguments.items()
    )
    return f"<{call.name}>{body}</{call.name}>"


def explain(tools: Sequence[Tool]) -> str:
    """See `ToolCallFormat`."""
    return "Tools:\n" + "\n".join(_explain_tool(tool) for tool in tools)


def _explain_tool(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    one = "…" if properties else ""
    body = "".join(f"<{name}>…</{name}>" for name in properties) if len(properties) > 1 else one
    return f"<{tool.name}>{body}</{tool.name}>: {tool.description}"


def format_result(result: ToolResult) -> str:
    """See `ToolCallFormat`."""
    return f"<result>\n{result.text}\n</result>"


XML = ToolCallFormat(parse=parse, render=render, explain=explain, format_result=format_result)
