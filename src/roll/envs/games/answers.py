"""Parses a move from a model's text in linear time, without raising exceptions."""

from __future__ import annotations

__all__ = ["extract_box", "parse_numbers"]

_MAX_LENGTH = 80
"""Maximum length of an answer, in characters. No game has a longer move, and observations repeat the answer."""

_BOX = "\\boxed{"


def extract_box(text: str) -> str | None:
    r"""Return the stripped content of the last `\boxed{...}`, or None if there is no valid box.

    A box is invalid if it is not closed, is empty or too long, or contains unprintable characters.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    inside = text[start : start + _MAX_LENGTH + 1]
    depth = 0
    for position, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            answer = inside[:position].strip()
            return answer if answer and answer.isprintable() else None
    return None


def parse_numbers(answer: str, count: int | None = None) -> list[int] | None:
    """Parse nonnegative integers, separated by spaces.

    Return None for any other text, or if `count` is given and there are more or fewer integers.
    """
    words = answer.split()
    if not words or (count is not None and len(words) != count):
        return None
    if not all(word.isascii() and word.isdigit() for word in words):
        return None
    return [int(word) for word in words]
