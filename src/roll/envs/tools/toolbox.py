"""Calls tools for a model. The model's mistakes are returned to it as error messages; any other failure raises an
`InfraError`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.envs.sanitize import replace_surrogates
from roll.envs.tools.base import Tool, ToolCall, ToolError, ToolResult
from roll.errors import ConfigError, InfraError, find_raise_location
from roll.registry import did_you_mean
from roll.types import Content, map_text

__all__ = ["Toolbox", "truncate"]

_MAX_ERROR_LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """Calls tools by name.

    Args:
        tools: Tools with distinct names.
        call_time_limit_s: Timeout of one call. Exceeding it is an infrastructure failure, since tools themselves bound
            the work that a model's arguments can cause.
        max_result_chars: Maximum length of a result; longer results are truncated in the middle.
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
            raise ConfigError(
                f"tool names must be unique, got duplicates: {', '.join(double)}. Rename all but one of them."
            )
        object.__setattr__(self, "by_name", by_name)

    async def execute(self, call: ToolCall) -> ToolResult:
        """Return the result of a call, or an error message for the model if the call is invalid.

        Raises:
            InfraError: The tool failed or timed out, which is not the model's mistake.
        """
        try:
            content = await self._call(call)
        except ToolError as error:
            return ToolResult(
                call=call, content=replace_surrogates(truncate(str(error), self.max_result_chars)), ok=False
            )
        truncated = map_text(content, lambda text: replace_surrogates(truncate(text, self.max_result_chars)))
        return ToolResult(call=call, content=truncated, ok=True)

    async def _call(self, call: ToolCall) -> Content:
        tool = self.by_name.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, list(self.by_name))
            raise ToolError(f"there is no tool '{call.name}'.{hint} Tools: {', '.join(self.by_name)}.")
        problem = _find_argument_error(tool, call.arguments)
        if problem:
            raise ToolError(f"wrong arguments for '{tool.name}': {truncate(problem, _MAX_ERROR_LENGTH)}")
        try:
            result = tool.call(call.arguments)
            if not inspect.isawaitable(result):
                return result
            async with asyncio.timeout(self.call_time_limit_s):
                return await result
        except (ToolError, InfraError):
            raise
        except TimeoutError as error:
            raise InfraError(f"tool '{tool.name}' exceeded the time limit of {self.call_time_limit_s:g} s") from error
        except Exception as error:  # the boundary to tools: their exceptions are infrastructure failures
            what = f"{type(error).__name__}: {error} ({find_raise_location(error)})"
            raise InfraError(f"tool '{tool.name}' failed: {what}") from error


def _find_argument_error(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Return a description of the error in the arguments; empty if they are valid."""
    known = tool.parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            return f"there is no '{name[:64]}'; it has {', '.join(known) or 'none'}."
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            return f"'{name}' is missing."
    if all(isinstance(v, str) and known[n] in _STRING_SCHEMAS for n, v in arguments.items()):
        return ""
    return _find_schema_error(tool.parameters, arguments)


_STRING_SCHEMAS = ({}, {"type": "string"})


def _find_schema_error(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    import jsonschema  # slow to import, and needed by few calls

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(dict(arguments)))
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path))
    return f"'{place}': {error.message}" if place else error.message


def truncate(text: str, max_chars: int) -> str:
    """Truncate text to about `max_chars` characters: a note replaces the middle of longer text."""
    if len(text) <= max_chars:
        return text
    head, tail = (max_chars + 1) // 2, max_chars // 2
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[len(text) - tail :]}"
