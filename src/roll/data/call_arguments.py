"""The arguments of tool calls in the two formats that chat templates read: an object, or JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from roll.types import Message

__all__ = ["has_python_style_arguments", "with_json_arguments"]

MAX_SEARCHED_CALLS = 8
"""Maximum number of calls that are searched in the rendered text, so that the time is not quadratic."""


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """Convert the arguments of tool calls in messages to JSON text."""
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
    """Return whether the rendered text has the arguments of a call in Python syntax instead of JSON."""
    # A template that expects JSON text and gets an object prints Python's `repr`, with single quotes, without an error.
    # Only some of the calls are searched for: a template writes all of them in the same way.
    return any(python in text for python in islice(_format_as_python(messages), MAX_SEARCHED_CALLS))


def _format_as_python(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the arguments of each tool call in Python syntax, if it differs from JSON."""
    for message in messages:
        for call in message.tool_calls:
            arguments = call.get("function", {}).get("arguments")
            if arguments and not isinstance(arguments, str):
                python = str(arguments)
                if python != json.dumps(arguments, ensure_ascii=False):
                    yield python
