"""Parses tool calls from a model's text, in the model's format, and renders tools into the model's input.

A model's text is untrusted: `roll.envs.tools.calls` parses it in linear time. A malformed call is returned as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from roll.data.reasoning import HARMONY_FORMAT, extract_answer
from roll.envs.tools.calls import TOOL_CALL_FORMATS
from roll.envs.tools.calls.gemma import END as GEMMA_END
from roll.envs.tools.calls.gemma import MARK as GEMMA_CALL
from roll.envs.tools.calls.glm import ARGUMENT_TAG
from roll.envs.tools.calls.harmony import CHANNEL
from roll.types import Message, join_content

__all__ = ["ToolCall", "ToolFormat", "detect_tool_format", "parse_tool_calls", "render_tools_as_text"]

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "harmony", "glm", "gemma4", "plain", "none"]
_TOOL_FORMAT_NAMES = {"plain": "hermes", "llama3": "llama"}
"""Maps tool formats to their names in `roll.envs.tools`, where these differ."""
_CALL_START, _CALL_END = "<tool_call>", "</tool_call>"
_MISTRAL_CALL_TOKEN = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_ID_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One tool call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = field(default_factory=lambda: "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9)))
    """Nine letters and digits: some chat templates accept no other IDs."""

    @property
    def arguments_json(self) -> str:
        """The arguments as a JSON string, as in the vendors' APIs."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _ToolDescription:
    """An agent's tool as a `Tool`, used only to parse calls; the agent runs its tools itself."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def call(self, arguments: Mapping[str, Any], /) -> str:
        """Raise an error: the agent calls its tools itself."""
        raise NotImplementedError("an agent calls its tools itself")


def detect_tool_format(template: str) -> ToolFormat:
    """Detect the format of tool calls in a chat template; return `plain` if the template does not support tools."""
    if "tools" not in template:
        return "plain"
    if _MISTRAL_CALL_TOKEN in template:
        return "mistral"
    if CHANNEL in template:
        return "harmony"
    if GEMMA_CALL in template:
        return "gemma4"
    if _CALL_START in template and ARGUMENT_TAG in template:
        return "glm"
    if _CALL_START in template:
        return "hermes"
    return "llama3" if '"parameters"' in template else "hermes"


def parse_tool_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a model's text into tool calls and the text outside of them.

    If any call is malformed, the whole text and no calls are returned.

    Args:
        text: The model's text with special tokens, but without the end token.
        tool_format: See `detect_tool_format`.
        tools: The offered tools, in the format of chat templates.
    """
    if tool_format == "none":
        return text, ()
    found = TOOL_CALL_FORMATS[_TOOL_FORMAT_NAMES.get(tool_format, tool_format)].parse(
        text, {tool.name: tool for tool in map(_parse_tool, tools)}
    )
    if found.problems or not found.calls or not all(_is_json(call.arguments) for call in found.calls):
        return text, ()
    calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in found.calls)
    return _extract_text_outside_calls(text, tool_format).strip(), calls


def _parse_tool(tool: Mapping[str, Any]) -> _ToolDescription:
    offered = _ToolDescription(**tool["function"])
    sound = isinstance(offered.parameters.get("properties", {}), dict)  # an agent may send any value for it
    return offered if sound else replace(offered, parameters={})


def _extract_text_outside_calls(text: str, tool_format: ToolFormat) -> str:
    if tool_format == "llama3":
        return text.partition(_PYTHON_TAG)[0] if _PYTHON_TAG in text else ""
    if tool_format == "mistral":
        return text.partition(_MISTRAL_CALL_TOKEN)[0] if _MISTRAL_CALL_TOKEN in text else ""
    if tool_format == "harmony":
        return extract_answer(text, HARMONY_FORMAT) or ""
    if tool_format == "gemma4":
        head, *parts = text.split(GEMMA_CALL)
        return "".join([head, *(part.partition(GEMMA_END)[2] for part in parts)])
    head, *parts = text.split(_CALL_START)
    return "".join([head, *(part.partition(_CALL_END)[2] for part in parts)])


def _is_json(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments can be written as JSON: numbers are finite, and strings are valid Unicode."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def render_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Write tools, tool calls and tool results into the messages as text, for chat templates without tool support."""
    said: list[Message] = []
    answers = False  # whether the last message has results of tools
    for message in messages:
        role, content = message.role, message.content
        if role == "tool":
            role, content = "user", join_content(["<tool_response>\n", content, "\n</tool_response>"], separator="")
            if said and said[-1].role == "user" and answers:
                said[-1] = Message(role="user", content=join_content([said[-1].content, content], separator="\n"))
                continue
        elif message.tool_calls:
            written = (
                f"{_CALL_START}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CALL_END}"
                for call in message.tool_calls
            )
            content = "\n".join([*([message.text] if content else []), *written])
        answers = message.role == "tool"
        said.append(Message(role=role, content=content))
    if tools:
        first = said[:1] if said and said[0].role == "system" else []
        content = join_content([*(message.content for message in first), _describe_tools(tools)])
        said[: len(first)] = [Message(role="system", content=content)]
    return said


def _describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, described by JSON schemas:\n<tools>\n{listed}\n</tools>\nTo call one, write "
        f'{_CALL_START}{{"name": its name, "arguments": {{its arguments}}}}{_CALL_END}, once for each call.'
    )
