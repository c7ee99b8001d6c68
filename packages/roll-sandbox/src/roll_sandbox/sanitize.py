"""Escapes control characters of untrusted text, which could otherwise control a terminal."""

from __future__ import annotations

__all__ = ["escape_control_chars"]


def escape_control_chars(text: str) -> str:
    """Return `text` with control characters and lone surrogates escaped; newlines and tabs are kept.

    Lone surrogates cannot be encoded, and control characters can move a terminal's cursor, set its title, or change the
    direction of writing.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
