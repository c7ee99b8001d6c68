"""Parse JSON that a model wrote, with bounded size and depth, and valid Unicode only. Messages are for the model."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_JSON_LENGTH", "MalformedJsonError", "dump_json", "read_json"]

MAX_JSON_LENGTH = 65_536
"""Maximum length of one value, in characters."""
MAX_DEPTH = 32
"""Maximum nesting depth of values."""


class MalformedJsonError(ValueError):
    """Malformed JSON. The message is shown to the model."""


def _reject_constant(name: str) -> Any:
    raise MalformedJsonError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, strict=False)
"""Line breaks inside strings are accepted: models write them, and their meaning is clear."""


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the value at `start`, after whitespace; return the value and the position where it ends. Takes linear time.

    Raises:
        MalformedJsonError: There is no value, or the value is too long or nested too deeply.
    """
    piece = text[start : start + MAX_JSON_LENGTH]
    skipped = len(piece) - len(piece.lstrip())
    try:
        value, end = _DECODER.raw_decode(piece, skipped)
    except MalformedJsonError:
        raise
    except json.JSONDecodeError as error:
        longer = len(text) - start > MAX_JSON_LENGTH and error.pos >= MAX_JSON_LENGTH - 16
        what = f"it is longer than {MAX_JSON_LENGTH} characters" if longer else f"{error.msg} at character {error.pos}"
        raise MalformedJsonError(what) from None
    except RecursionError:
        raise MalformedJsonError(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # more digits than Python converts to a number
        raise MalformedJsonError("a number has too many digits") from None
    _check_value(value)
    return value, start + end


def _check_value(value: Any) -> None:
    """Check the nesting depth of a value and that all strings in it can be encoded (no unpaired surrogates).

    Raises:
        MalformedJsonError: The value is nested deeper than `MAX_DEPTH`, or a string cannot be encoded.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise MalformedJsonError("a string contains an unpaired surrogate") from None
        if not below:
            return
        level = below
    raise MalformedJsonError(f"the JSON is nested deeper than {MAX_DEPTH} levels")


def dump_json(value: Any) -> str:
    """Encode a value as JSON in the form shown to models: one line, without escaping Unicode."""
    return json.dumps(value, ensure_ascii=False)
