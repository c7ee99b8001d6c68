"""Filters a program's output for a user's terminal: keeps colors and line breaks, and escapes other sequences."""

from __future__ import annotations

import codecs
import re

from roll_sandbox.sanitize import escape_control_chars

__all__ = ["TerminalFilter"]

_COLOR_SEQUENCE_PATTERN = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_INCOMPLETE_SEQUENCE_PATTERN = re.compile(r"\x1b(\[[0-9;:]{0,64})?$")
_ALLOWED_CONTROLS_PATTERN = re.compile(r"[\r\b]")


class TerminalFilter:
    """Filters an output stream. Sequences that set a title, write the clipboard or query the terminal are shown as
    text.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._has_color = False

    def feed(self, data: bytes, *, end: bool = False) -> str:
        """Return the filtered text that can be shown now. If `end`, return all remaining text and reset colors."""
        text = self._rest + self._decoder.decode(data, final=end)
        begun = None if end else _INCOMPLETE_SEQUENCE_PATTERN.search(text)
        # A sequence may be split over two chunks; its beginning is kept until the rest arrives.
        text, self._rest = (text, "") if begun is None else (text[: begun.start()], text[begun.start() :])
        pieces, done = [], 0
        for color in _COLOR_SEQUENCE_PATTERN.finditer(text):
            pieces += [_escape_controls(text[done : color.start()]), color[0]]
            done, self._has_color = color.end(), True
        pieces.append(_escape_controls(text[done:]))
        return "".join(pieces) + ("\x1b[0m" if end and self._has_color else "")


def _escape_controls(text: str) -> str:
    parts, kept = _ALLOWED_CONTROLS_PATTERN.split(text), _ALLOWED_CONTROLS_PATTERN.findall(text)
    return escape_control_chars(parts[0]) + "".join(
        mark + escape_control_chars(part) for mark, part in zip(kept, parts[1:], strict=True)
    )
