"""Text of models and environments, made harmless: shown as it is, it could act on a terminal."""

from __future__ import annotations

__all__ = ["printable", "shortened"]


def printable(text: str) -> str:
    """Readable in a page, a file and a terminal, whatever a model or an environment wrote.

    Lone surrogates cannot be written, and control characters not be seen: they move a terminal's cursor, set its title,
    or turn the direction of writing.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def shortened(text: str, num_characters: int) -> str:
    """`printable` text of its first characters; says how many more there are."""
    left = len(text) - num_characters
    return printable(text[:num_characters]) + (f" … and {left} characters" if left > 0 else "")
