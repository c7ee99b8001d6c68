"""Arguments of tools' calls in the two forms that chat templates read: as an object, and as its JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from roll.types import Message

__all__ = ["shows_arguments_as_python", "with_json_arguments"]


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls as JSON text."""
    return [
        cast(Message, {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]})
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def shows_arguments_as_python(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendering has a call's arguments as Python writes an object, which no model was trained on."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call.get("function", {}).get("arguments")
            if arguments and not isinstance(arguments, str):
                spelled = str(arguments)
                if spelled in text and spelled != json.dumps(arguments, ensure_ascii=False):
                    return True
    return False
