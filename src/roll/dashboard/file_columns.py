"""Reads the columns of a rollout file that the index needs, and previews of its prompts and answers.

Files of older versions lack `num_tokens`, `num_turns` and `oldest_version`; these are computed from per-token lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.tracking.reading.files import SafeDirectory
from roll.tracking.reading.rollout_files import factorize_texts, get_arrow_compute, open_rollout_file

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LABEL_COLUMNS", "MAX_LABELS", "NUMBER_COLUMNS", "FileColumns", "read_columns"]

NUMBER_COLUMNS: dict[str, Any] = {
    "draw_id": np.int64,
    "index": np.int32,
    "reward": np.float64,
    "advantage": np.float64,
    "correct": np.float32,
    "num_tokens": np.float32,
    "num_turns": np.float32,
    "policy_version": np.float32,
}
"""Numeric columns and their dtypes; NaN for missing columns. `policy_version` is the oldest version in a row."""
LABEL_COLUMNS = ("domain", "verdict", "status", "finish_reason", "engine_id")
MAX_LABELS = 4096
"""Maximum number of distinct values of a label; rows with further values have no label."""
PREVIEW_LENGTH = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class FileColumns:
    """The columns of a rollout file with R rows that are stored in the index."""

    num_rows: int
    numbers: dict[str, np.ndarray]
    """Each column of `NUMBER_COLUMNS`, shape [R]."""
    labels: dict[str, tuple[np.ndarray, list[str]]]
    """Each column of `LABEL_COLUMNS`: the code of each row's value, shape [R], and the values by code."""


def read_columns(run_dir: SafeDirectory, name: str, add: Callable[[list[tuple[str, str]]], None]) -> FileColumns:
    """Read the columns of a rollout file for the index.

    Args:
        run_dir: the run's directory.
        name: name of the file.
        add: called for each batch of rows, with previews of the prompts and answers.

    Raises:
        RunDirectoryError: the file cannot be read, or was not written by a run.
    """
    with open_rollout_file(run_dir, name) as file:
        wanted = {*NUMBER_COLUMNS, *LABEL_COLUMNS, "prompt", "text"} - {"policy_version"}
        wanted |= {"oldest_version"} if "oldest_version" in file.names else {"policy_versions"}
        wanted |= set() if "num_tokens" in file.names else {"token_ids"}
        numbers = {column: [np.empty(0, dtype)] for column, dtype in NUMBER_COLUMNS.items()}
        codes = {label: [np.empty(0, np.int64)] for label in LABEL_COLUMNS}
        known: dict[str, dict[str, int]] = {label: {"": 0} for label in LABEL_COLUMNS}
        for portion in file.iter_batches(wanted):
            columns = dict(zip(portion.schema.names, portion.columns, strict=True))
            for column, dtype in NUMBER_COLUMNS.items():
                numbers[column].append(_convert_numbers(_read_source(column, columns), dtype, portion.num_rows))
            for label in LABEL_COLUMNS:
                codes[label].append(_encode_labels(columns.get(label), portion.num_rows, known[label]))
            add(list(zip(*(_get_previews(columns.get(c), portion.num_rows) for c in ("prompt", "text")), strict=True)))
        return FileColumns(
            num_rows=file.num_rows,
            numbers={column: np.concatenate(parts) for column, parts in numbers.items()},
            labels={label: (np.concatenate(parts), list(known[label])) for label, parts in codes.items()},
        )


def _read_source(column: str, columns: dict[str, pa.Array]) -> pa.Array | None:
    """Return a numeric column; for older files, compute it from per-token lists; `None` if the file has neither."""
    import pyarrow as pa

    pc = get_arrow_compute()
    if column == "num_tokens" and column not in columns and "token_ids" in columns:
        return pc.list_value_length(columns["token_ids"])
    if column in ("policy_version", "num_turns") and column not in columns:
        if column == "policy_version" and "oldest_version" in columns:
            return columns["oldest_version"]
        versions = columns.get("policy_versions")
        if versions is None or not pa.types.is_list(versions.type):
            return None
        return pa.array((_find_oldest if column == "policy_version" else _count_turns)(versions), from_pandas=True)
    return columns.get(column)


def _find_oldest(versions: pa.ListArray) -> np.ndarray:
    """Return the oldest policy version among each row's tokens, shape [R]; NaN without generated tokens."""
    values = versions.values.to_numpy(zero_copy_only=False).astype(np.float64)
    values = np.append(np.where(values < 0, np.inf, values), np.inf)
    offsets = versions.offsets.to_numpy()
    # `reduceat` returns the element at an offset for an empty slice, and rejects an offset after the end: hence the
    # appended element, and the mask below.
    found = np.minimum.reduceat(values, np.minimum(offsets[:-1], len(values) - 1)) if len(offsets) > 1 else values[:0]
    return np.where((np.diff(offsets) > 0) & np.isfinite(found), found, np.nan)


def _count_turns(versions: pa.ListArray) -> np.ndarray:
    """Return the number of contiguous spans of generated tokens in each row, shape [R]."""
    made = versions.values.to_numpy(zero_copy_only=False) >= 0
    offsets = versions.offsets.to_numpy()
    begins = made.copy()
    begins[1:] &= ~made[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    begins[starts] = made[starts]
    total = np.concatenate([[0], np.cumsum(begins)])
    return (total[offsets[1:]] - total[offsets[:-1]]).astype(np.float64)


def _convert_numbers(source: pa.Array | None, dtype: Any, num_rows: int) -> np.ndarray:
    import pyarrow as pa

    pc = get_arrow_compute()
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


def _encode_labels(source: pa.Array | None, num_rows: int, known: dict[str, int]) -> np.ndarray:
    """Return the code of each row's label, shape [R], and add new labels to `known`.

    The code is 0 for a row without a label, and for new labels once there are `MAX_LABELS`.
    """
    codes, texts = _factorize_previews(source, num_rows)
    for text in texts:
        if len(known) < MAX_LABELS:
            known.setdefault(text, len(known))
    return np.array([*(known.get(text, 0) for text in texts), 0], np.int64)[codes]


def _get_previews(source: pa.Array | None, num_rows: int) -> list[str]:
    codes, texts = _factorize_previews(source, num_rows)
    texts.append("")
    return [texts[code] for code in codes.tolist()]


def _factorize_previews(source: pa.Array | None, num_rows: int) -> tuple[np.ndarray, list[str]]:
    """Return each row's index into a list of truncated strings (shape [R], -1 for none), and this list."""
    import pyarrow as pa

    try:
        if source is not None:
            codes, texts = factorize_texts(source)
            cut = get_arrow_compute().utf8_slice_codeunits(texts, 0, PREVIEW_LENGTH).to_pylist()
            return codes, [text or "" for text in cut]
    except (pa.ArrowException, UnicodeDecodeError):
        pass
    return np.full(num_rows, -1), []
