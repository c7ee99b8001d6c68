"""Strict reading of one column of a row: an error names the place of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import DataError, short
from roll.registry import did_you_mean

__all__ = ["ROLES", "ArrowRow", "BadRow", "Row", "as_list", "column", "is_null", "unicode_text"]

Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


class ArrowRow(dict[str, Any]):
    """A row of an Arrow table, in which the fields of other rows' objects are null."""


class BadRow(DataError):
    """A row that cannot be used.

    Args:
        reason: A few words, the same for all rows with the same problem.
        message: The problem, its place, and the remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def column(row: Row, name: str, where: str, option: str) -> Any:
    """Return the row's value in the column that `option` names.

    Raises:
        BadRow: The row has no such column.
    """
    if name not in row:
        columns = ", ".join(short(column) for column in list(row)[:20]) or "none"
        raise BadRow(
            "missing column",
            f"{where}: there is no column "
            f"'{name}'.{did_you_mean(name, [c for c in row if isinstance(c, str)])} It has: "
            f"{columns}. "
            f"Set `{option}` to the right one.",
        )
    return row[name]


def is_null(value: Any) -> bool:
    """Return whether a cell is null, or the value that data frames write for null (NaN, NA, NaT)."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


def as_list(value: Any) -> Any:
    """Return an array, or a column of a data frame, as a list; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else value


def unicode_text(value: str, what: str, where: str) -> str:
    """Return the text, after checking that it is valid Unicode: unpaired surrogates, which JSON allows, have no tokens.

    Args:
        value: A cell, or a part of one.
        what: The name of the value, for messages: "column 'text'".
        where: File and line.

    Raises:
        BadRow: The text is not valid Unicode.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "invalid Unicode",
            f"{where}: {what} is not valid Unicode text at character {error.start}: {short(value)}.",
        ) from None
    return value
