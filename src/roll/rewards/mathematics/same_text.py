r"""Compare an answer with the reference as text, without interpreting it: `12:30 PM`, `Alice is taller`, `\pm 2`.

Layout is ignored (`$…$`, `\text{…}`, bold, spaces, a full stop at the end, case), and so is the notation of a colon
between numbers (`3 : 2`) and of a.m. and p.m. (`12:30 p.m.`). A text without any letter, digit or command is treated as
empty.
"""

from __future__ import annotations

import re

__all__ = ["is_text_stated", "normalize_text", "unwrap_text"]

_TEXT_COMMAND_PATTERN = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*+\{([^{}]*)\}")
_LAYOUT_PATTERN = re.compile(r"(?<!\\)\\[()\[\],;:! ]|\\(?:displaystyle|quad|qquad|left|right)(?![a-zA-Z])|[$~]")
_WHITESPACE_PATTERN = re.compile(r"\s++")
_COLON_PATTERN = re.compile(r"(?<=\d) ?(?:\{:\}|:) ?(?=\d)")
_AM_OR_PM_PATTERN = re.compile(r"(?<=\d) ?([ap])(?:m|\. ?m\.?)(?!\w)")
_INTRODUCTION_PATTERN = re.compile(
    r"^(?:[^\n]{0,120}?\banswers?\b|\s*+(?:so|thus|therefore|hence|result|solution|then)\b)[\s*_:=,]*+"
    r"(?:(?:is|are|will be|would be)\b[\s*_:=,]*+)?+",
    re.IGNORECASE,
)
_LEADING_IT_IS_PATTERN = re.compile(r"^\s*+(?:it|this|that)(?:['’]s|\s++is)\b[\s*_:=,]*+", re.IGNORECASE)
MAX_LINE_LENGTH = 2_000
"""Maximum number of characters of a line that may introduce an answer."""


def unwrap_text(text: str) -> str:
    r"""Return the text without `\text{…}` and similar commands around its words."""
    return _TEXT_COMMAND_PATTERN.sub(r"\1", text)


def normalize_text(text: str) -> str:
    """Return the text without layout, with single spaces and in lower case; empty if nothing is left."""
    plain = _LAYOUT_PATTERN.sub(" ", unwrap_text(text).replace("\\$", "$"))
    plain = _WHITESPACE_PATTERN.sub(" ", plain).strip("*_` ").rstrip(".").strip("*_` ").casefold()
    plain = _AM_OR_PM_PATTERN.sub(r" \1m", _COLON_PATTERN.sub(":", plain))
    return plain if re.search(r"\w|\\[a-z]|[^\x00-\x7f]", plain) else ""


def is_text_stated(text: str, reference: str) -> bool:
    """Return whether a text, its last line, or the end of its last line ("the answer is …") equals the reference."""
    wanted = normalize_text(reference)
    if not wanted:
        return False
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    candidates = [text, line]
    if len(line) <= MAX_LINE_LENGTH:
        candidates.append(_INTRODUCTION_PATTERN.sub("", line, count=1))
        candidates.append(_LEADING_IT_IS_PATTERN.sub("", candidates[-1], count=1))
    return any(normalize_text(candidate) == wanted for candidate in candidates)
