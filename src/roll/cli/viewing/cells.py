"""The cells of each rollout in a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from roll.cli.viewing.index import Row
from roll.errors import UserError
from roll.tracking.visible import printable

__all__ = ["LISTED", "SHOWN", "cell", "list_cells"]

SHOWN = ("step", "kind", "id", "reward", "correct", "advantage", "tokens", "domain", "finish", "verdict")
"""Columns of a list that are in the index."""
LISTED = (*SHOWN, "prompt", "answer")
"""All columns of a list."""
CELL_CHARACTERS = 40
"""Maximum length of a word in a cell."""


def cell(value: Any) -> Text:
    """Format a value for a list, on one line and never as markup."""
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    line = " ".join(printable(str(value)[: CELL_CHARACTERS + 1]).split())
    return Text(line if len(line) <= CELL_CHARACTERS else f"{line[: CELL_CHARACTERS - 1]}…")


def list_cells(rows: Sequence[Row]) -> list[tuple[Text, ...]]:
    """Return the cells of each row, in the order of `LISTED`; texts of a file that can no longer be read are empty."""
    by_file: dict[Any, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_file[row.file].append(place)
    texts: list[tuple[str, str]] = [("", "")] * len(rows)
    for file, places in by_file.items():
        try:
            found = file.beginnings([rows[place] for place in places], CELL_CHARACTERS + 1)
        except UserError:
            continue
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return [
        (*(cell(row.values[name]) for name in SHOWN), cell(prompt), cell(answer))
        for row, (prompt, answer) in zip(rows, texts, strict=True)
    ]
