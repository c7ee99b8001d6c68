"""A program's output on a user's terminal: colors and lines only, no other control sequences."""

from __future__ import annotations

import codecs
import re

from roll_sandbox.sanitize import escape_control_chars

__all__ = ["TerminalFilter"]

_COLOR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_INCOMPLETE = re.compile(r"\x1b(\[[0-9;:]{0,64})?$")
_KEPT = re.compile(r"[\r\b]")


class TerminalFilter:
    """One stream. Sequences that set a title, fill the clipboard or query the terminal are shown as text instead."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._has_color = False

    def feed(self, data: bytes, *, end: bool = False) -> str:
        """Return the part that can be shown now; at the end also the rest, with colors reset."""
        text = self._rest + self._decoder.decode(data, final=end)
        begun = None if end else _INCOMPLETE.search(text)
        text, self._rest = (text, "") if begun is None else (text[: begun.start()], text[begun.start() :])
        said, done = [], 0
        for colour in _COLOR.finditer(text):
            said += [_escape_except_kept(text[done : colour.start()]), colour[0]]
            done, self._has_color = colour.end(), True
        said.append(_escape_except_kept(text[done:]))
        return "".join(said) + ("\x1b[0m" if end and self._has_color else "")


def _escape_except_kept(text: str) -> str:
    parts, kept = _KEPT.split(text), _KEPT.findall(text)
    return escape_control_chars(parts[0]) + "".join(
        mark + escape_control_chars(part) for mark, part in zip(kept, parts[1:], strict=True)
    )
