"""Queries of the rollout index: filters, sorting, counts, and text search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.file_columns import LABEL_COLUMNS
from roll.dashboard.rollouts import KINDS, Rollouts, decode_row
from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.reading.rollout_files import MAX_FILE_ROWS, contains_text, open_rollout_file

__all__ = [
    "Filters",
    "build_rows",
    "count_facets",
    "find_group",
    "find_matching_rollouts",
    "query_page",
    "search_texts",
    "sort_positions",
]

_MAX_SEARCH_S = 1.5
_MAX_HITS = 500
_MAX_VALUES = 200
_MAX_GROUP_SIZE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Filters for rollouts; `None` or empty means no filter."""

    min_values: dict[str, float] = field(default_factory=dict)
    """Lower bound by column, inclusive; a row without a value does not match."""
    max_values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    correct: bool | None = None
    trained: bool | None = None
    """True if the rollout was used for an update; rollouts of filtered, failed and expired groups were not."""
    draw_id: int | None = None


def find_matching_rollouts(rollouts: Rollouts, filters: Filters) -> np.ndarray:
    """Return the index positions of the rollouts that match the filters, in ascending order."""
    mask = np.ones(len(rollouts), bool)
    for name, bound in filters.min_values.items():
        mask &= rollouts.get_column(name) >= bound
    for name, bound in filters.max_values.items():
        mask &= rollouts.get_column(name) <= bound
    for label, text in filters.labels.items():
        known = rollouts.get_label_values(label)
        mask &= rollouts.get_column(label) == (known.index(text) if text in known else -1)
    if filters.kind:
        mask &= rollouts.get_column("kind") == (KINDS.index(filters.kind) if filters.kind in KINDS else -1)
    if filters.correct is not None:
        mask &= rollouts.get_column("correct") == filters.correct
    if filters.trained is not None:
        mask &= np.isfinite(rollouts.get_column("advantage")) == filters.trained
    if filters.draw_id is not None:
        mask &= rollouts.get_column("draw_id") == filters.draw_id
    return np.flatnonzero(mask)


def sort_positions(
    rollouts: Rollouts, positions: np.ndarray, column: str, descending: bool, start: int, count: int
) -> np.ndarray:
    """Sort index positions by a column, then by row; return `count` positions of the sorted list, from index `start`.

    Rollouts without a value in the column are last.

    Raises:
        KeyError: the column does not exist.
    """
    keys = _compute_sort_keys(rollouts, column)[positions].astype(np.float64)
    if descending:
        keys = -keys
    keys[np.isnan(keys)] = np.inf  # after the negation, so that rows without a value are last in both orders
    rows = rollouts.get_column("row")[positions]
    end = start + count
    if end < len(keys) // 4:  # the rest need not be sorted
        bound = np.partition(keys, end)[end]
        kept = np.flatnonzero(keys <= bound)
        keys, rows, positions = keys[kept], rows[kept], positions[kept]
    return positions[np.lexsort((rows, keys))[start:end]]


def _compute_sort_keys(rollouts: Rollouts, column: str) -> np.ndarray:
    if column in LABEL_COLUMNS:
        texts = rollouts.get_label_values(column)
        ranks = np.empty(len(texts))
        ranks[np.array(sorted(range(len(texts)), key=texts.__getitem__))] = np.arange(len(texts))
        return ranks[rollouts.get_column(column)]
    return rollouts.get_column("row" if column in ("rollout_id", "prompt", "text") else column)


def build_rows(rollouts: Rollouts, positions: np.ndarray) -> list[dict[str, Any]]:
    """Build the page's table rows for the rollouts at the given index positions."""

    def get_values(name: str) -> list[Any]:
        return [_to_plain(value) for value in rollouts.get_column(name)[positions].tolist()]

    names = ("row", "step", "draw_id", "index", "reward", "num_tokens", "num_turns", "staleness", "advantage")
    columns = {name: get_values(name) for name in (*names, "policy_version")}
    columns["kind"] = [KINDS[code] for code in rollouts.get_column("kind")[positions].tolist()]
    columns["correct"] = [None if value is None else value > 0 for value in get_values("correct")]
    for label in LABEL_COLUMNS:
        texts = rollouts.get_label_values(label)
        columns[label] = [texts[code] for code in rollouts.get_column(label)[positions].tolist()]
    columns["rollout_id"] = [
        f"{draw}.{index}" for draw, index in zip(columns["draw_id"], columns["index"], strict=True)
    ]
    previews = rollouts.read_previews(columns["row"])
    columns["prompt"], columns["text"] = [prompt for prompt, _ in previews], [text for _, text in previews]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def query_page(
    rollouts: Rollouts, filters: Filters, *, sort: str, descending: bool, offset: int, limit: int
) -> dict[str, Any]:
    """Build the response of `/rollouts` without a text search: rows `offset` to `offset + limit` of the matches.

    Raises:
        KeyError: the column does not exist.
    """
    positions = find_matching_rollouts(rollouts, filters)
    visible = sort_positions(rollouts, positions, sort, descending, offset, limit)
    return {"total": len(rollouts), "matching": len(positions), "rows": build_rows(rollouts, visible)}


