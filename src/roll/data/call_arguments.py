"""Arguments of tool calls in the two forms that chat templates read: as an object, and as JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from roll.types import Message

__all__ = ["shows_arguments_as_python", "with_json_arguments"]

NUM_TRIED = 8
"""Number of calls that are searched for in a rendering, so that the time is not quadratic in their number."""


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls as JSON text."""
    return [
        replace(message, tool_calls=tuple(_with_text(call) for call in message.tool_calls))
        if message.tool_calls
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def shows_arguments_as_python(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendering writes a call's arguments as Python does, which no model was trained on.

    Only some of the calls are searched for: a template writes all of them alike.
    """
    return any(spelled in text for spelled in islice(_to_python(messages), NUM_TRIED))


def _to_python(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the arguments of calls as Python writes them, if that is not JSON."""
    for message in messages:
        for call in message.tool_calls:
            arguments = call.get("function", {}).get("arguments")
            if arguments and not isinstance(arguments, str):
                spelled = str(arguments)
                if spelled != json.dumps(arguments, ensure_ascii=False):
                    yield spelled
