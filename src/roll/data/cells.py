"""What is in one column of a row, read strictly: a wrong value is named with its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import DataError
from roll.registry import nearest

__all__ = ["ROLES", "Row", "column", "is_message", "short", "unicode_text"]

Row = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


def column(row: Row, name: str, where: str, option: str) -> Any:
    """The row's value in the column that `option` names.

    Raises:
        DataError: it has no such column.
    """
    if name not in row:
        columns = ", ".join(short(column) for column in list(row)[:20]) or "none"
        raise DataError(
            f"{where}: there is no column '{name}'.{nearest(name, list(row))} It has: {columns}. "
            f"Set `{option}` to the right one."
        )
    return row[name]


def is_message(value: Any) -> bool:
    """Whether this is a chat message."""
    return isinstance(value, Mapping) and value.get("role") in ROLES and isinstance(value.get("content"), str)


def unicode_text(value: str, column: str, where: str) -> str:
    """The text, if it is one: half a surrogate pair, which JSON can spell, has no tokens.

    Raises:
        DataError: it is none.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: column '{column}' is not valid Unicode text at character {error.start}: {short(value)}."
        ) from None
    return value


def short(value: Any) -> str:
    """The value as a message shows it: its beginning."""
    try:
        text = repr(value)
    except Exception:  # it nests too deeply, holds too long a number, or is of a class of the user's own
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
