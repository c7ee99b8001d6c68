"""Strict parsing of a row's columns; errors name the location of the invalid value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import DataError, shorten
from roll.registry import did_you_mean

__all__ = ["ROLES", "ArrowRow", "BadRow", "Row", "as_list", "check_unicode", "is_null", "read_column"]

Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


class ArrowRow(dict[str, Any]):
    """A row of an Arrow table.

    An Arrow struct has the fields of all rows; a field that a row does not have is null in this row.
    """


class BadRow(DataError):
    """A row that cannot be used.

    Args:
        reason: A short reason, which is the same for all rows with the same problem.
        message: The problem, its location, and the remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_column(row: Row, name: str, location: str, option: str) -> Any:
    """Return a row's value in a column.

    Args:
        row: The row.
        name: The name of the column.
        location: The row's location, for messages.
        option: The configuration key with the column's name, for messages.

    Raises:
        BadRow: The row has no such column.
    """
    if name not in row:
        columns = ", ".join(shorten(column) for column in list(row)[:20]) or "none"
        raise BadRow(
            "missing column",
            f"{location}: column '{name}' does not exist.{did_you_mean(name, [c for c in row if isinstance(c, str)])} "
            f"Available columns: {columns}. Set `{option}` to the correct column.",
        )
    return row[name]


def is_null(value: Any) -> bool:
    """Return whether a cell is null, or a data frame's value for null (NaN, NA, NaT)."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


def as_list(value: Any) -> Any:
    """Convert an array, or a column of a data frame, to a list; return any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else value


def check_unicode(value: str, label: str, location: str) -> str:
    """Check that a string is valid Unicode, and return it.

    JSON allows unpaired surrogates, but tokenizers do not.

    Args:
        value: A cell or a part of a cell.
        label: The name of the value, for messages: "column 'text'".
        location: File and line.

    Raises:
        BadRow: The string is not valid Unicode.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "invalid Unicode",
            f"{location}: {label} is not valid Unicode text at character {error.start}: {shorten(value)}.",
        ) from None
    return value
