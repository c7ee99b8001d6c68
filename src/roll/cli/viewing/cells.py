"""What a list of rollouts shows of each."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from roll.tracking.visible import printable

__all__ = ["SHOWN", "cell"]

SHOWN = ("step", "kind", "id", "reward", "correct", "advantage", "tokens", "domain", "finish", "verdict")
"""Columns of a list."""
CELL_CHARACTERS = 40
"""Of a word in it."""


def cell(value: Any) -> Text:
    """A value of a list, on one line; never read as markup."""
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    line = " ".join(printable(str(value)[: CELL_CHARACTERS + 1]).split())
    return Text(line if len(line) <= CELL_CHARACTERS else f"{line[: CELL_CHARACTERS - 1]}…")
