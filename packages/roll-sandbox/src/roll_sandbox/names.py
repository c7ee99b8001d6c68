"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggest_nearest"]


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` with the closest known name, or an empty string if no name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f" Did you mean '{close[0]}'?" if close else ""
