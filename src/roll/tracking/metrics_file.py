"""`metrics.jsonl`: one line per training step and one per evaluation, the source of all tables and plots.

    {"step": 7, "kind": "train", "reward/mean": 0.5, …}
    {"step": 10, "kind": "evaluation", "eval/accuracy": 0.9, …}

Invariants:
    - a line is durable when `append` returns; a crash leaves at most one incomplete line at the end, which `truncate`
      drops;
    - there is one line per step and kind: a step that is recorded again replaces its line;
    - keys are sorted, and a key that occurred once is in all later lines of that type (`null` without a value).
      Therefore readers get a stable schema, and identical runs write identical lines (except for durations, rates and
      memory);
    - NaN and infinities are written as `null`, since JSON cannot represent them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from roll.config.former_names import rename_metrics
from roll.errors import RunDirectoryError
from roll.tracking import atomic
from roll.tracking.reading.files import SafeDirectory

__all__ = ["MetricsFile", "RowKind", "read_metrics", "read_untrusted_metrics"]

logger = logging.getLogger(__name__)

RowKind: TypeAlias = Literal["train", "evaluation"]
_RESERVED_KEYS = ("step", "kind")
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LINE_BYTES = 4 * 2**20
_MAX_LINES = 2**20
_MAX_VALUES = 2**23


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of `metrics.jsonl` in order; an empty list if the file does not exist."""
    return [row for row, _ in _read_rows(path)]


def read_untrusted_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file that may be malicious; lines of more than 4 MiB are dropped.

    Raises:
        RunDirectoryError: The file is not a regular file, is behind a link, or is too large to be read into memory.
    """
    if not os.path.lexists(path):
        return []
    found: list[dict[str, Any]] = []
    num_lines = num_values = 0
    with SafeDirectory(path.parent).open(path.name) as file:
        if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
            raise RunDirectoryError(
                f"'{path.name}' is larger than {_MAX_FILE_BYTES // 2**20} MiB: open it with `roll dashboard`."
            )
        for line in _read_lines(file):
            num_lines += 1
            for row in _parse(line):
                num_values += len(row)
                # `json` allocates a name for every row: interned, a million rows share the same strings.
                found.append({sys.intern(name): value for name, value in row.items()})
            if num_lines > _MAX_LINES or num_values > _MAX_VALUES:
                raise RunDirectoryError(
                    f"'{path.name}' has more than {_MAX_LINES:,} lines or {_MAX_VALUES:,} values: open it with "
                    "`roll dashboard`."
                )
    return found


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; skip lines of more than `_MAX_LINE_BYTES` bytes."""
    while line := file.readline(_MAX_LINE_BYTES):
        if len(line) < _MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES)


class MetricsFile:
    """Appends lines to `path`, which may already exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[tuple[RowKind, int]] = set()
        self._keys: dict[str, list[str]] = {}
        self._warned: set[str] = set()
        self._read_steps_and_keys()

    def append(self, step: int, kind: RowKind, metrics: Mapping[str, float]) -> None:
        """Append one line, durably; an earlier line of this step and kind is removed.

        Raises:
            OSError: The line cannot be written; the file is unchanged.
        """
        if (kind, step) in self._seen:
            self._rewrite(lambda row: (row["kind"], row["step"]) != (kind, step))
        values = dict.fromkeys(self._keys.get(kind, ())) | self._replace_nonfinite(step, metrics)
        self._keys[kind] = sorted(values)
        row = {"step": step, "kind": kind} | {name: values[name] for name in self._keys[kind]}
        atomic.append(self._path, json.dumps(row, allow_nan=False).encode() + b"\n")
        self._seen.add((kind, step))

    def truncate(self, step: int) -> int:
        """Drop the lines of steps after `step`, and an incomplete last line; return the number of dropped lines."""
        return self._rewrite(lambda row: row["step"] <= step)

    def _replace_nonfinite(self, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        for name, value in metrics.items():
            number = float(value)
            values[name] = number if math.isfinite(number) else None
            if values[name] is None and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "metric '%s' is %s at step %d: it is recorded as null, and later occurrences are not reported",
                    name,
                    number,
                    step,
                )
        return values

    def _rewrite(self, keep: Any) -> int:
        rows = _read_rows(self._path)
        kept = [text for row, text in rows if keep(row)]
        content = b"".join(kept)
        dropped = len(rows) - len(kept)
        if self._path.exists() and self._path.stat().st_size != len(content):
            atomic.write_bytes(self._path, content)
        self._read_steps_and_keys()
        return dropped

    def _read_steps_and_keys(self) -> None:
        """Read the steps and the metric names of the file."""
        rows = read_metrics(self._path)
        self._seen = {(row["kind"], row["step"]) for row in rows}
        self._keys = {row["kind"]: [name for name in row if name not in _RESERVED_KEYS] for row in rows}


def _read_rows(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return each complete line, parsed and as raw bytes."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [(row, line) for line in lines for row in _parse(line)]


def _parse(line: bytes) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        # A line without a newline is incomplete, even if it parses: a number may lack digits.
        is_row = line.endswith(b"\n") and isinstance(row, dict)
        # `True` is an int for isinstance, but not a step.
        if is_row and type(row.get("step")) is int and isinstance(row.get("kind"), str):
            yield rename_metrics(row)
