"""Parse a model's JSON: of bounded size and depth, and valid Unicode; a rejection is a sentence for the model."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["LONGEST_JSON", "MalformedJsonError", "read_json", "shown"]

LONGEST_JSON = 65_536
"""Most characters of one value."""
DEEPEST = 32
"""Most levels of nested values."""


class MalformedJsonError(ValueError):
    """Malformed JSON; the model reads the message."""


def _no_constant(name: str) -> Any:
    raise MalformedJsonError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)
"""Line breaks inside strings are accepted: models write them, and their meaning is clear."""


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the value that begins at `start`, after whitespace; return it and its end. The time is linear in the
    length.

    Raises:
        MalformedJsonError: There is no value, or it is too long or too deep.
    """
    piece = text[start : start + LONGEST_JSON]
    skipped = len(piece) - len(piece.lstrip())
    try:
        value, end = _DECODER.raw_decode(piece, skipped)
    except MalformedJsonError:
        raise
    except json.JSONDecodeError as error:
        longer = len(text) - start > LONGEST_JSON and error.pos >= LONGEST_JSON - 16
        what = f"it is longer than {LONGEST_JSON} characters" if longer else f"{error.msg} at character {error.pos}"
        raise MalformedJsonError(what) from None
    except RecursionError:
        raise MalformedJsonError(f"it is deeper than {DEEPEST} levels") from None
    except ValueError:  # more digits than Python converts to a number
        raise MalformedJsonError("a number has too many digits") from None
    _check(value)
    return value, start + end


def _check(value: Any) -> None:
    """Check that the depth is bounded and that all text can be encoded, which an unpaired surrogate cannot."""
    level = [value]
    for _ in range(DEEPEST):
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
                    raise MalformedJsonError("a string holds half of a surrogate pair") from None
        if not below:
            return
        level = below
    raise MalformedJsonError(f"it is deeper than {DEEPEST} levels")


def shown(value: Any) -> str:
    """Return JSON in the form shown to models: one line, with Unicode not escaped."""
    return json.dumps(value, ensure_ascii=False)
