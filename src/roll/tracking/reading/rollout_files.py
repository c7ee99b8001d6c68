"""Read untrusted rollout files (`roll.tracking.rollout_table`) in portions.

    rollouts/*.parquet ─ metadata ─► rejected, or portions of tens of MiB ─► columns, whole rows, search results

Invariants:
    - at most `_PORTION_BYTES` bytes (according to the metadata) or one row are decoded at once;
    - strings stay dictionary-encoded, so that a string shared by a million rows is stored once;
    - a row is converted to Python values only after its size has been checked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import RunDirectoryError
from roll.tracking.escape import shorten
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.rollout_table import build_rollout_schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "MAX_FILE_ROWS",
    "RolloutReader",
    "cast_to_schema",
    "contains_text",
    "factorize_texts",
    "get_arrow_compute",
    "open_rollout_file",
    "parse_file_name",
]

MAX_FILE_ROWS = 2**20
"""Maximum number of rows of one file."""
_MAX_BATCH_ROWS = 2**16
_PORTION_BYTES = 64 * 2**20
_MAX_GROUP_BYTES = 2**30
"""Maximum bytes of the columns read from one row group."""
_MAX_RESULT_BYTES = 64 * 2**20
"""Maximum bytes of rows that are returned together."""
_BYTES_PER_VALUE = 8
_COMPLETE_LISTS = frozenset(
    ("token_ids", "policy_versions", "turns", "branches", "prompt_media", "media", "branch_media")
)
"""Columns of lists that must not have missing entries."""
_FILE_NAME_PATTERN = re.compile(r"(eval-)?step-(\d{6}|[1-9]\d{6,8})\.parquet")


def get_arrow_compute() -> Any:
    """Import `pyarrow.compute`, and return it as `Any`, since type checkers do not see its functions."""
    import pyarrow.compute

    return pyarrow.compute


def parse_file_name(name: str) -> tuple[int, str] | None:
    """Return the step and kind (`train` or `eval`) of a file's rollouts; `None` for any other name."""
    match = _FILE_NAME_PATTERN.fullmatch(name)
    return None if match is None else (int(match[2]), "eval" if match[1] else "train")


@contextlib.contextmanager
def open_rollout_file(directory: SafeDirectory, name: str) -> Iterator[RolloutReader]:
    """Open the file `name` of a run's `rollouts/`, yield a reader, and close the file at the end.

    Raises:
        RunDirectoryError: The file cannot be opened or read, or was not written by a run.
    """
    import pyarrow.parquet as pq

    with directory.open("rollouts", name) as file:
        try:
            metadata = pq.read_metadata(file)
            if metadata.num_rows > MAX_FILE_ROWS:
                raise RunDirectoryError(f"'{name}' has more than {MAX_FILE_ROWS:,} rows: it was not written by a run.")
            # Dictionary-encoded strings are decoded once: a prompt occurs in every row of a group.
            leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            yield RolloutReader(name, pq.ParquetFile(file, metadata=metadata, read_dictionary=texts))
        except RunDirectoryError:
            raise
        except Exception as error:  # pyarrow may raise anything for an untrusted file
            first = shorten((str(error).splitlines() or [""])[0], 200)
            raise RunDirectoryError(f"the rollouts in '{name}' cannot be read: {first}") from None