def search_texts(
    run_dir: SafeDirectory,
    rollouts: Rollouts,
    filters: Filters,
    query: str,
    cursor: str,
    time_limit_s: float = _MAX_SEARCH_S,
) -> dict[str, Any]:
    """Build the response of `/rollouts` with a text search: the rows whose prompt or answer contains a text.

    The search reads files in the order of steps until the time limit; the response has a cursor to continue from.

    Args:
        run_dir: the run's directory.
        rollouts: index of the run's rollouts.
        filters: additional conditions.
        query: the text to search for.
        cursor: cursor of the last response; empty at the beginning.
        time_limit_s: maximum time of this search.
    """
    rows = np.sort(rollouts.get_column("row")[find_matching_rollouts(rollouts, filters)])
    first = int(cursor) if cursor.isdecimal() and len(cursor) < 17 else 0
    todo = rows[np.searchsorted(rows, first) :]
    ended, hits, num_hits = time.monotonic() + time_limit_s, [], 0
    at = 0
    while at < len(todo) and (at == 0 or time.monotonic() < ended) and num_hits < _MAX_HITS:
        file = int(todo[at]) // MAX_FILE_ROWS
        end = int(np.searchsorted(todo, (file + 1) * MAX_FILE_ROWS))
        try:
            places = _find_texts(run_dir, decode_row(file * MAX_FILE_ROWS)[0], query)
        except RunDirectoryError:  # the file was replaced: the index will report it
            places = np.empty(0, np.int64)
        found = np.intersect1d(todo[at:end], file * MAX_FILE_ROWS + places)[: _MAX_HITS - num_hits]
        num_hits += len(found)
        hits.append(found)
        at = end if num_hits < _MAX_HITS else int(np.searchsorted(todo, found[-1] + 1))
    complete = at >= len(todo)
    found = np.concatenate(hits) if hits else np.empty(0, np.int64)
    order = np.argsort(rollouts.get_column("row"), kind="stable")
    positions = order[np.searchsorted(rollouts.get_column("row")[order], found)]
    searched = len(rows) - len(todo) + at
    return {
        "total": len(rows),
        "matching": len(found),
        "searched": searched,
        "complete": complete,
        "cursor": None if complete else str(int(todo[at])),
        "rows": build_rows(rollouts, positions),
    }


def _find_texts(run_dir: SafeDirectory, name: str, query: str) -> np.ndarray:
    """Return the numbers of the rows in a file whose prompt or text contains `query`, ignoring case."""
    with open_rollout_file(run_dir, name) as file:
        hits = [np.empty(0, bool)]
        for portion in file.iter_batches(("prompt", "text")):
            found = [contains_text(column, query) for column in portion.columns]
            hits.append(np.logical_or.reduce(found) if found else np.zeros(portion.num_rows, bool))
        return np.flatnonzero(np.concatenate(hits))


def count_facets(rollouts: Rollouts) -> dict[str, Any]:
    """Build the response of `/facets`: the count of each label, most frequent first, and the range of each number."""
    found: dict[str, Any] = {}
    for label in LABEL_COLUMNS:
        texts = rollouts.get_label_values(label)
        counts = np.bincount(rollouts.get_column(label), minlength=len(texts))
        chosen = [code for code in np.argsort(-counts, kind="stable")[:_MAX_VALUES].tolist() if counts[code]]
        found[label] = [{"value": texts[code], "count": int(counts[code])} for code in chosen]
    for name in ("step", "reward", "num_tokens", "num_turns", "staleness", "advantage"):
        column = rollouts.get_column(name)
        known = column[np.isfinite(column)]
        found[name] = (
            {"min": _to_plain(known.min().item()), "max": _to_plain(known.max().item())} if len(known) else None
        )
    kinds = np.bincount(rollouts.get_column("kind"), minlength=len(KINDS))
    found["kind"] = [{"value": kind, "count": int(count)} for kind, count in zip(KINDS, kinds, strict=True) if count]
    return found


def _to_plain(value: float) -> float | int | None:
    """Convert a number for JSON: integral floats to `int`, non-finite values to `None`."""
    if not math.isfinite(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def find_group(rollouts: Rollouts, row: int) -> np.ndarray:
    """Return the index positions of the rollouts in the group of `row` (same draw, kind and step), in group order.

    At most `_MAX_GROUP_SIZE` positions are returned.

    Raises:
        KeyError: the row does not exist.
    """
    at = rollouts.find_position(row)
    same = rollouts.get_column("draw_id") == rollouts.get_column("draw_id")[at]
    for name in ("kind", "step"):
        same &= rollouts.get_column(name) == rollouts.get_column(name)[at]
    return np.flatnonzero(same)[np.argsort(rollouts.get_column("index")[same], kind="stable")][:_MAX_GROUP_SIZE]
