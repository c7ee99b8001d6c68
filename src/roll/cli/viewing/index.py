"""The rollouts of a run for looking at: what a list of them shows, filters, and one rollout in full.

rollouts/*.parquet, one file at a time ──► rows of the list (no texts, no tokens) ──► those that a filter takes
                                                                     └──► one rollout, read when it is opened
"""

from __future__ import annotations

import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roll.errors import UserError
from roll.registry import nearest
from roll.tracking.visible import shortened

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "Filter", "RolloutFile", "Row", "parse_filter", "rollout_files", "sorted_rows"]

NUMBERS = ("step", "draw", "index", "reward", "advantage", "tokens")
WORDS = ("kind", "domain", "verdict", "status", "finish", "correct", "engine", "id")
COLUMNS = (*NUMBERS, *WORDS)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"([a-z_]+)(<=|>=|!=|<|>|=)(.*)", re.DOTALL)
_TEXTS = ["prompt", "text"]
_READ = [
    "step", "rollout_id", "draw_id", "index", "domain", "policy_versions", "finish_reason", "status", "reward",
    "verdict", "correct", "advantage", "engine_id",
]  # fmt: skip
_IN_FULL = [
    "step", "rollout_id", "reward", "correct", "advantage", "verdict", "finish_reason", "status", "cause", "components",
    "messages", "text", "answer",
]  # fmt: skip
_TOKENS = ["token_ids", "logprobs", "policy_versions"]
_FILE = re.compile(r"(eval-)?step-(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout as a list shows it."""

    file: RolloutFile
    number: int
    """In its file, from 0."""
    values: dict[str, Any]
    """By the names in `COLUMNS`; `None` where the rollout has none."""

    @property
    def group(self) -> tuple[Path, int]:
        """The same for all attempts at one prompt."""
        return self.file.path, self.values["draw"]


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of rollouts: of a step, or of an evaluation."""

    path: Path
    kind: Literal["train", "eval"]
    step: int

    def rows(self, wanted: Filter) -> Iterator[Row]:
        """Those that a filter takes.

        Raises:
            UserError: the file is damaged, or was written by something else.
        """
        import pyarrow.compute as pc

        if not wanted.may_take({"kind": self.kind, "step": self.step}):
            return
        table = self._table([*_READ, *(_TEXTS if wanted.words else ())])
        lengths = table["policy_versions"]
        if lengths.null_count == len(lengths):  # an earlier version's file
            lengths = self._table(["token_ids"])["token_ids"]
        texts = [table[name].to_pylist() for name in _TEXTS] if wanted.words else []
        made = pc.call_function("list_value_length", [lengths]).to_pylist()
        for number, row in enumerate(table.select([c for c in _READ if c != "policy_versions"]).to_pylist()):
            values = {
                "step": self.step if row["step"] is None else row["step"],
                "draw": row["draw_id"],
                "index": row["index"],
                "reward": row["reward"],
                "advantage": row["advantage"],
                "tokens": made[number],
                "kind": self.kind,
                "domain": row["domain"],
                "verdict": row["verdict"],
                "status": row["status"],
                "finish": row["finish_reason"],
                "correct": None if row["correct"] is None else "yes" if row["correct"] else "no",
                "engine": row["engine_id"],
                "id": row["rollout_id"],
            }
            if wanted.takes(values, [column[number] or "" for column in texts]):
                yield Row(self, number, values)

    def rollout(self, number: int, *, tokens: bool = False) -> dict[str, Any]:
        """What can be read of one rollout; with `tokens` its tokens instead.

        Raises:
            UserError: as `rows`; or the file has become shorter, as by a resume.
        """
        found = self._table(_TOKENS if tokens else _IN_FULL).slice(number, 1).to_pylist()
        if not found:
            raise UserError(f"'{self.path}' holds fewer rollouts than before: read the files again.")
        return found[0]

    def _table(self, columns: list[str]) -> pa.Table:
        """Columns, of the types that a run writes; those that an earlier version did not write are null."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from roll.tracking.rollout_table import rollout_schema

        schema = pa.schema([rollout_schema().field(name) for name in columns])
        try:
            present = pq.read_schema(self.path).names
            if "rollout_id" not in present:
                raise ValueError("it has no column 'rollout_id'.")
            read = pq.read_table(self.path, columns=list({"rollout_id", *columns} & {*present}), partitioning=None)
            found = [read[f.name] if f.name in present else pa.nulls(len(read), f.type) for f in schema]
            table = pa.table(found, names=columns).cast(schema, safe=False)
            table.validate(full=True)  # of texts, whether they are UTF-8
            return table
        except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
            first = shortened((str(error).splitlines() or [""])[0], 200)
            raise UserError(f"'{self.path}' holds no rollouts that can be read: {first}") from error


def rollout_files(directory: Path) -> list[RolloutFile]:
    """Files of a run, the newest step first; of a step, its evaluation after it."""
    found = []
    for path in directory.glob("*.parquet"):
        if (match := _FILE.fullmatch(path.name)) and path.is_file():
            found.append(RolloutFile(path, "eval" if match[1] else "train", int(match[2])))
    return sorted(found, key=lambda file: (-file.step, file.kind != "train"))


@dataclass(frozen=True, slots=True)
class Filter:
    """What rollouts must be like: all conditions hold, and all words stand in prompt or answer."""

    conditions: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    words: tuple[str, ...] = ()
    """Lower case."""

    def may_take(self, known: dict[str, Any]) -> bool:
        """Whether it could take a rollout of which only these values are known."""
        return all(holds(known[name]) for name, holds in self.conditions if name in known)

    def takes(self, values: dict[str, Any], texts: Sequence[str]) -> bool:
        """Whether a rollout is one of them."""
        if not self.may_take(values):
            return False
        lowered = [text.lower() for text in texts] if self.words else []
        return all(any(word in text for text in lowered) for word in self.words)


def parse_filter(text: str) -> Filter:
    """A filter as it is typed: `reward>0.5 step=3..7 correct=no "some words"`.

    Raises:
        UserError: there is no such column, or a value does not suit it.
    """
    try:
        parts = shlex.split(text)
    except ValueError:
        raise UserError(f"the filter {text!r} has a quotation mark without its other half.") from None
    conditions, words = [], []
    for part in parts:
        match = _CONDITION.fullmatch(part)
        if match is None:
            words.append(part.lower())
            continue
        name, sign, value = match.groups()
        if name not in COLUMNS:
            raise UserError(f"rollouts have no '{name}'.{nearest(name, COLUMNS)} They have: {', '.join(COLUMNS)}.")
        conditions.append((name, _number(name, sign, value) if name in NUMBERS else _word(name, sign, value)))
    return Filter(tuple(conditions), tuple(words))


def _number(name: str, sign: str, value: str) -> Callable[[Any], bool]:
    try:
        low, high = (float(end) for end in (value.split("..") if ".." in value else (value, value)))
    except ValueError:
        raise UserError(f"'{name}{sign}{value}': {name} is a number: write {name}>0.5, or {name}=3..7.") from None
    if math.isnan(low) or math.isnan(high):
        raise UserError(f"'{name}{sign}{value}': nothing compares with NaN. Write {name}>0.5, or {name}=3..7.")
    if low == high:
        return lambda found: found is not None and _OPERATORS[sign](found, low)
    if sign not in ("=", "!="):
        raise UserError(f"'{name}{sign}{value}': a range goes with = or !=: write {name}={value}.")
    return lambda found: found is not None and (low <= found <= high) is (sign == "=")


def _word(name: str, sign: str, value: str) -> Callable[[Any], bool]:
    if sign not in ("=", "!="):
        raise UserError(f"'{name}{sign}{value}': {name} is no number: write {name}=… or {name}!=….")
    return lambda found: ((found or "") == value) is (sign == "=")


def sorted_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows by a column, `-` before its name for high to low; those without a value last.

    Raises:
        UserError: there is no such column.
    """
    name = column.removeprefix("-")
    if name not in COLUMNS:
        raise UserError(f"rollouts have no '{name}'.{nearest(name, COLUMNS)} They have: {', '.join(COLUMNS)}.")
    with_value = sorted((row for row in rows if _is_value(row.values[name])), key=lambda row: row.values[name])
    if column.startswith("-"):
        with_value.reverse()
    return [*with_value, *(row for row in rows if not _is_value(row.values[name]))]


def _is_value(value: Any) -> bool:
    return value is not None and value == value