class RolloutReader:
    """Reads rows from an open rollout file; created by `open_rollout_file`."""

    def __init__(self, name: str, file: pq.ParquetFile) -> None:
        self._name = name
        self._file = file
        self.num_rows: int = file.metadata.num_rows
        self.names = frozenset(file.schema_arrow.names)
        """Names of the file's columns."""

    def iter_batches(self, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows with the given columns; columns that the file does not have are omitted.

        Raises:
            RunDirectoryError: A row group exceeds the size limit.
        """
        yield from self._read(range(self._file.metadata.num_row_groups), sorted(self.names.intersection(columns)))

    def read_rows(self, positions: Sequence[int], columns: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows at `positions`, in this order, with all or the given columns.

        Raises:
            RunDirectoryError: A row does not exist or has the wrong type, or the rows are too large in total.
        """
        names = sorted(self.names.intersection(build_rollout_schema().names if columns is None else columns))
        found: dict[int, dict[str, Any]] = {}
        left = _MAX_RESULT_BYTES
        for inner, taken in self._select_rows(positions, names):
            left -= sum(_measure_size(column) for column in taken.columns)
            if left < 0:
                raise RunDirectoryError(
                    f"the requested rollouts of '{self._name}' are larger than {_MAX_RESULT_BYTES // 2**20} MiB."
                )
            found |= zip(inner, cast_to_schema(taken).to_pylist(), strict=True)
        return [found[place] for place in positions]

    def read_excerpts(self, positions: Sequence[int], column: str, num_characters: int) -> list[str]:
        """Return the first characters of a string column, for the rows at `positions`; empty for null values.

        Raises:
            RunDirectoryError: A row does not exist, or the column does not contain strings.
        """
        found: dict[int, str] = {}
        if column not in self.names:
            return [""] * len(positions)
        for inner, taken in self._select_rows(positions, [column]):
            codes, texts = factorize_texts(taken.column(column))
            cut = [
                text or "" for text in get_arrow_compute().utf8_slice_codeunits(texts, 0, num_characters).to_pylist()
            ]
            found |= zip(inner, (cut[code] if code >= 0 else "" for code in codes.tolist()), strict=True)
        return [found[place] for place in positions]

    def _select_rows(self, positions: Sequence[int], names: list[str]) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """Yield the rows at `positions` in batches, in file order, each batch with the positions of its rows."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        if any(not 0 <= place < starts[-1] for place in positions):
            raise RunDirectoryError(f"'{self._name}' has fewer rollouts than before: read the files again.")
        for group in sorted({int(np.searchsorted(starts, place, side="right")) - 1 for place in positions}):
            start, last = starts[group], max(place for place in positions if place < starts[group + 1])
            for portion in self._read([group], names):
                end = start + portion.num_rows
                inner = sorted({place for place in positions if start <= place < end})
                if inner:
                    yield inner, portion.take(np.array(inner) - start)
                start = end
                if start > last:
                    break

    def _read(self, groups: Sequence[int], names: list[str]) -> Iterator[pa.RecordBatch]:
        if groups:
            at_once = self._count_rows_at_once(groups, frozenset(names))
            yield from self._file.iter_batches(at_once, row_groups=list(groups), columns=names, use_threads=False)

    def _count_rows_at_once(self, groups: Sequence[int], names: frozenset[str]) -> int:
        metadata = self._file.metadata
        leaves = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] in names]
        rows = _MAX_BATCH_ROWS
        for index in groups:
            group = metadata.row_group(index)
            chunks = (group.column(leaf) for leaf in leaves)
            # Run-length encoding stores a million equal values in a few bytes, which decode to `_BYTES_PER_VALUE` each.
            size = sum(max(chunk.total_uncompressed_size, chunk.num_values * _BYTES_PER_VALUE) for chunk in chunks)
            if size > _MAX_GROUP_BYTES:
                raise RunDirectoryError(
                    f"'{self._name}' has {size / 2**30:.1f} GiB in one row group: it was not written by a run."
                )
            rows = min(rows, _PORTION_BYTES * group.num_rows // max(size, 1))
        return max(1, rows)


def factorize_texts(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return each row's index (shape [R], -1 for null) into an array of strings, and the array.

    If the column is dictionary-encoded, the array has no duplicates.

    Raises:
        pa.ArrowException: The column does not contain strings.
    """
    import pyarrow as pa

    pc = get_arrow_compute()
    if not pa.types.is_dictionary(column.type):
        positions = np.arange(len(column))
        return np.where(column.is_null().to_numpy(zero_copy_only=False), -1, positions), pc.cast(column, pa.string())
    indices = pc.fill_null(pc.cast(column.indices, pa.int64()), -1).to_numpy(zero_copy_only=False)
    used, codes = np.unique(indices, return_inverse=True)
    missing = int(len(used) > 0 and used[0] < 0)
    return codes - missing, pc.cast(column.dictionary.take(used[missing:]), pa.string())


def contains_text(column: pa.Array, query: str) -> np.ndarray:
    """Return a boolean mask, shape [R], of the strings that contain `query`, ignoring case.

    Raises:
        pa.ArrowException: The column does not contain strings.
    """
    pc = get_arrow_compute()
    codes, texts = factorize_texts(column)
    hits = pc.fill_null(pc.match_substring(texts, query, ignore_case=True), False).to_numpy(zero_copy_only=False)
    return np.append(hits, False)[codes]


def cast_to_schema(rows: pa.RecordBatch) -> pa.Table:
    """Cast rows to the types of `build_rollout_schema`; drop columns that are not in this schema.

    Raises:
        RunDirectoryError: A list contains null entries.
        pa.ArrowException: A column cannot be cast.
    """
    import pyarrow as pa

    schema = build_rollout_schema()
    names = [name for name in rows.schema.names if name in schema.names]
    kept = pa.Table.from_batches([rows.select(names)])
    cast = kept.cast(pa.schema([schema.field(name) for name in names]), safe=False)
    for name in _COMPLETE_LISTS.intersection(names):
        if cast.column(name).combine_chunks().flatten().null_count:
            raise RunDirectoryError(
                f"the column '{name}' has lists with missing entries: the file was not written by a run."
            )
    return cast


def _measure_size(column: pa.Array) -> int:
    """Return the bytes of a column's values, with repeated strings counted each time."""
    import pyarrow as pa

    pc = get_arrow_compute()
    if pa.types.is_dictionary(column.type):
        texts = column.dictionary
        is_text = pa.types.is_string(texts.type) or pa.types.is_binary(texts.type)
        lengths = pc.binary_length(texts) if is_text else pa.array([texts.nbytes] * len(texts), pa.int64())
        return int(pc.sum(pc.cast(lengths.take(column.indices), pa.int64())).as_py() or 0)
    if pa.types.is_map(column.type):
        return _measure_size(column.keys) + _measure_size(column.items)
    if pa.types.is_struct(column.type):
        return sum(_measure_size(field) for field in column.flatten())
    if pa.types.is_list(column.type):
        return len(column) * _BYTES_PER_VALUE + _measure_size(column.flatten())
    return column.nbytes
