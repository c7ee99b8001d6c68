"""Untrusted files of rollouts (`roll.tracking.rollout_table`): portions, rows, texts.

    rollouts/*.parquet ─ metadata ─► refused, or portions of tens of MiB ─► columns, some rows in full, hits of a search

Invariants:
    - at most `_PORTION` bytes (according to the metadata) or one row are decoded at once;
    - texts stay in the file's dictionaries, so that a text shared by a million rows is stored once;
    - a row is converted to Python values only when its size is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.rollout_table import rollout_schema
from roll.tracking.visible import shorten

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "MOST_ROWS",
    "RolloutTable",
    "as_written",
    "compute",
    "distinct",
    "holding",
    "open_rollout_table",
    "place_of",
]

MOST_ROWS = 2**20
"""Maximum number of rows of one file."""
_MOST_AT_ONCE = 2**16
_PORTION = 64 * 2**20
_LARGEST_GROUP = 2**30
"""Maximum bytes of the columns read from one row group."""
_LARGEST_ROWS = 64 * 2**20
"""Maximum bytes of rows that are returned together."""
_BYTES_PER_VALUE = 8
_WHOLE = frozenset(("token_ids", "policy_versions", "turns", "branches"))
"""Lists in which a run has no missing entries."""
_NAME = re.compile(r"(eval-)?step-(\d{6}|[1-9]\d{6,8})\.parquet")


def compute() -> Any:
    """Return `pyarrow.compute`, whose functions are created at import time and unknown to type checkers."""
    import pyarrow.compute

    return pyarrow.compute


def place_of(name: str) -> tuple[int, str] | None:
    """Return the step and kind (`train` or `eval`) of a file's rollouts; `None` if the name is not one that a run
    uses.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[2]), "eval" if match[1] else "train")


@contextlib.contextmanager
def open_rollout_table(inside: SafeDirectory, name: str) -> Iterator[RolloutTable]:
    """Run the body with a file of `rollouts/` open.

    Raises:
        RunDirectoryError: the file cannot be read, now or during the body, or was not written by a run.
    """
    import pyarrow.parquet as pq

    with inside.open("rollouts", name) as file:
        try:
            metadata = pq.read_metadata(file)
            if metadata.num_rows > MOST_ROWS:
                raise RunDirectoryError(f"'{name}' is larger than any file of rollouts that a run writes.")
            leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            yield RolloutTable(name, pq.ParquetFile(file, metadata=metadata, read_dictionary=texts))
        except RunDirectoryError:
            raise
        except Exception as error:  # pyarrow may raise anything for an untrusted file
            first = shorten((str(error).splitlines() or [""])[0], 200)
            raise RunDirectoryError(f"'{name}' holds no rollouts that can be read: {first}") from None


