"""Escape text of models and environments, which could otherwise control a terminal."""

from __future__ import annotations

__all__ = ["escape_controls", "shorten"]


def escape_controls(text: str) -> str:
    """Escape control characters and lone surrogates in untrusted text, for a page, a file or a terminal.

    Lone surrogates cannot be encoded. Control characters are invisible, and may move the cursor of a terminal, set its
    title, or change the direction of writing.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def shorten(text: str, num_characters: int) -> str:
    """Return the first `num_characters` of the text, escaped, with a note on the number of omitted characters."""
    left = len(text) - num_characters
    return escape_controls(text[:num_characters]) + (f" … and {left} characters" if left > 0 else "")
