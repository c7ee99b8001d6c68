"""Tables of Python rows: objects passed by a script or notebook, or the result of a user's function or class."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roll.config.sources import PythonTable
from roll.data.cells import Row
from roll.data.rows import Table
from roll.errors import DataError, UserError
from roll.user_code import load_function

__all__ = ["ObjectTable", "build_python_tables"]

_EXAMPLE_ROW = "{'prompt': 'What is 3 + 4?', 'answer': '7'}"


def build_python_tables(config: PythonTable, domain: str, text_key: str | None) -> tuple[Table, Table | None]:
    """Build the table of the rows, and the held-out table if there is one.

    A row that is a string becomes a row with the column `text_key`.

    Raises:
        DataError: There are no rows, or they are malformed.
        ConfigError: The user's function cannot be imported.
    """
    rows, held_out = config.passed_rows
    if rows is None:
        rows, held_out = _call_data_function(config, domain)
    table = ObjectTable(f"data of '{domain}'", rows, text_key)
    return table, None if held_out is None else ObjectTable(f"held-out data of '{domain}'", held_out, text_key)


def _call_data_function(config: PythonTable, domain: str) -> tuple[Any, Any]:
    """Call the user's function or class; return the result, and its `held_out` attribute if it has one."""
    if config.function is None:
        raise DataError(
            f"the rows of '{domain}' are Python objects, which are not stored in files: pass them again with "
            "`roll.train(config, data=rows)` or `roll.resume(run, data=rows)`, or specify a function that returns "
            "them: `function: tasks.py:make`."
        )
    try:
        made = load_function(config.function, "data function")(**config.options)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"data function '{config.function}' failed: {type(error).__name__}: {error}") from error
    return made, getattr(made, "held_out", None)


class ObjectTable:
    """A table of rows in memory; each row is a dictionary or a string.

    An object that supports indexing and `len` (a list, a `datasets.Dataset`) is read in place; any other iterable is
    read once.
    """

    def __init__(self, name: str, rows: Iterable[Any], text_key: str | None) -> None:
        self.name = name
        self._text_key = text_key
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise DataError(
                f"{name} must be a list of dictionaries, such as [{_EXAMPLE_ROW}], got {type(rows).__name__}."
            )
        if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
            raise DataError(f"{name} is a data frame: pass its rows instead, `frame.to_dict('records')`.")
        in_place = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
        try:
            self._rows: Any = rows if in_place and not isinstance(rows, list) else list(rows)
        except Exception as error:  # a user's generator may raise anything
            raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}") from error

    def scan(self, limit: int | None) -> Iterator[Row | DataError]:
        """Yield at most `limit` rows; yield the error of a row that cannot be read. See `Table.scan`."""
        for index in itertools.islice(range(len(self._rows)), limit):
            try:
                row: Row | DataError = self.read_row(index)
            except DataError as error:
                row = error
            yield row

    def read_row(self, index: int) -> Row:
        """Return the row at an index."""
        try:
            row = self._rows[index]
        except Exception as error:  # a user's rows may raise anything
            raise DataError(
                f"{self.describe_location(index)} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if isinstance(row, str) and self._text_key is not None:
            return {self._text_key: row}
        if not isinstance(row, Mapping):
            raise DataError(
                f"{self.describe_location(index)} must be a dictionary such as {_EXAMPLE_ROW}, got "
                f"{type(row).__name__}."
            )
        return row

    def get_key(self, index: int) -> str:
        """Return the row's zero-based index."""
        return str(index)

    def describe_location(self, index: int) -> str:
        """Return the table's name and the row's zero-based index, for messages."""
        return f"{self.name}, row {index}"
