"""Strict reading of one column of a row: errors name the location of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import DataError, short
from roll.registry import did_you_mean

__all__ = ["ROLES", "ArrowRow", "BadRow", "Row", "as_list", "check_unicode", "is_null", "read_column"]

Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


class ArrowRow(dict[str, Any]):
    """A row of an Arrow table.

    An Arrow struct has the fields of all rows, so fields that only other rows have are null in this row.
    """


class BadRow(DataError):
    """A row that cannot be used.

    Args:
        reason: A few words, the same for all rows with the same problem.
        message: The problem, its location, and the remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_column(row: Row, name: str, where: str, option: str) -> Any:
    """Return the row's value in the column that `option` names.

    Raises:
        BadRow: The row has no such column.
    """
    if name not in row:
        columns = ", ".join(short(column) for column in list(row)[:20]) or "none"
        raise BadRow(
            "missing column",
            f"{where}: there is no column '{name}'.{did_you_mean(name, [c for c in row if isinstance(c, str)])} "
            f"The columns are: {columns}. Set `{option}` to the right column.",
        )
    return row[name]


def is_null(value: Any) -> bool:
    """Return whether a cell is null, or the value that data frames write for null (NaN, NA, NaT)."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


def as_list(value: Any) -> Any:
    """Convert an array, or a column of a data frame, to a list; return any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, str) else value


def check_unicode(value: str, what: str, where: str) -> str:
    """Return the string, after checking that it is valid Unicode: JSON allows unpaired surrogates, but they have no
    tokens.

    Args:
        value: A cell, or a part of one.
        what: The name of the value, for messages: "column 'text'".
        where: File and line.

    Raises:
        BadRow: The string is not valid Unicode.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "invalid Unicode",
            f"{where}: {what} is not valid Unicode text at character {error.start}: {short(value)}.",
        ) from None
    return value
