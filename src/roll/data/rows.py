"""Read a table's rows as prompts or examples, and split off the held-out ones.

    table ── one pass: every row is checked, and its side decided ──► row numbers to train on │ row numbers held out
                                                                         │
                                      a row is read again when it is drawn ◄┘

So a source costs a few bytes of memory per row, and a malformed row is rejected before training.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.data.cells import Row
from roll.data.source import Fingerprint, content_hash
from roll.errors import DataError

__all__ = ["RowItems", "RowReader", "Table", "split_rows"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Table(Protocol):
    """Rows on disk, numbered from 0."""

    name: str
    """Name for messages: the file, or the dataset and its split."""

    def scan(self, limit: int | None) -> Iterator[Row | DataError]:
        """Read all rows from the first on, at most `limit`; called before any `row`.

        A row that cannot be read is replaced by its error, if other rows can be read.
        """
        ...

    def row(self, index: int) -> Row:
        """Read one row again, by its number."""
        ...

    def key(self, index: int) -> str:
        """Return the end of the row's UID: its number (or line) from 1."""
        ...

    def where(self, index: int) -> str:
        """Return the row's place, for messages."""
        ...


class RowReader(Protocol[T]):
    """Converts the rows of a table to items."""

    held_out: float
    limit: int | None

    def read(self, row: Row, key: str, where: str) -> T:
        """Read one row, whose UID ends with `key`.

        Raises:
            DataError: The row is malformed.
        """
        ...

    def refuse(self, error: DataError, where: str) -> None:
        """Handle a row that cannot be read: raise, or skip it."""
        ...

    def asked(self, item: T) -> Iterable[str]:
        """Return the question in the item: items with the same question are on the same side of the held-out split."""
        ...

    def content(self, item: T) -> Iterable[str]:
        """Return all content of the item."""
        ...


class RowItems(Generic[T]):
    """Items of some rows of a table, read on demand; a `Source`."""

    def __init__(
        self, reader: RowReader[T], table: Table, rows: NDArray[np.int64], fingerprint: str, prefix: str = ""
    ) -> None:
        self.fingerprint = fingerprint
        self._reader, self._table, self._rows, self._prefix = reader, table, rows, prefix

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> T:
        row = int(self._rows[index])
        return self._reader.read(self._table.row(row), self._prefix + self._table.key(row), self.where(index))

    def where(self, index: int) -> str:
        """Return the place of the item's row, for messages."""
        return self._table.where(int(self._rows[index]))

    def without(self, indices: Collection[int]) -> RowItems[T]:
        """Return the items without those at `indices`."""
        return RowItems(
            self._reader, self._table, np.delete(self._rows, sorted(indices)), self.fingerprint, self._prefix
        )


def split_rows(reader: RowReader[T], tables: tuple[Table, Table | None], seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Return the training items and the held-out items: a share of the first table, or the second table.

    Raises:
        DataError: A table cannot be read, is empty, or a row is malformed; or all rows are in both tables.
    """
    table, held_out = tables
    return _by_share(reader, table, seed) if held_out is None else _by_table(reader, table, held_out, seed)


def _scan(reader: RowReader[T], table: Table, prefix: str) -> Iterator[tuple[int, T]]:
    """Yield every row's number and item, checked.

    Raises:
        DataError: There is no row, or a row is malformed.
    """
    number = -1
    for number, row in enumerate(table.scan(reader.limit)):
        try:
            if isinstance(row, DataError):
                raise row
            item = reader.read(row, prefix + table.key(number), table.where(number))
        except DataError as error:
            reader.refuse(error, table.where(number))
        else:
            yield number, item
    if number < 0:
        raise DataError(f"{table.name} holds no rows: give one with at least one.")


def _numbers(rows: array[int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


def _shuffle(rows: array[int], seed: int) -> NDArray[np.int64]:
    """Shuffle by the seed, so that the first few held-out items are a fair sample of a sorted table."""
    return _numbers(rows)[np.random.default_rng([seed, 0x0E1D]).permutation(len(rows))]


def _by_share(reader: RowReader[T], table: Table, seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Hold out a share of one table.

    The side of an item depends on its question and the seed, not on its neighbors: a question that occurs twice never
    leaks, and adding rows moves none.
    """
    sides = (array("q"), array("q"))
    digests = (Fingerprint(), Fingerprint())
    for number, item in _scan(reader, table, ""):
        side = content_hash(reader.asked(item), seed) / 2**64 < reader.held_out
        sides[side].append(number)
        digests[side].add(reader.content(item))
    return (
        RowItems(reader, table, _numbers(sides[0]), digests[0].text()),
        RowItems(reader, table, _shuffle(sides[1], seed), digests[1].text()),
    )


def _by_table(reader: RowReader[T], table: Table, held_out: Table, seed: int) -> tuple[RowItems[T], RowItems[T]]:
    """Hold out another table. A question that is in both is not trained on."""
    kept, evaluation = array("q"), array("q")
    digests = (Fingerprint(), Fingerprint())
    seen: set[int] = set()
    for number, item in _scan(reader, held_out, "held_out/"):
        evaluation.append(number)
        digests[1].add(reader.content(item))
        seen.add(content_hash(reader.asked(item)))
    num_shared = 0
    for number, item in _scan(reader, table, ""):
        if content_hash(reader.asked(item)) in seen:
            num_shared += 1
        else:
            kept.append(number)
            digests[0].add(reader.content(item))
    if num_shared:
        message = f"{num_shared} prompts of {table.name} also occur in {held_out.name}"
        if not kept:
            raise DataError(f"{message}, so none is left to train on: evaluate on other data.")
        logger.warning("%s: they are held out, not trained on", message)
    return (
        RowItems(reader, table, _numbers(kept), digests[0].text()),
        RowItems(reader, held_out, _shuffle(evaluation, seed), digests[1].text(), "held_out/"),
    )