class RolloutTable:
    """An open file; see `opened`."""

    def __init__(self, name: str, file: pq.ParquetFile) -> None:
        self._name = name
        self._file = file
        self.num_rows: int = file.metadata.num_rows
        self.names = frozenset(file.schema_arrow.names)
        """Names of the file's columns."""

    def portions(self, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows with the given columns; columns that the file does not have are omitted.

        Raises:
            RunDirectoryError: a row group is larger than any that a run writes.
        """
        yield from self._read(range(self._file.metadata.num_row_groups), sorted(self.names.intersection(columns)))

    def rows(self, places: Sequence[int], columns: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return rows, whole or with the given columns, in the requested order; only their row groups are read.

        Raises:
            RunDirectoryError: a row does not exist, has another type than a run's, or the rows are too large together.
        """
        names = sorted(self.names.intersection(rollout_schema().names if columns is None else columns))
        found: dict[int, dict[str, Any]] = {}
        left = _LARGEST_ROWS
        for inner, taken in self._taken(places, names):
            left -= sum(_size(column) for column in taken.columns)
            if left < 0:
                raise RunDirectoryError(
                    f"'{self._name}' has more than {_LARGEST_ROWS // 2**20} MiB in the rollouts that were asked for."
                )
            found |= zip(inner, as_written(taken).to_pylist(), strict=True)
        return [found[place] for place in places]

    def beginnings(self, places: Sequence[int], column: str, longest: int) -> list[str]:
        """Return the first `longest` characters of a text column for some rows; empty for rows without a text.

        Raises:
            RunDirectoryError: a row does not exist, or the column holds no texts.
        """
        found: dict[int, str] = {}
        if column not in self.names:
            return [""] * len(places)
        for inner, taken in self._taken(places, [column]):
            codes, texts = distinct(taken.column(column))
            cut = [text or "" for text in compute().utf8_slice_codeunits(texts, 0, longest).to_pylist()]
            found |= zip(inner, (cut[code] if code >= 0 else "" for code in codes.tolist()), strict=True)
        return [found[place] for place in places]

    def _taken(self, places: Sequence[int], names: list[str]) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """Yield the rows at `places` by portion, each with its place, in the file's order."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        if any(not 0 <= place < starts[-1] for place in places):
            raise RunDirectoryError(f"'{self._name}' holds fewer rollouts than before: read the files again.")
        for group in sorted({int(np.searchsorted(starts, place, side="right")) - 1 for place in places}):
            start, last = starts[group], max(place for place in places if place < starts[group + 1])
            for portion in self._read([group], names):
                end = start + portion.num_rows
                inner = sorted({place for place in places if start <= place < end})
                if inner:
                    yield inner, portion.take(np.array(inner) - start)
                start = end
                if start > last:
                    break

    def _read(self, groups: Sequence[int], names: list[str]) -> Iterator[pa.RecordBatch]:
        if groups:
            at_once = self._rows_at_once(groups, frozenset(names))
            yield from self._file.iter_batches(at_once, row_groups=list(groups), columns=names, use_threads=False)

    def _rows_at_once(self, groups: Sequence[int], names: frozenset[str]) -> int:
        metadata = self._file.metadata
        leaves = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] in names]
        rows = _MOST_AT_ONCE
        for index in groups:
            group = metadata.row_group(index)
            chunks = (group.column(leaf) for leaf in leaves)
            size = sum(max(chunk.total_uncompressed_size, chunk.num_values * _BYTES_PER_VALUE) for chunk in chunks)
            if size > _LARGEST_GROUP:
                raise RunDirectoryError(
                    f"'{self._name}' has {size / 2**30:.1f} GiB in one row group: no run writes such a file."
                )
            rows = min(rows, _PORTION * group.num_rows // max(size, 1))
        return max(1, rows)


def distinct(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return the index of each row's text, shape [R], -1 for none, and the distinct texts.

    Raises:
        pa.ArrowException: the column does not hold texts.
    """
    import pyarrow as pa

    pc = compute()
    if not pa.types.is_dictionary(column.type):
        places = np.arange(len(column))
        return np.where(column.is_null().to_numpy(zero_copy_only=False), -1, places), pc.cast(column, pa.string())
    indices = pc.fill_null(pc.cast(column.indices, pa.int64()), -1).to_numpy(zero_copy_only=False)
    used, codes = np.unique(indices, return_inverse=True)
    missing = int(len(used) > 0 and used[0] < 0)
    return codes - missing, pc.cast(column.dictionary.take(used[missing:]), pa.string())


def holding(column: pa.Array, wanted: str) -> np.ndarray:
    """Return whether each text contains `wanted`, ignoring case, shape [R].

    Raises:
        pa.ArrowException: the column does not hold texts.
    """
    pc = compute()
    codes, texts = distinct(column)
    hits = pc.fill_null(pc.match_substring(texts, wanted, ignore_case=True), False).to_numpy(zero_copy_only=False)
    return np.append(hits, False)[codes]


def as_written(rows: pa.RecordBatch) -> pa.Table:
    """Cast rows to the types that a run writes; columns that no run writes are dropped.

    Raises:
        RunDirectoryError: a list has entries without a value. pa.ArrowException: a column has another type.
    """
    import pyarrow as pa

    schema = rollout_schema()
    names = [name for name in rows.schema.names if name in schema.names]
    kept = pa.Table.from_batches([rows.select(names)])
    cast = kept.cast(pa.schema([schema.field(name) for name in names]), safe=False)
    for name in _WHOLE.intersection(names):
        if cast.column(name).combine_chunks().flatten().null_count:
            raise RunDirectoryError(f"'{name}' has entries without a value.")
    return cast


def _size(column: pa.Array) -> int:
    """Return the bytes of a column's values, with a repeated text counted each time."""
    import pyarrow as pa

    pc = compute()
    if pa.types.is_dictionary(column.type):
        texts = column.dictionary
        is_text = pa.types.is_string(texts.type) or pa.types.is_binary(texts.type)
        lengths = pc.binary_length(texts) if is_text else pa.array([texts.nbytes] * len(texts), pa.int64())
        return int(pc.sum(pc.cast(lengths.take(column.indices), pa.int64())).as_py() or 0)
    if pa.types.is_map(column.type):
        return _size(column.keys) + _size(column.items)
    if pa.types.is_struct(column.type):
        return sum(_size(field) for field in column.flatten())
    if pa.types.is_list(column.type):
        return len(column) * _BYTES_PER_VALUE + _size(column.flatten())
    return column.nbytes
