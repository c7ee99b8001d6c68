"""Arguments of tool calls in the two forms that chat templates read: as an object, and as JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from roll.types import Message

__all__ = ["has_python_style_arguments", "with_json_arguments"]

NUM_TRIED = 8
"""Maximum number of calls that are searched for in the rendered text, so that the time is not quadratic."""


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls as JSON text."""
    return [
        replace(message, tool_calls=tuple(_with_text_arguments(call) for call in message.tool_calls))
        if message.tool_calls
        else message
        for message in messages
    ]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def has_python_style_arguments(messages: Sequence[Message], text: str) -> bool:
    """Return whether the template wrote the arguments of a call in Python syntax instead of JSON into the text."""
    # A template that expects JSON text and gets an object prints Python's `repr`, with single quotes, without an error.
    # Only some of the calls are searched for: a template writes all of them in the same way.
    return any(python in text for python in islice(_format_as_python(messages), NUM_TRIED))


def _format_as_python(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the arguments of each tool call in Python syntax; skip calls for which it is the same as JSON."""
    for message in messages:
        for call in message.tool_calls:
            arguments = call.get("function", {}).get("arguments")
            if arguments and not isinstance(arguments, str):
                python = str(arguments)
                if python != json.dumps(arguments, ensure_ascii=False):
                    yield python
