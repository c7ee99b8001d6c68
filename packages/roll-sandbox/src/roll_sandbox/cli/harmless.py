"""A program's output on a user's terminal: colors and lines only, no other control sequences."""

from __future__ import annotations

import codecs
import re

from roll_sandbox.visible import printable

__all__ = ["Harmless"]

_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_BEGUN = re.compile(r"\x1b(\[[0-9;:]{0,64})?$")
_KEPT = re.compile(r"[\r\b]")


class Harmless:
    """One stream. Sequences that set a title, fill the clipboard or query the terminal are shown as text instead."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._coloured = False

    def feed(self, data: bytes, *, end: bool = False) -> str:
        """Return the part that can be shown now; at the end also the rest, with colors reset."""
        text = self._rest + self._decoder.decode(data, final=end)
        begun = None if end else _BEGUN.search(text)
        text, self._rest = (text, "") if begun is None else (text[: begun.start()], text[begun.start() :])
        said, done = [], 0
        for colour in _COLOUR.finditer(text):
            said += [_plain(text[done : colour.start()]), colour[0]]
            done, self._coloured = colour.end(), True
        said.append(_plain(text[done:]))
        return "".join(said) + ("\x1b[0m" if end and self._coloured else "")


def _plain(text: str) -> str:
    parts, kept = _KEPT.split(text), _KEPT.findall(text)
    return printable(parts[0]) + "".join(mark + printable(part) for mark, part in zip(kept, parts[1:], strict=True))
