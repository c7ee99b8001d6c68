"""Call tools for a model: the model reads its own mistakes; any other failure is an `InfraError`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.envs.sanitize import plain
from roll.envs.tools.base import Tool, ToolCall, ToolError, ToolResult
from roll.errors import ConfigError, InfraError, raised_at
from roll.registry import did_you_mean
from roll.types import Content, with_texts

__all__ = ["Toolbox", "cut"]

_LONGEST_COMPLAINT = 300


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """Tools by name.

    Args:
        tools: Tools with different names.
        call_time_limit_s: Timeout of one call. Exceeding it is an infrastructure failure, since tools themselves bound
            the work that a model's arguments can cause.
        max_result_chars: Most characters of a result; a longer one loses its middle.
    """

    tools: Sequence[Tool]
    call_time_limit_s: float = 120.0
    max_result_chars: int = 8_000
    by_name: Mapping[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        by_name = {tool.name: tool for tool in self.tools}
        if len(by_name) < len(self.tools):
            names = [tool.name for tool in self.tools]
            double = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"two tools have the same name {double}: give one of them another.")
        object.__setattr__(self, "by_name", by_name)

    async def use(self, call: ToolCall) -> ToolResult:
        """Return the result of a call, or a description of its mistake.

        Raises:
            InfraError: The tool failed or timed out, which is not the model's mistake.
        """
        try:
            content = await self._called(call)
        except ToolError as error:
            return ToolResult(call=call, content=plain(cut(str(error), self.max_result_chars)), ok=False)
        said = with_texts(content, lambda text: plain(cut(text, self.max_result_chars)))
        return ToolResult(call=call, content=said, ok=True)

    async def _called(self, call: ToolCall) -> Content:
        tool = self.by_name.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, list(self.by_name))
            raise ToolError(f"there is no tool '{call.name}'.{hint} Tools: {', '.join(self.by_name)}.")
        complaint = _complaint(tool, call.arguments)
        if complaint:
            raise ToolError(f"wrong arguments of '{tool.name}': {cut(complaint, _LONGEST_COMPLAINT)}")
        try:
            result = tool.call(call.arguments)
            if not inspect.isawaitable(result):
                return result
            async with asyncio.timeout(self.call_time_limit_s):
                return await result
        except (ToolError, InfraError):
            raise
        except TimeoutError as error:
            raise InfraError(f"tool '{tool.name}' took longer than {self.call_time_limit_s:g} s") from error
        except Exception as error:  # the boundary to tools: their exceptions are infrastructure failures
            what = f"{type(error).__name__}: {error} ({raised_at(error)})"
            raise InfraError(f"tool '{tool.name}' failed: {what}") from error


def _complaint(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments; empty if they are valid."""
    known = tool.parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            return f"there is no '{name[:64]}'; it has {', '.join(known) or 'none'}."
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            return f"'{name}' is missing."
    if all(isinstance(v, str) and known[n] in _ANY_TEXT for n, v in arguments.items()):
        return ""
    return _schema_complaint(tool.parameters, arguments)


_ANY_TEXT = ({}, {"type": "string"})


def _schema_complaint(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    import jsonschema  # slow to import, and needed by few calls

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(dict(arguments)))
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path))
    return f"'{place}': {error.message}" if place else error.message


def cut(text: str, most: int) -> str:
    """Truncate a text to about `most` characters: a note replaces the middle of a longer text."""
    if len(text) <= most:
        return text
    head, tail = (most + 1) // 2, most // 2
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[len(text) - tail :]}"
