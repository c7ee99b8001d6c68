"""Format the cells of a list of rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from roll.cli.view.index import Row
from roll.errors import UserError
from roll.tracking.escape import escape_controls

__all__ = ["INDEX_COLUMNS", "LIST_COLUMNS", "format_cell", "format_cells"]

INDEX_COLUMNS = ("step", "kind", "id", "reward", "correct", "advantage", "tokens", "domain", "finish", "verdict")
"""Columns of a list that are in the index."""
LIST_COLUMNS = (*INDEX_COLUMNS, "prompt", "answer")
"""All columns of a list."""
MAX_CELL_CHARACTERS = 40
"""Maximum number of characters in a cell."""


def format_cell(value: Any) -> Text:
    """Format a value as a table cell: on one short line, never interpreted as markup."""
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    line = " ".join(escape_controls(str(value)[: MAX_CELL_CHARACTERS + 1]).split())
    return Text(line if len(line) <= MAX_CELL_CHARACTERS else f"{line[: MAX_CELL_CHARACTERS - 1]}…")


def format_cells(rows: Sequence[Row]) -> list[tuple[Text, ...]]:
    """Return the cells of each row, one per column in `LIST_COLUMNS`; unreadable prompts and answers are empty."""
    by_file: dict[Any, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_file[row.file].append(place)
    texts: list[tuple[str, str]] = [("", "")] * len(rows)
    for file, places in by_file.items():
        try:
            found = file.read_excerpts([rows[place] for place in places], MAX_CELL_CHARACTERS + 1)
        except UserError:
            continue
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return [
        (*(format_cell(row.values[name]) for name in INDEX_COLUMNS), format_cell(prompt), format_cell(answer))
        for row, (prompt, answer) in zip(rows, texts, strict=True)
    ]
