"""Makes text of models and environments harmless: raw, it could control a terminal."""

from __future__ import annotations

__all__ = ["printable", "shorten"]


def printable(text: str) -> str:
    """Make untrusted text readable in a page, a file and a terminal.

    Lone surrogates cannot be encoded, and control characters are invisible: they move a terminal's cursor, set its
    title, or change the direction of writing.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def shorten(text: str, num_characters: int) -> str:
    """Return the first characters as `printable` text, with the number of omitted characters."""
    left = len(text) - num_characters
    return printable(text[:num_characters]) + (f" … and {left} characters" if left > 0 else "")
