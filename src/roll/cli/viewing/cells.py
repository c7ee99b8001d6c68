"""Format the cells of a list of rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from roll.cli.viewing.index import Row
from roll.errors import UserError
from roll.tracking.escape import escape_controls

__all__ = ["LISTED", "SHOWN", "format_cell", "format_cells"]

SHOWN = ("step", "kind", "id", "reward", "correct", "advantage", "tokens", "domain", "finish", "verdict")
"""Columns of a list that are in the index."""
LISTED = (*SHOWN, "prompt", "answer")
"""All columns of a list."""
CELL_CHARACTERS = 40
"""Maximum number of characters in a cell."""


def format_cell(value: Any) -> Text:
    """Format a value as a table cell: on one short line, never interpreted as markup."""
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    line = " ".join(escape_controls(str(value)[: CELL_CHARACTERS + 1]).split())
    return Text(line if len(line) <= CELL_CHARACTERS else f"{line[: CELL_CHARACTERS - 1]}…")


def format_cells(rows: Sequence[Row]) -> list[tuple[Text, ...]]:
    """Return the cells of each row, one per column in `LISTED`; prompt and answer are empty if they cannot be read."""
    by_file: dict[Any, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_file[row.file].append(place)
    texts: list[tuple[str, str]] = [("", "")] * len(rows)
    for file, places in by_file.items():
        try:
            found = file.read_beginnings([rows[place] for place in places], CELL_CHARACTERS + 1)
        except UserError:
            continue
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return [
        (*(format_cell(row.values[name]) for name in SHOWN), format_cell(prompt), format_cell(answer))
        for row, (prompt, answer) in zip(rows, texts, strict=True)
    ]
