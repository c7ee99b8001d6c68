"""Parses untrusted JSON in time and memory bounded by its length.

Python's parser creates an object for every value, about 30 bytes per byte of text, and the garbage collector scans all
objects repeatedly meanwhile. Deeply nested values parse, but exceed the recursion limit of code that walks them. So
values and depth are counted before a document is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from roll_sandbox.errors import SandboxRequestError

__all__ = ["check_values", "parse_json"]

_MAX_VALUES = 2**19
"""Most values, and most strings, of one document; the length of strings is not bounded."""
_MAX_DEPTH = 64
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[{\]}]")


def parse_json(data: bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse a JSON document in UTF-8.

    Args:
        data: the document.
        hook: converts each object.

    Raises:
        SandboxRequestError: it is not JSON, or has too many or too deeply nested values.
    """
    check_values(data)
    try:
        return json.loads(data.decode(), object_hook=hook)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SandboxRequestError):
            raise
        raise SandboxRequestError("a message is not valid JSON.") from None


def check_values(data: bytes) -> None:
    """Count the values of a document in UTF-8 before it is parsed.

    Raises:
        SandboxRequestError: the values are too many or too deeply nested.
    """
    opened = data.count(b"[") + data.count(b"{")
    if opened <= _MAX_DEPTH and opened + data.count(b",") <= _MAX_VALUES:
        return
    bare, texts = _TEXT.subn(b"", data, _MAX_VALUES)
    opened = bare.count(b"[") + bare.count(b"{")
    if texts == _MAX_VALUES or opened + bare.count(b",") > _MAX_VALUES:
        raise SandboxRequestError(f"a message has more than {_MAX_VALUES:,} values: split the message.")
    depth = deepest = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise SandboxRequestError(f"the values of a message are nested more than {_MAX_DEPTH} levels deep.")
