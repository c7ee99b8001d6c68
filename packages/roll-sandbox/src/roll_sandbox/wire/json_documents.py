"""Parses untrusted JSON with bounded time and memory.

Python's parser creates an object for every value, about 30 bytes per byte of text, and meanwhile the garbage collector
scans all objects repeatedly. Deeply nested values can be parsed, but code that walks them exceeds the recursion limit.
So the number of values and their depth are checked before a document is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from roll_sandbox.errors import SandboxRequestError

__all__ = ["check_json_bounds", "parse_json"]

_MAX_VALUES = 2**19
"""Maximum number of values, and also of strings, in one document; the length of strings is not bounded."""
_MAX_DEPTH = 64
# Possessive quantifiers (`*+`) never backtrack, so the time is linear even without a closing quote.
_STRING_PATTERN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET_PATTERN = re.compile(rb"[\[{\]}]")


def parse_json(data: bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse a JSON document in UTF-8.

    Args:
        data: the document.
        hook: function that converts each JSON object.

    Raises:
        SandboxRequestError: the document is not JSON, or has too many or too deeply nested values.
    """
    check_json_bounds(data)
    try:
        return json.loads(data.decode(), object_hook=hook)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SandboxRequestError):
            raise
        raise SandboxRequestError("a message is not valid JSON.") from None


def check_json_bounds(data: bytes) -> None:
    """Check that a JSON document has neither too many nor too deeply nested values, without parsing the document.

    Raises:
        SandboxRequestError: there are too many values, or they are nested too deeply.
    """
    opened = data.count(b"[") + data.count(b"{")
    if opened <= _MAX_DEPTH and opened + data.count(b",") <= _MAX_VALUES:
        return
    bare, texts = _STRING_PATTERN.subn(b"", data, _MAX_VALUES)
    opened = bare.count(b"[") + bare.count(b"{")
    if texts == _MAX_VALUES or opened + bare.count(b",") > _MAX_VALUES:
        raise SandboxRequestError(f"a message has more than {_MAX_VALUES:,} values: split the message.")
    depth = deepest = 0
    for bracket in _BRACKET_PATTERN.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise SandboxRequestError(f"the values of a message are nested more than {_MAX_DEPTH} levels deep.")
