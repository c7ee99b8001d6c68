"""Read the rollouts of a run for viewing: the rows of a list, filtered, and single rollouts in full.

rollouts/*.parquet, in portions ──► rows of the list (no text, no tokens) ──► rows that match the filter
                                └──► one rollout, read when it is opened
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from roll.errors import RunDirectoryError, UserError
from roll.registry import did_you_mean
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.reading.rollout_files import (
    RolloutReader,
    cast_to_schema,
    contains_text,
    factorize_texts,
    get_arrow_compute,
    open_rollout_file,
    parse_file_name,
)
from roll.tracking.rollout_table import build_rollout_schema
from roll.types import FinishReason, RolloutStatus

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "Filter", "RolloutFile", "Row", "list_rollout_files", "parse_filter", "sort_rows"]

NUMBER_COLUMNS = ("step", "draw", "index", "reward", "advantage", "tokens")
TEXT_COLUMNS = ("kind", "domain", "verdict", "status", "finish", "correct", "engine", "id")
COLUMNS = (*NUMBER_COLUMNS, *TEXT_COLUMNS)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION_PATTERN = re.compile(r"([a-z_]+)(<=|>=|!=|<|>|=)(.*)", re.DOTALL)
_SEARCHED_COLUMNS = ("prompt", "text")
_DETAIL_COLUMNS = [
    "step", "rollout_id", "reward", "correct", "advantage", "verdict", "finish_reason", "status", "cause", "components",
    "messages", "text", "answer",
]  # fmt: skip
_TOKEN_COLUMNS = ["token_ids", "logprobs", "policy_versions"]
_COLUMN_VALUES = {
    "kind": ("train", "eval"),
    "correct": ("yes", "no"),
    "status": tuple(str(status) for status in RolloutStatus),
    "finish": get_args(FinishReason),
}
"""Columns with a fixed set of values."""


class _RowFields(NamedTuple):
    """The fields of a rollout that the list of rollouts shows; missing fields are `None`."""

    step: int | None
    rollout_id: str | None
    draw_id: int | None
    index: int | None
    domain: str | None
    finish_reason: str | None
    status: str | None
    reward: float | None
    verdict: str | None
    correct: float | None
    advantage: float | None
    engine_id: str | None


_ROW_COLUMNS = _RowFields._fields


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout in the list of rollouts."""

    file: RolloutFile
    number: int
    """Position of the rollout in its file, from 0."""
    values: dict[str, Any]
    """Values by column name in `COLUMNS`; missing values are `None`."""

    @property
    def group(self) -> tuple[Path, int]:
        """The group key, equal for all attempts at one prompt."""
        return self.file.path, self.values["draw"]


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file with the rollouts of one step or one evaluation."""

    path: Path
    kind: Literal["train", "eval"]
    step: int

    def read_excerpts(self, rows: Sequence[Row], max_length: int) -> list[tuple[str, str]]:
        """Return the beginnings of the prompt and of the answer of each row in `rows`.

        Args:
            rows: rows of this file.
            max_length: maximum length of each string.

        Raises:
            UserError: the file is corrupted, or was replaced.
        """
        places = [row.number for row in rows]
        with self._open() as file:
            prompts, texts = (file.read_excerpts(places, name, max_length) for name in _SEARCHED_COLUMNS)
        return list(zip(prompts, texts, strict=True))

    def read_rows(self, row_filter: Filter) -> Iterator[Row]:
        """Yield the rows that match a filter.

        Raises:
            UserError: the file is corrupted, or was not written by a run.
        """

        # The name of a file decides its kind and step: files that cannot match are not opened.
        if not row_filter.may_match({"kind": self.kind, "step": self.step}):
            return
        with self._open() as file:
            lengths = next((name for name in ("num_tokens", "policy_versions") if name in file.names), "token_ids")
            start = 0
            for record_batch in file.iter_batches(
                {*_ROW_COLUMNS, *(_SEARCHED_COLUMNS if row_filter.words else ()), lengths}
            ):
                hits = _match_words(record_batch, row_filter.words)
                made = _count_tokens(record_batch, lengths)
                columns = (_read_column(record_batch, name) for name in _ROW_COLUMNS)
                for place, row in enumerate(starmap(_RowFields, zip(*columns, strict=True))):
                    values = self._build_values(row, made[place])
                    if hits[place] and row_filter.may_match(values):
                        yield Row(self, start + place, values)
                start += record_batch.num_rows

    def _build_values(self, row: _RowFields, tokens: int | None) -> dict[str, Any]:
        return {
            "step": self.step if row.step is None else row.step,
            "draw": row.draw_id,
            "index": row.index,
            "reward": row.reward,
            "advantage": row.advantage,
            "tokens": tokens,
            "kind": self.kind,
            "domain": row.domain,
            "verdict": row.verdict,
            "status": row.status,
            "finish": row.finish_reason,
            "correct": None if row.correct is None else "yes" if row.correct else "no",
            "engine": row.engine_id,
            "id": row.rollout_id,
        }

    def read_rollout(self, index: int, *, tokens: bool = False) -> dict[str, Any]:
        """Return the text and scores of a rollout by column name, or its token columns if `tokens` is true.

        `index` is the position of the rollout in this file.

        Raises:
            UserError: the file is corrupted, was not written by a run, or has become shorter, for example after a
                resume.
        """
        columns = _TOKEN_COLUMNS if tokens else _DETAIL_COLUMNS
        with self._open() as file:
            return dict.fromkeys(columns) | file.read_rows([index], columns)[0]

    @contextlib.contextmanager
    def _open(self) -> Iterator[RolloutReader]:
        with open_rollout_file(SafeDirectory(self.path.parent.parent), self.path.name) as file:
            if "rollout_id" not in file.names:
                raise RunDirectoryError(
                    f"the rollouts in '{self.path}' cannot be read: the column 'rollout_id' is missing."
                )
            yield file


def _select_existing(record_batch: pa.RecordBatch, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in record_batch.schema.names]


def _read_column(record_batch: pa.RecordBatch, name: str) -> list[Any]:
    """Return the values of a column, one per row (`None` if the column is missing). Identical strings share one
    object."""
    import pyarrow as pa

    if name not in record_batch.schema.names:
        return [None] * record_batch.num_rows
    written = build_rollout_schema().field(name).type
    if not (pa.types.is_string(written) or pa.types.is_dictionary(written)):
        return cast_to_schema(record_batch.select([name])).column(0).to_pylist()
    codes, texts = factorize_texts(record_batch.column(name))
    values = [*texts.to_pylist(), None]
    return [values[code] for code in codes.tolist()]


def _match_words(record_batch: pa.RecordBatch, words: Sequence[str]) -> np.ndarray:
    """Return a mask [R] of the rows in which every word occurs in the prompt or the answer."""
    found = np.ones(record_batch.num_rows, bool)
    for word in words:
        texts = [
            contains_text(record_batch.column(name), word) for name in _select_existing(record_batch, _SEARCHED_COLUMNS)
        ]
        found &= np.logical_or.reduce(texts) if texts else np.zeros(record_batch.num_rows, bool)
    return found


def _count_tokens(record_batch: pa.RecordBatch, name: str) -> list[int | None]:
    """Return the number of tokens of each answer, shape [R]; all are `None` if there is no column `name`.

    The column contains numbers or, in older files, lists; the length of a list is returned.
    """
    if name not in record_batch.schema.names:
        return [None] * record_batch.num_rows
    column = cast_to_schema(record_batch.select([name])).column(0)
    return column.to_pylist() if name == "num_tokens" else get_arrow_compute().list_value_length(column).to_pylist()


def list_rollout_files(directory: Path) -> list[RolloutFile]:
    """Return the files of a run's `rollouts/`, the newest step first, each step's evaluation after its rollouts."""
    found = []
    for name in SafeDirectory(directory.parent).list_stamps(directory.name):
        if (place := parse_file_name(name)) and not (directory / name).is_dir():
            found.append(RolloutFile(directory / name, "eval" if place[1] == "eval" else "train", place[0]))
    return sorted(found, key=lambda file: (-file.step, file.kind != "train"))


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter for rollouts: all conditions must hold, and all words must occur in the prompt or the answer."""

    conditions: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    words: tuple[str, ...] = ()
    """Words in lower case."""

    def may_match(self, values: dict[str, Any]) -> bool:
        """Return whether all conditions on the columns in `values` hold; conditions on other columns are ignored."""
        return all(holds(values[name]) for name, holds in self.conditions if name in values)


