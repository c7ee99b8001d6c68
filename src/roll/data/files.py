"""Tables of rows in JSONL and Parquet files."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.config.sources import FileTable
from roll.data.cells import ArrowRow, BadRow, Row
from roll.data.rows import Table
from roll.errors import DataError, shorten
from roll.registry import did_you_mean, format_search_directory

__all__ = ["JsonlTable", "ParquetTable", "open_file_tables", "open_table"]

_LINES_WITHOUT_ROW = (b"", b"[", b"]", b"\xef\xbb\xbf[")
"""Lines without a row: blank lines, and the brackets of a JSON array with one object per line."""
MAX_LINE_LENGTH = 64 * 2**20
"""Number of bytes of a line from which the file is not considered to be JSON Lines."""


def open_file_tables(config: FileTable) -> tuple[Table, Table | None]:
    """Open the file's table, and the held-out table if it is in a separate file.

    Raises:
        DataError: A file does not exist, or is of an unsupported type.
    """
    return open_table(Path(config.path)), None if config.held_out_path is None else open_table(
        Path(config.held_out_path)
    )


def open_table(path: Path) -> Table:
    """Open a file as a table, without reading it.

    Raises:
        DataError: The file does not exist, or is of an unsupported type.
    """
    path = path.expanduser()
    if not path.is_file():
        raise DataError(_describe_missing_file(path))
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonlTable(path)
    if path.suffix == ".parquet":
        return ParquetTable(path)
    raise DataError(f"'{path}' must be a .jsonl or .parquet file: convert it, or correct its extension.")


def _describe_missing_file(path: Path) -> str:
    if path.is_dir():
        return f"'{path}' is a directory: specify a file in it, or use `source: huggingface` for a dataset's directory."
    if not path.parent.is_dir():
        return (
            f"data file '{path}' does not exist, nor does its directory{format_search_directory(path)}: check the path."
        )
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        siblings = []
    return f"data file '{path}' does not exist{format_search_directory(path)}.{did_you_mean(path.name, siblings)}"


class JsonlTable:
    """A JSONL file: one JSON object per line. Blank lines are ignored, and lines of a JSON array are also accepted.

    Only the position of each line is kept in memory, not its content.
    """

    def __init__(self, path: Path) -> None:
        self.name = f"'{path}'"
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        self._identity = (0, 0)

    def scan(self, limit: int | None) -> Iterator[Row | DataError]:
        """Yield the rows, at most `limit`, or the error in a line; see `Table.scan`."""
        try:
            with self._path.open("rb") as file:
                self._identity = _get_size_and_time(file.fileno())
                offset, number = 0, 0
                while (limit is None or len(self._lines) < limit) and (line := file.readline(MAX_LINE_LENGTH)):
                    number += 1
                    if line.strip() not in _LINES_WITHOUT_ROW:
                        self._offsets.append(offset)
                        self._lines.append(number)
                        yield _parse_line_or_error(line, self.describe_location(len(self._lines) - 1))
                    offset += len(line)
        except OSError as error:
            raise DataError(f"'{self._path}' cannot be read: {error.strerror}.") from error

    def read_row(self, index: int) -> Row:
        """Read one line again, by its index."""
        try:
            with self._path.open("rb") as file:
                # In a changed file, the stored offsets would silently give other rows.
                if _get_size_and_time(file.fileno()) != self._identity:
                    raise DataError(
                        f"'{self._path}' changed while the run was using it: start a new run with the changed file."
                    )
                file.seek(self._offsets[index])
                return _parse_line(file.readline(MAX_LINE_LENGTH), self.describe_location(index))
        except OSError as error:
            raise DataError(f"'{self._path}' can no longer be read: {error.strerror}.") from error

    def get_key(self, index: int) -> str:
        """Return the row's 1-based line number, as a string."""
        return str(self._lines[index])

    def describe_location(self, index: int) -> str:
        """Return the file and the line's number."""
        return f"'{self._path}', line {self._lines[index]}"


def _get_size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _parse_line_or_error(line: bytes, location: str) -> Row | DataError:
    """Parse a line to a row; return a `BadRow` if the line is malformed.

    Raises:
        DataError: The line is so long that the file cannot be JSON Lines.
    """
    if len(line) >= MAX_LINE_LENGTH:
        raise DataError(
            f"{location}: the line has {MAX_LINE_LENGTH:,} bytes or more: check that this is a JSON Lines file."
        )
    try:
        return _parse_line(line, location)
    except BadRow as error:
        return error


def _parse_line(line: bytes, location: str) -> Row:
    try:
        text = line.decode("utf-8-sig").strip()
        # Lines of a JSON array, one object each, end with commas.
        value = json.loads(text.removesuffix(",") if text.endswith("},") else text, object_pairs_hook=_as_dict)
    except _RepeatedKey as error:
        raise BadRow("repeated key", f"{location}: the key {error} occurs twice in one object: keep one.") from None
    except UnicodeDecodeError as error:
        raise BadRow(
            "not UTF-8 text", f"{location}: the line is not UTF-8 text (byte {error.start}): {line[:40]!r}."
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRow("not JSON", f"{location}: the line is not valid JSON ({error}): {line[:60]!r}.") from None
    except ValueError as error:  # an integer with too many digits for Python
        raise BadRow("not JSON", f"{location}: the line has an integer with too many digits ({error}).") from None
    if not isinstance(value, dict):
        raise BadRow(
            "not an object", f"{location}: a row must be a JSON object, got {type(value).__name__}: {line[:60]!r}."
        )
    return value


class _RepeatedKey(Exception):
    """A JSON object has the same key twice."""


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _RepeatedKey(shorten(next(name for name, count in counts.items() if count > 1)))
    return found


class ParquetTable:
    """A Parquet file; its columns are kept in memory in Arrow's compact format."""

    def __init__(self, path: Path) -> None:
        self.name = f"'{path}'"
        self._path = path
        self._table: Any = None

    def scan(self, limit: int | None) -> Iterator[Row]:
        """Load the file and yield its rows; see `Table.scan`."""
        from pyarrow import parquet

        try:
            # Rows stay in Arrow's form: as Python objects they would take several times the memory.
            table = parquet.read_table(self._path, memory_map=True)
            self._table = table if limit is None else table.slice(0, limit)
            for batch in self._table.to_batches(max_chunksize=1024):
                yield from map(ArrowRow, batch.to_pylist())
        except Exception as error:  # a date that Python cannot represent, or an unknown time zone
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"'{self._path}' is not a readable Parquet file: {first}") from error

    def read_row(self, index: int) -> Row:
        """Return one row, by its index."""
        return ArrowRow(self._table.slice(index, 1).to_pylist()[0])

    def get_key(self, index: int) -> str:
        """Return the row's 1-based number."""
        return str(index + 1)

    def describe_location(self, index: int) -> str:
        """Return the file and the row's 1-based number."""
        return f"'{self._path}', row {index + 1}"
