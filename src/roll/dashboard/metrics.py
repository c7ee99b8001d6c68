"""Reads `metrics.jsonl` into columns; later reads process only appended lines."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll.config.former_names import rename_metrics
from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory, Tail, parse_json

__all__ = ["MetricTable", "Metrics"]

_MAX_NAMES = 5000
_MAX_NAME_LENGTH = 500
_MAX_VALUES = 2**25
"""Maximum number of values of one type of row, including missing ones: 256 MiB."""
_MAX_STEP_S = 1e9
_MAX_POINTS = 2000
_MAX_STEP = 2**31 - 1
KINDS = {"train": "train", "evaluation": "eval"}
"""Maps the types of rows in the file to their names on the page."""


class MetricTable:
    """The metrics of training steps or of evaluations: steps, seconds since the start, and a column per metric."""

    def __init__(self) -> None:
        # `array` takes 8 bytes for a value and grows in place, unlike a list of floats or a NumPy array.
        self.steps = array("q")
        self.time_s = array("d")
        self.columns: dict[str, array[float]] = {}

    @property
    def is_full(self) -> bool:
        """True if the table has the maximum number of values, so that no more rows are accepted."""
        return (len(self.columns) + 1) * (len(self.steps) + 1) > _MAX_VALUES

    def add(self, step: int, time_s: float, row: dict[str, Any]) -> None:
        """Append a row; values that are not finite numbers become NaN."""
        for name, value in row.items():
            if name in ("step", "kind"):
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= _MAX_NAMES or len(name) > _MAX_NAME_LENGTH or self.is_full:
                    continue
                column = self.columns[name] = array("d", [math.nan]) * len(self.steps)
            column.append(_to_number(value))
        self.steps.append(step)
        self.time_s.append(time_s)
        for column in self.columns.values():
            if len(column) < len(self.steps):
                column.append(math.nan)

    def get_last(self, name: str) -> float | None:
        """Return the newest finite value of a metric; `None` if the metric has none."""
        return next((value for value in reversed(self.columns.get(name, ())) if not math.isnan(value)), None)


class Metrics:
    """The metrics of one run.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: SafeDirectory) -> None:
        self._tail = Tail(run_dir, "metrics.jsonl")
        self.is_asynchronous = False
        """True if evaluations run concurrently with steps, so that their time does not add to the run's time."""
        self.problem = ""
        self._clear()

    def _clear(self) -> None:
        self.tables: dict[str, MetricTable] = {kind: MetricTable() for kind in KINDS.values()}
        self._elapsed_s = 0.0
        self._malformed = self._left_out = 0

    def refresh(self) -> None:
        """Read new lines. If the file cannot be read, `problem` contains the reason."""
        try:
            for restarted, lines in self._tail.read_chunks():
                if restarted:
                    self._clear()
                for line in lines.splitlines():
                    self._read(line)
            malformed = f"{self._malformed} lines of metrics.jsonl are malformed." if self._malformed else ""
            left_out = f"{self._left_out} lines of metrics.jsonl are too many to show." if self._left_out else ""
            self.problem = " ".join(filter(None, (malformed, left_out)))
        except RunDirectoryError as error:
            self.problem = str(error)

    def _read(self, line: bytes) -> None:
        try:
            row = parse_json(line)
            kind, step = KINDS[row["kind"]], row["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self._malformed += bool(line.strip())
            return
        if not isinstance(row, dict) or type(step) is not int or not 0 <= step <= _MAX_STEP:
            self._malformed += 1
            return
        if self.tables[kind].is_full:
            self._left_out += 1
            return
        spent = _to_number(row.get("time/step_s" if kind == "train" else "time/evaluate_s"))
        if 0 < spent < _MAX_STEP_S and not (self.is_asynchronous and kind == "eval"):
            self._elapsed_s += spent
        self.tables[kind].add(step, self._elapsed_s, rename_metrics(row))

    def get_version_before(self, step: int) -> float:
        """Return the trainer's policy version at the start of a step; NaN if it is unknown."""
        table = self.tables["train"]
        at = bisect.bisect_left(table.steps, step) - 1
        column = table.columns.get("policy_version")
        if column is None:
            return math.nan
        return column[at] if at >= 0 else 0.0

    def build_overview(self) -> dict[str, Any]:
        """Return the response of `/metrics`: metric names, and the steps and times of training and evaluation."""
        kinds = {
            kind: {"steps": list(table.steps), "time_s": list(table.time_s)} for kind, table in self.tables.items()
        }
        found = [{"name": name, "kind": kind} for kind, table in self.tables.items() for name in sorted(table.columns)]
        return {"names": found, "kinds": kinds}

    def build_series(self, names: Sequence[str], kind: str, since: int | None, *, full: bool = False) -> dict[str, Any]:
        """Return the response of `/series`: the values of some metrics at the same steps.

        Long series are downsampled: the minima and maxima of short intervals are kept.

        Args:
            names: names of metrics; unknown names are ignored.
            kind: `train` or `eval`.
            since: a step; only later steps are returned.
            full: whether to return all rows without downsampling, as needed for a mean, a smoothed curve or a table.

        Raises:
            KeyError: `kind` is neither `train` nor `eval`.
        """
        table = self.tables[kind]
        first = 0 if since is None else bisect.bisect_right(table.steps, since)
        columns = {name: np.array(table.columns[name])[first:] for name in names if name in table.columns}
        num_rows = len(table.steps) - first
        kept = np.arange(num_rows) if full else _downsample(list(columns.values()), num_rows)
        return {
            "steps": np.array(table.steps, dtype=np.int64)[first:][kept].tolist(),
            "time_s": np.array(table.time_s)[first:][kept].round(3).tolist(),
            "series": {name: nan_to_none(column[kept]) for name, column in columns.items()},
        }


def nan_to_none(values: np.ndarray) -> list[float | None]:
    """Convert an array to a list for JSON, with `None` for NaN and infinities."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _to_number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return math.nan
        return number if math.isfinite(number) else math.nan
    return math.nan


def _downsample(columns: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the indices of the rows to show.

    If there are few rows, all of them are shown. Otherwise, each interval of steps contributes the rows with the
    minimum and the maximum of each column.
    """
    if num_rows <= _MAX_POINTS or not columns:
        return np.arange(num_rows)[: None if columns else _MAX_POINTS]
    bounds = np.linspace(0, num_rows, max(100, _MAX_POINTS // (2 * len(columns))) + 1).astype(int)
    kept = {0, num_rows - 1}
    for column in columns:
        low, high = np.where(np.isnan(column), np.inf, column), np.where(np.isnan(column), -np.inf, column)
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            kept |= {start + int(low[start:end].argmin()), start + int(high[start:end].argmax())}
    return np.array(sorted(kept))