def parse_filter(text: str) -> Filter:
    """Parse a filter such as `reward>0.5 step=3..7 correct=no "some words"`.

    Raises:
        UserError: a column does not exist, or a value has the wrong type for its column.
    """
    try:
        parts = shlex.split(text)
    except ValueError:
        raise UserError(f"the filter {text!r} has an unclosed quotation mark.") from None
    conditions, words = [], []
    for part in parts:
        match = _CONDITION_PATTERN.fullmatch(part)
        if match is None:
            words.append(part.lower())
            continue
        name, sign, value = match.groups()
        if name not in COLUMNS:
            raise UserError(f"unknown column '{name}'.{did_you_mean(name, COLUMNS)} Known: {', '.join(COLUMNS)}.")
        if sign == "=" and any(part != other and other.startswith(f"{name}=") for other in parts):
            raise UserError(
                f"the filter has several conditions `{name}=…`: keep one of them, or use a range such as {name}=3..7."
            )
        conditions.append(
            (
                name,
                _parse_number_condition(name, sign, value)
                if name in NUMBER_COLUMNS
                else _parse_word_condition(name, sign, value),
            )
        )
    return Filter(tuple(conditions), tuple(words))


def _parse_number_condition(name: str, sign: str, value: str) -> Callable[[Any], bool]:
    try:
        low, high = (float(end) for end in (value.split("..") if ".." in value else (value, value)))
    except ValueError:
        raise UserError(f"'{name}{sign}{value}': {name} must be a number, as in {name}>0.5 or {name}=3..7.") from None
    if math.isnan(low) or math.isnan(high):
        raise UserError(
            f"'{name}{sign}{value}': NaN cannot be compared; use a number, as in {name}>0.5 or {name}=3..7."
        )
    if low == high:
        return lambda found: found is not None and _OPERATORS[sign](found, low)
    if sign not in ("=", "!="):
        raise UserError(f"'{name}{sign}{value}': a range must follow = or !=, as in {name}={value}.")
    return lambda found: found is not None and (low <= found <= high) is (sign == "=")


def _parse_word_condition(name: str, sign: str, value: str) -> Callable[[Any], bool]:
    if sign not in ("=", "!="):
        raise UserError(f"'{name}{sign}{value}': {name} is not a number: use {name}=… or {name}!=….")
    if value not in _COLUMN_VALUES.get(name, (value,)):
        allowed = _COLUMN_VALUES[name]
        raise UserError(f"'{name}{sign}{value}': {name} must be {' or '.join(allowed)}.{did_you_mean(value, allowed)}")
    return lambda found: ((found or "") == value) is (sign == "=")


def sort_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Sort rows by a column, in descending order with `-` before its name; rows without a value are last.

    Raises:
        UserError: the column does not exist.
    """
    name = column.removeprefix("-")
    if name not in COLUMNS:
        raise UserError(f"unknown column '{name}'.{did_you_mean(name, COLUMNS)} Known: {', '.join(COLUMNS)}.")
    with_value = [row for row in rows if _is_value(row.values[name])]
    with_value.sort(key=lambda row: row.values[name], reverse=column.startswith("-"))
    return [*with_value, *(row for row in rows if not _is_value(row.values[name]))]


def _is_value(value: Any) -> bool:
    return value is not None and value == value  # NaN differs from itself
