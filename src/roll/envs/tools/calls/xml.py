"""`<search>words</search>`: a tool's name as a tag around its one argument, or around a tag per argument.

A tool named `python` is also called by a fenced block of Python, as in GEM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.base import Tool, ToolCall, ToolResult
from roll.envs.tools.calls.form import MOST_CALLS, CallForm, Found, Tools
from roll.envs.tools.json_text import MalformedJsonError, read_json, shown

__all__ = ["XML", "main_argument", "typed"]

_FENCE, _FENCE_END = "```python\n", "```"


def main_argument(tool: Tool) -> str | None:
    """Return the argument that the content of a tag is assigned to: the first required one, or else the first."""
    properties = list(tool.parameters.get("properties", {}))
    required = [name for name in tool.parameters.get("required", ()) if name in properties]
    return next(iter(required or properties), None)


def typed(tool: Tool | None, argument: str, text: str) -> Any:
    """Convert an argument's text to its schema's type: text if that is `string` or missing, else JSON if it parses."""
    schema = tool.parameters.get("properties", {}).get(argument, {}) if tool is not None else {}
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        value, end = read_json(text)
    except MalformedJsonError:
        return text  # the schema check reports the mistake to the model
    return text if text[end:].strip() else value


def parse(text: str, tools: Tools) -> Found:
    """See `CallForm`."""
    if not tools:
        return Found()
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
        if closing in unclosed:
            continue
        if len(calls) + len(problems) >= MOST_CALLS:
            problems.append(f"more than {MOST_CALLS} calls at once: the rest was not read.")
            break
        end = text.find(closing, position)
        if end < 0:
            unclosed.add(closing)
            problems.append(f"<{name}> has no {closing}.")
            continue
        calls.append(_call(tools[name], text[position:end]))
        position = end + len(closing)
    return Found(calls=tuple(calls), problems=tuple(problems))


def _call(tool: Tool, body: str) -> ToolCall:
    main = main_argument(tool)
    if main is None:
        return ToolCall(name=tool.name, arguments={})
    arguments = _tagged(tool, body)
    if arguments is None:
        arguments = {main: typed(tool, main, body.strip())}
    return ToolCall(name=tool.name, arguments=arguments)


def _tagged(tool: Tool, body: str) -> dict[str, Any] | None:
    """Parse arguments in tags of their own; return `None` if the body does not consist of such tags."""
    opening = re.compile(r"\s{0,64}<(" + "|".join(map(re.escape, tool.parameters["properties"])) + ")>")
    arguments: dict[str, Any] = {}
    position = 0
    while match := opening.match(body, position):
        closing = f"</{match[1]}>"
        end = body.find(closing, match.end())
        if end < 0:
            return None
        value = body[match.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[match[1]] = typed(tool, match[1], value)
        position = end + len(closing)
    return arguments if arguments and not body[position:].strip() else None


def render(calls: Sequence[ToolCall]) -> str:
    """See `CallForm`."""
    return "\n".join(_rendered(call) for call in calls)


def _rendered(call: ToolCall) -> str:
    body = "".join(
        f"<{name}>\n{value if isinstance(value, str) else shown(value)}\n</{name}>"
        for name, value in call.arguments.items()
    )
    return f"<{call.name}>{body}</{call.name}>"


def explain(tools: Sequence[Tool]) -> str:
    """See `CallForm`."""
    return "Tools:\n" + "\n".join(_explained(tool) for tool in tools)


def _explained(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    one = "…" if properties else ""
    body = "".join(f"<{name}>…</{name}>" for name in properties) if len(properties) > 1 else one
    return f"<{tool.name}>{body}</{tool.name}>: {tool.description}"


def result(result: ToolResult) -> str:
    """See `CallForm`."""
    return f"<result>\n{result.text}\n</result>"


XML = CallForm(parse=parse, render=render, explain=explain, result=result)
