"""What is read of one file of rollouts (`roll.tracking.rollout_table`): columns for the index, rows in full, texts.

Files of earlier versions, which have no `num_tokens`, `num_turns` and `oldest_version`, are read through their lists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.dashboard.files import Inside
from roll.errors import RunDirectoryError
from roll.tracking.rollout_table import rollout_schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["LABELS", "MOST_ROWS", "NUMBERS", "FileColumns", "find_texts", "read_columns", "read_rows"]

MOST_ROWS = 2**20
"""Of one file."""
_LARGEST_GROUP = 4 * 2**30
NUMBERS: dict[str, Any] = {
    "draw_id": np.int64,
    "index": np.int32,
    "reward": np.float64,
    "advantage": np.float64,
    "correct": np.float32,
    "num_tokens": np.float32,
    "num_turns": np.float32,
    "policy_version": np.float32,
}
"""Numbers and how they are held; NaN where the file has none. `policy_version` is the oldest of a row."""
LABELS = ("domain", "verdict", "status", "finish_reason", "engine_id")
_WHOLE = frozenset(("token_ids", "policy_versions", "turns", "branches"))
"""Lists in which a run leaves nothing out."""
PREVIEW = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class FileColumns:
    """What the index needs of one file of R rows."""

    num_rows: int
    numbers: dict[str, np.ndarray]
    """[R] of each of `NUMBERS`."""
    labels: dict[str, tuple[np.ndarray, list[str]]]
    """[R] of each of `LABELS`: which of the texts, and the texts."""
    previews: list[tuple[str, str]]
    """[R] beginnings of prompt and text."""


def _compute() -> Any:
    """`pyarrow.compute`, whose functions are made when it is imported, so that no type checker knows them."""
    import pyarrow.compute

    return pyarrow.compute


@contextlib.contextmanager
def _opened(inside: Inside, name: str) -> Iterator[pq.ParquetFile]:
    """A file of rollouts.

    Raises:
        RunDirectoryError: it is not what a run writes.
    """
    import pyarrow.parquet as pq

    with inside.open("rollouts", name) as file:
        try:
            table = pq.ParquetFile(file)
            groups = (table.metadata.row_group(index) for index in range(table.metadata.num_row_groups))
            large = any(group.total_byte_size > _LARGEST_GROUP for group in groups)
            if table.metadata.num_rows > MOST_ROWS or large:
                raise RunDirectoryError(f"'{name}' is larger than any file of rollouts that a run writes.")
            yield table
        except RunDirectoryError:
            raise
        except Exception as error:  # whatever pyarrow makes of a file that anybody may have written
            raise RunDirectoryError(f"'{name}' is no file of rollouts: {str(error)[:300]}") from None


def read_columns(inside: Inside, name: str) -> FileColumns:
    """The columns that an index needs.

    Raises:
        RunDirectoryError: the file cannot be read, or is not what a run writes.
    """
    with _opened(inside, name) as file:
        present = set(file.schema_arrow.names)
        wanted = {*NUMBERS, *LABELS, "prompt", "text"} - {"policy_version"}
        wanted |= {"oldest_version"} if "oldest_version" in present else {"policy_versions"}
        wanted |= set() if "num_tokens" in present else {"token_ids"}
        table = file.read(columns=sorted(wanted & present), use_threads=False)
        columns = {column: table.column(column).combine_chunks() for column in table.column_names}
        numbers = {
            column: _numbers(_source(column, columns), dtype, table.num_rows) for column, dtype in NUMBERS.items()
        }
        return FileColumns(
            num_rows=table.num_rows,
            numbers=numbers,
            labels={column: _labels(columns.get(column), table.num_rows) for column in LABELS},
            previews=list(zip(*(_beginnings(columns.get(c), table.num_rows) for c in ("prompt", "text")), strict=True)),
        )


def _source(column: str, columns: dict[str, pa.Array]) -> pa.Array | None:
    """The numbers of `column`, worked out of lists where the file is of an earlier version."""
    import pyarrow as pa

    pc = _compute()
    if column == "num_tokens" and column not in columns and "token_ids" in columns:
        return pc.list_value_length(columns["token_ids"])
    if column in ("policy_version", "num_turns") and column not in columns:
        if column == "policy_version" and "oldest_version" in columns:
            return columns["oldest_version"]
        versions = columns.get("policy_versions")
        if versions is None or not pa.types.is_list(versions.type):
            return None
        return pa.array((_oldest if column == "policy_version" else _turns)(versions), from_pandas=True)
    return columns.get(column)


def _oldest(versions: pa.ListArray) -> np.ndarray:
    """[R] the oldest version that made a token of each row; NaN where none did."""
    values = versions.values.to_numpy(zero_copy_only=False).astype(np.float64)
    values = np.append(np.where(values < 0, np.inf, values), np.inf)
    offsets = versions.offsets.to_numpy()
    found = np.minimum.reduceat(values, np.minimum(offsets[:-1], len(values) - 1)) if len(offsets) > 1 else values[:0]
    return np.where((np.diff(offsets) > 0) & np.isfinite(found), found, np.nan)


def _turns(versions: pa.ListArray) -> np.ndarray:
    """[R] stretches of tokens that the engine made."""
    made = versions.values.to_numpy(zero_copy_only=False) >= 0
    offsets = versions.offsets.to_numpy()
    begins = made.copy()
    begins[1:] &= ~made[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    begins[starts] = made[starts]
    total = np.concatenate([[0], np.cumsum(begins)])
    return (total[offsets[1:]] - total[offsets[:-1]]).astype(np.float64)


def _numbers(source: pa.Array | None, dtype: Any, num_rows: int) -> np.ndarray:
    import pyarrow as pa

    pc = _compute()
    empty = -1 if np.issubdtype(dtype, np.integer) else np.nan
    if source is None:
        return np.full(num_rows, empty, dtype)
    try:
        as_type = pa.int64() if empty == -1 else pa.float64()
        cast = pc.fill_null(pc.cast(source, as_type, safe=False), empty)
        with np.errstate(all="ignore"):
            return cast.to_numpy(zero_copy_only=False).astype(dtype)
    except pa.ArrowException:
        return np.full(num_rows, empty, dtype)


def _labels(source: pa.Array | None, num_rows: int) -> tuple[np.ndarray, list[str]]:
    import pyarrow as pa

    pc = _compute()
    if source is None:
        return np.zeros(num_rows, np.int64), [""]
    try:
        coded = source if pa.types.is_dictionary(source.type) else pc.cast(source, pa.string()).dictionary_encode()
        codes = pc.fill_null(pc.cast(coded.indices, pa.int64()), len(coded.dictionary)).to_numpy(zero_copy_only=False)
        texts = [str(value or "")[:PREVIEW] for value in coded.dictionary.to_pylist()]
        return codes, [*texts, ""]
    except (pa.ArrowException, UnicodeDecodeError):
        return np.zeros(num_rows, np.int64), [""]


def _beginnings(source: pa.Array | None, num_rows: int) -> list[str]:
    import pyarrow as pa

    pc = _compute()
    with contextlib.suppress(pa.ArrowException, UnicodeDecodeError):
        if source is not None:
            cut = pc.utf8_slice_codeunits(pc.cast(source, pa.string()), 0, PREVIEW)
            return [text or "" for text in cut.to_pylist()]
    return [""] * num_rows


def read_rows(
    inside: Inside, name: str, rows: Sequence[int], columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Rows in full, or some columns of them, in the order asked for; only their row groups are read.

    Raises:
        RunDirectoryError: the file cannot be read, has no such row, or is not what a run writes.
    """
    with _opened(inside, name) as file:
        sizes = [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        if any(not 0 <= row < starts[-1] for row in rows):
            raise RunDirectoryError(f"'{name}' has {starts[-1]} rollouts, not the one asked for.")
        wanted = None if columns is None else [column for column in columns if column in file.schema_arrow.names]
        found: dict[int, dict[str, Any]] = {}
        for group in sorted({int(np.searchsorted(starts, row, side="right")) - 1 for row in rows}):
            inner = [row for row in rows if starts[group] <= row < starts[group + 1]]
            table = file.read_row_group(group, columns=wanted, use_threads=False)
            taken = _as_written(table.take(np.array(inner) - starts[group]))
            found |= dict(zip(inner, taken.to_pylist(), strict=True))
        return [found[row] for row in rows]


def _as_written(table: pa.Table) -> pa.Table:
    """Of the types that a run writes; columns that no run writes are left out."""
    import pyarrow as pa

    schema = rollout_schema()
    names = [name for name in table.column_names if name in schema.names]
    cast = table.select(names).cast(pa.schema([schema.field(name) for name in names]), safe=False)
    for name in _WHOLE.intersection(names):
        if cast.column(name).combine_chunks().flatten().null_count:
            raise RunDirectoryError(f"'{name}' has entries without a value.")
    return cast


def find_texts(inside: Inside, name: str, wanted: str) -> np.ndarray:
    """Rows whose prompt or text holds `wanted`, whatever its case.

    Raises:
        RunDirectoryError: the file cannot be read, or is not what a run writes.
    """
    import pyarrow as pa

    pc = _compute()
    with _opened(inside, name) as file:
        columns = [column for column in ("prompt", "text") if column in file.schema_arrow.names]
        hits = np.zeros(file.metadata.num_rows, bool)
        at = 0
        for group in range(file.metadata.num_row_groups):
            table = file.read_row_group(group, columns=columns, use_threads=False)
            for column in columns:
                texts = pc.cast(table.column(column), pa.string())
                found = pc.match_substring(texts, wanted, ignore_case=True)
                hits[at : at + table.num_rows] |= pc.fill_null(found, False).to_numpy()
            at += table.num_rows
        return np.flatnonzero(hits)
