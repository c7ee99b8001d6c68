"""Parse tool calls in a model's text, in the model's own format, and write tools into the model's input.

A model's text is untrusted: `roll.envs.tools.calls` parses it, in linear time. A malformed call stays text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from roll.data.reasoning import CHANNELS, answer_of
from roll.envs.tools.calls import FORMS
from roll.envs.tools.calls.gemma import END as GEMMA_END
from roll.envs.tools.calls.gemma import MARK as GEMMA_CALL
from roll.envs.tools.calls.glm import ARGUMENT
from roll.envs.tools.calls.harmony import CHANNEL
from roll.types import Message

__all__ = ["ToolCall", "ToolFormat", "format_of", "plainly", "read_calls"]

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral", "harmony", "glm", "gemma4", "plain", "none"]
_FORMS = {"plain": "hermes", "llama3": "llama"}
"""Formats that have another name in `roll.envs.tools`."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
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
        """The arguments as JSON text, as in the vendors' interfaces."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Offered:
    """A tool of the agent, which is only described here, never called."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `roll.envs.tools.Tool`."""
        raise NotImplementedError("an agent calls its tools itself")


def format_of(template: str) -> ToolFormat:
    """Return the tool format of a chat template; `plain` if it takes no tools."""
    if "tools" not in template:
        return "plain"
    if _MISTRAL in template:
        return "mistral"
    if CHANNEL in template:
        return "harmony"
    if GEMMA_CALL in template:
        return "gemma4"
    if _OPEN in template and ARGUMENT in template:
        return "glm"
    if _OPEN in template:
        return "hermes"
    return "llama3" if '"parameters"' in template else "hermes"


def read_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text outside of calls, and the calls; if one of them is malformed, all of it stays text.

    Args:
        text: The model's text, with special tokens, without the end token.
        tool_format: See `format_of`.
        tools: The offered tools, in the form of chat templates.
    """
    if tool_format == "none":
        return text, ()
    found = FORMS[_FORMS.get(tool_format, tool_format)].parse(text, {tool.name: tool for tool in map(_offered, tools)})
    if found.problems or not found.calls or not all(_is_json(call.arguments) for call in found.calls):
        return text, ()
    calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in found.calls)
    return _text_outside_calls(text, tool_format).strip(), calls


def _offered(tool: Mapping[str, Any]) -> _Offered:
    offered = _Offered(**tool["function"])
    sound = isinstance(offered.parameters.get("properties", {}), dict)  # an agent may send any value for it
    return offered if sound else replace(offered, parameters={})


def _text_outside_calls(text: str, tool_format: ToolFormat) -> str:
    if tool_format == "llama3":
        return text.partition(_PYTHON_TAG)[0] if _PYTHON_TAG in text else ""
    if tool_format == "mistral":
        return text.partition(_MISTRAL)[0] if _MISTRAL in text else ""
    if tool_format == "harmony":
        return answer_of(text, CHANNELS) or ""
    if tool_format == "gemma4":
        head, *parts = text.split(GEMMA_CALL)
        return "".join([head, *(part.partition(GEMMA_END)[2] for part in parts)])
    head, *parts = text.split(_OPEN)
    return "".join([head, *(part.partition(_CLOSE)[2] for part in parts)])


def _is_json(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments can be written as JSON: all numbers are finite, and all texts valid Unicode."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def plainly(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation for a template without tools, with tools, tool calls and results written as text."""
    said: list[Message] = []
    for message in messages:
        role, content = message.role, message.text
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if said and said[-1].role == "user" and said[-1].text.endswith("</tool_response>"):
                said[-1] = Message(role="user", content=f"{said[-1].text}\n{content}")
                continue
        elif message.tool_calls:
            written = (
                f"{_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CLOSE}" for call in message.tool_calls
            )
            content = "\n".join([*([content] if content else []), *written])
        said.append(Message(role=role, content=content))
    if tools:
        first = said[0].text + "\n\n" if said and said[0].role == "system" else ""
        said[: 1 if first else 0] = [Message(role="system", content=first + _offer(tools))]
    return said


def _offer(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, described by JSON schemas:\n<tools>\n{listed}\n</tools>\nTo call one, write "
        f'{_OPEN}{{"name": its name, "arguments": {{its arguments}}}}{_CLOSE}, several times for several calls.'
    )
