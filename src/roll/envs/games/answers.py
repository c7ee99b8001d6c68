"""Reading a move from what a model wrote: linear in its length, and never an exception."""

from __future__ import annotations

__all__ = ["boxed", "numbers"]

_LONGEST = 80
"""Characters of an answer. No game has a longer move, and observations repeat what was answered."""

_BOX = "\\boxed{"


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, stripped; None if the box is missing, not closed, empty, too long,
    or
    holds unprintable characters.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    inside = text[start : start + _LONGEST + 1]
    depth = 0
    for position, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            answer = inside[:position].strip()
            return answer if answer and answer.isprintable() else None
    return None


def numbers(answer: str, count: int | None = None) -> list[int] | None:
    """Parse nonnegative whole numbers, separated by spaces; return None for any other text, or if there are not
    `count`.
    """
    words = answer.split()
    if not words or (count is not None and len(words) != count):
        return None
    if not all(word.isascii() and word.isdigit() for word in words):
        return None
    return [int(word) for word in words]
