"""Reads a table's rows as prompts or examples, and splits them into training and held-out items.

    table ── one pass checks every row and decides its side ──► row numbers to train on │ row numbers held out
                                                                         │
                                      a row is read again when it is drawn ◄┘

Therefore a source needs only a few bytes of memory per row, and malformed rows are rejected before training.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.data.cells import Row
from roll.data.source import Fingerprint, hash_question
from roll.errors import DataError

__all__ = ["RowItems", "RowReader", "Table", "split_rows"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Table(Protocol):
    """Interface of tables: the rows of a file, a dataset or a Python object, numbered from 0."""

    name: str
    """Name for messages: the file, or the dataset and its split."""

    def scan(self, limit: int | None) -> Iterator[Row | DataError]:
        """Yield the first `limit` rows. Call this method before `read_row`.

        If a row cannot be read, the error is yielded in its place. If the whole table cannot be read, the error is
        raised.
        """
        ...

    def read_row(self, index: int) -> Row:
        """Read the row with this number again."""
        ...

    def get_key(self, index: int) -> str:
        """Return the row's key, the last part of its UID: the 1-based number of the row or line."""
        ...

    def describe_location(self, index: int) -> str:
        """Return the row's location, for error messages."""
        ...


class RowReader(Protocol[T]):
    """Interface of readers, which convert the rows of a table to items."""

    held_out: float
    limit: int | None

    def read(self, row: Row, key: str, location: str) -> T:
        """Read one row, whose UID ends with `key`.

        Raises:
            DataError: The row is malformed.
        """
        ...

    def handle_error(self, error: DataError, location: str) -> None:
        """Handle the error of a row that cannot be read: raise it, or record it and skip the row."""
        ...

    def get_question(self, item: T) -> Iterable[str]:
        """Return the item's question; items with the same question are on the same side of the held-out split."""
        ...

    def get_content(self, item: T) -> Iterable[str]:
        """Return all content of the item."""
        ...


class RowItems(Generic[T]):
    """A `Source` that reads the items of some rows of a table on demand."""

    def __init__(
        self, reader: RowReader[T], table: Table, rows: NDArray[np.int64], fingerprint: str, prefix: str = ""
    ) -> None:
        self.fingerprint = fingerprint
        self.reader = reader
        """Reads the rows of the source."""
        self._table, self._rows, self._prefix = table, rows, prefix

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> T:
        row = int(self._rows[index])
        return self.reader.read(
            self._table.read_row(row), self._prefix + self._table.get_key(row), self.describe_location(index)
        )

    def describe_location(self, index: int) -> str:
        """Return the location of the item's row, for messages."""
        return self._table.describe_location(int(self._rows[index]))

    def exclude(self, indices: Collection[int]) -> RowItems[T]:
        """Return a copy of the source without the items at `indices`."""
        return RowItems(
            self.reader, self._table, np.delete(self._rows, sorted(indices)), self.fingerprint, self._prefix
        )


def split_rows(reader: RowReader[T], tables: tuple[Table, Table | None], seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Split rows into training and held-out items; hold out the second table or, without one, a fraction of the first.

    Raises:
        DataError: A table cannot be read or is empty, a row is malformed, or every question of the first table is also
            in the second.
    """
    table, held_out = tables
    return (
        _split_by_fraction(reader, table, seed) if held_out is None else _split_by_table(reader, table, held_out, seed)
    )


def _read_rows(reader: RowReader[T], table: Table, prefix: str) -> Iterator[tuple[int, T]]:
    """Yield the number and the item of each valid row; pass the error of each invalid row to `handle_error`.

    Raises:
        DataError: The table has no rows, or a row is malformed.
    """
    number = -1
    for number, row in enumerate(table.scan(reader.limit)):
        try:
            if isinstance(row, DataError):
                raise row
            item = reader.read(row, prefix + table.get_key(number), table.describe_location(number))
        except DataError as error:
            reader.handle_error(error, table.describe_location(number))
        else:
            yield number, item
    if number < 0:
        raise DataError(f"{table.name} has no rows: at least one row is required.")


def _to_array(rows: array[int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


def _shuffle(rows: array[int], seed: int) -> NDArray[np.int64]:
    """Shuffle held-out row numbers, so that the first ones are a representative sample even if the table is sorted."""
    return _to_array(rows)[np.random.default_rng([seed, 0x0E1D]).permutation(len(rows))]


def _split_by_fraction(reader: RowReader[T], table: Table, seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Split one table into training items and a held-out fraction."""
    # The side of an item depends on its question and the seed, not on its neighbors: a question that occurs twice never
    # leaks, and adding rows moves none.
    sides = (array("q"), array("q"))
    digests = (Fingerprint(), Fingerprint())
    for number, item in _read_rows(reader, table, ""):
        side = hash_question(reader.get_question(item), seed) / 2**64 < reader.held_out
        sides[side].append(number)
        digests[side].add(reader.get_content(item))
    return (
        RowItems(reader, table, _to_array(sides[0]), digests[0].hexdigest()),
        RowItems(reader, table, _shuffle(sides[1], seed), digests[1].hexdigest()),
    )


def _split_by_table(reader: RowReader[T], table: Table, held_out: Table, seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Use the items of the first table for training, and hold out the items of the second table.

    Items of the first table whose question is also in the second table are removed.
    """
    kept, evaluation = array("q"), array("q")
    digests = (Fingerprint(), Fingerprint())
    seen: set[int] = set()
    for number, item in _read_rows(reader, held_out, "held_out/"):
        evaluation.append(number)
        digests[1].add(reader.get_content(item))
        seen.add(hash_question(reader.get_question(item)))
    num_shared = 0
    for number, item in _read_rows(reader, table, ""):
        if hash_question(reader.get_question(item)) in seen:
            num_shared += 1
        else:
            kept.append(number)
            digests[0].add(reader.get_content(item))
    if num_shared:
        message = f"{num_shared} prompts of {table.name} also occur in {held_out.name}"
        if not kept:
            raise DataError(f"{message}, so no row is left to train on: evaluate on other data.")
        logger.warning("%s: they are held out, not trained on", message)
    return (
        RowItems(reader, table, _to_array(kept), digests[0].hexdigest()),
        RowItems(reader, held_out, _shuffle(evaluation, seed), digests[1].hexdigest(), "held_out/"),
    )
