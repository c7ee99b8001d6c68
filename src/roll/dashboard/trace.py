"""Reads `trace.json` into lanes: the activity of controller, trainer, engines, rewards and rollouts over time.

    trace.json ─ each event once ─► spans (24 bytes each) ─ a window, short ones merged ─► lanes for the page

A rollout's states are spans between two events. A rollout has a lane from its first event to its last; then another
rollout may use the lane.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from roll.dashboard.columns import ColumnBlocks, Columns
from roll.errors import RunDirectoryError
from roll.records import read_record
from roll.tracking.reading.files import SafeDirectory, Tail, parse_json
from roll.tracking.rollout_trace import ENGINES, JUDGE, ROLLOUTS

__all__ = ["Trace", "TracedStep"]

_COLUMN_TYPES = {"start": np.float64, "duration": np.float32, "lane": np.int16, "name": np.int16, "offset": np.int64}
_MAX_NAMES = 4096
_MAX_LANES = 16_384
_MAX_SPANS = 20_000_000
_MAX_OPEN_SPANS = 100_000
"""Maximum number of open spans, and of unfinished rollouts; the oldest are dropped."""
_MAX_NAME_LENGTH = 200
_MAX_ARGS_LENGTH = 4096
_FORWARD_PHASES = ("old_logprobs", "reference", "values", "snapshots")
_TRAINER_PHASES = ("train", "train_critic", "forward_backward", "optimizer", *_FORWARD_PHASES)
_LANE_KINDS = dict.fromkeys(_TRAINER_PHASES, "trainer") | {"reward": "reward", "environment": "environment"}


class _Event(NamedTuple):
    """An event of the trace: a line with a valid phase, name and time."""

    ph: str
    name: str
    ts: float
    dur: Any = None
    pid: Any = None
    tid: Any = None
    id: Any = None
    args: Any = None


@dataclass(slots=True)
class TracedStep:
    """A step of the run; times are in seconds since the first event of the trace."""

    step: int
    start_s: float
    end_s: float
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each phase, without nested phases."""
    held_back_by: str | None = None
    """The longest phase."""


class Trace:
    """The trace of one run, which is read incrementally: each `refresh` takes a limited time."""

    def __init__(self, run_dir: SafeDirectory) -> None:
        self._run_dir = run_dir
        self._tail = Tail(run_dir, "trace.json", end=b",\n")
        self._reading: Any = None
        self.problem = ""
        self._clear()

    def _clear(self) -> None:
        self._spans = ColumnBlocks(_COLUMN_TYPES)
        self._names: dict[str, int] = {"…": 0}
        self._lanes: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, str], float] = {}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._first_us = math.inf

    @property
    def is_reading(self) -> bool:
        """True if the last `refresh` ended before the end of the file."""
        return self._reading is not None

    @property
    def bytes_left(self) -> int:
        """Number of bytes that have not been read yet."""
        stamp = self._run_dir.get_stamp("trace.json")
        return max(0, stamp.size - self._tail.offset - len(self._tail.rest)) if stamp is not None else 0

    def refresh(self, time_limit_s: float) -> None:
        """Read new events for a limited time. If the file cannot be read, `problem` contains the reason."""
        ended = time.monotonic() + time_limit_s
        try:
            if self._reading is None and self._tail.has_changed():
                self._reading = self._tail.read_chunks()
            while self._reading is not None and time.monotonic() < ended:
                found = next(self._reading, None)
                if found is None:
                    self._reading = None
                elif found[0]:
                    self._clear()
                else:
                    self._add(found[1], self._tail.offset - len(found[1]))
            is_full = len(self._spans) >= _MAX_SPANS
            self.problem = f"Only the first {_MAX_SPANS:,} spans are shown." if is_full else ""
        except RunDirectoryError as error:
            self._reading, self.problem = None, str(error)

    def _add(self, lines: bytes, offset: int) -> None:
        rows: list[tuple[float, float, int, int, int]] = []
        # Every byte is one character, so that `offset` stays a position in the file.
        for line in lines.decode("latin-1").split("\n"):
            event = _parse_event(line)
            if event is not None:
                self._add_event(event, offset, rows)
            offset += len(line) + 1
        if rows and len(self._spans) < _MAX_SPANS:
            columns = (np.array(column) for column in zip(*rows, strict=True))
            self._spans.extend(len(rows), dict(zip(_COLUMN_TYPES, columns, strict=True)))

    def _add_event(self, event: _Event, offset: int, rows: list[tuple[float, float, int, int, int]]) -> None:
        phase, name, at = event.ph, event.name[:_MAX_NAME_LENGTH], event.ts / 1e6
        self._first_us = min(self._first_us, event.ts)
        if phase == "X":
            kind, number = _find_lane(event)
            lasted = event.dur / 1e6 if isinstance(event.dur, int | float) and 0 <= event.dur < 1e15 else 0.0
            rows.append((at, lasted, self._register_lane(kind, number), self._register_name(name), offset))
            return
        key = str("" if event.id is None else event.id)[:_MAX_NAME_LENGTH]
        if phase == "b":
            if key not in self._slots and event.pid == ROLLOUTS:
                self._drop_oldest(self._slots)
                self._slots[key] = heapq.heappop(self._free) if self._free else self._add_slot()
            self._drop_oldest(self._open)
            self._open[key, name] = at
        elif phase == "e" and (key, name) in self._open:
            kind, number = ("rollout", self._slots.get(key, 0)) if event.pid == ROLLOUTS else ("judge", 0)
            start = self._open.pop((key, name))
            rows.append(
                (start, max(0.0, at - start), self._register_lane(kind, number), self._register_name(name), offset)
            )
        elif phase == "n" and key in self._slots:
            heapq.heappush(self._free, self._slots.pop(key))

    def _drop_oldest(self, entries: dict[Any, Any]) -> None:
        """Drop the oldest of `entries` (open spans or unfinished rollouts) if there are too many."""
        if len(entries) >= _MAX_OPEN_SPANS:
            given_up = entries.pop(next(iter(entries)))
            if entries is self._slots:
                heapq.heappush(self._free, given_up)

    def _add_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _register_name(self, name: str) -> int:
        if len(self._names) >= _MAX_NAMES:
            return self._names.get(name, 0)
        return self._names.setdefault(name, len(self._names))

    def _register_lane(self, kind: str, number: int) -> int:
        if len(self._lanes) >= _MAX_LANES:
            return self._lanes.get((kind, number), 0)
        return self._lanes.setdefault((kind, number), len(self._lanes))

    def build_lanes(self, start_s: float | None, end_s: float | None, max_spans: int) -> dict[str, Any]:
        """Build the response of `/trace/lanes`: at most `max_spans` spans of a time window, each with its lane.

        If the window has more spans, short spans are merged. Times are in seconds since the first event.

        Args:
            start_s: start of the window; by default the start of the trace.
            end_s: end of the window; by default the end of the trace.
            max_spans: maximum number of spans.
        """
        if not len(self._spans):
            return {"lanes": [], "spans": [], "merged": False, "start_s": 0.0, "end_s": 0.0}
        origin = self._first_us / 1e6
        first = 0.0 if start_s is None else start_s
        ends = (float((block["start"] + block["duration"]).max()) - origin for block in self._spans)
        last = max(ends) if end_s is None else end_s
        order = sorted(self._lanes, key=_get_lane_order)
        place = np.empty(len(order), np.int64)
        place[[self._lanes[lane] for lane in order]] = np.arange(len(order))
        chosen = [_select_overlapping(block, origin + first, origin + last) for block in self._spans]
        merged = sum(map(len, chosen)) > max_spans
        width_s = max(last - first, 1e-6)
        parts = (
            _Window.from_block(block, rows, origin, place) for block, rows in zip(self._spans, chosen, strict=True)
        )
        window = _Window.concat([part.merge_short_spans(width_s / 2000) for part in parts] if merged else list(parts))
        if merged:
            window = window.downsample(width_s, max_spans)
        texts = list(self._names)
        found = [
            {"lane": int(lane), "name": texts[name], "start_s": round(start, 6), "end_s": round(end, 6), "args": args}
            for start, end, lane, name, args in window.build_rows(self._read_args)
        ]
        named = [
            {"name": _format_lane_name(lane), "kind": "reward" if lane[0] == "judge" else lane[0]} for lane in order
        ]
        return {"lanes": named, "spans": found, "merged": merged, "start_s": first, "end_s": last}

    def build_steps(self) -> list[TracedStep]:
        """Build the response of `/trace/steps`: the phases of each step (no nested phases) and its longest phase."""
        texts = list(self._names)
        kinds = {number: lane[0] for lane, number in self._lanes.items()}
        own = np.array([kinds[n] in ("controller", "trainer", "reward", "environment") for n in range(len(kinds))])
        parts = [_Window.from_block(b, np.flatnonzero(own[b["lane"]]), 0.0, np.arange(len(kinds))) for b in self._spans]
        spans = _Window.concat(parts).sort_by_start()
        origin = self._first_us / 1e6
        found: list[TracedStep] = []
        phase_end = -math.inf
        for start, end, name in zip(spans.starts.tolist(), spans.ends.tolist(), spans.names.tolist(), strict=True):
            text = texts[name]
            if text.startswith("step ") and text[5:].isdecimal() and len(text) < 20:
                found.append(TracedStep(int(text[5:]), start, end))
                phase_end = -math.inf
            elif found and start < found[-1].end_s and start >= phase_end:
                found[-1].phases[text] += min(end, found[-1].end_s) - start
                phase_end = end
        for step in found:
            step.held_back_by = max(step.phases, key=step.phases.__getitem__, default=None)
            step.phases = {name: round(value, 6) for name, value in step.phases.items()}
            step.start_s, step.end_s = round(step.start_s - origin, 6), round(step.end_s - origin, 6)
        return found

    def _read_args(self, offsets: np.ndarray) -> list[dict[str, Any]]:
        """Read the arguments of the events at the given offsets of the file; empty for an offset below 0."""
        found: list[dict[str, Any]] = []
        try:
            with self._run_dir.open("trace.json") as file:
                for offset in offsets.tolist():
                    file.seek(max(offset, 0))
                    event = _parse_event(file.readline(_MAX_ARGS_LENGTH).decode("latin-1")) if offset >= 0 else None
                    key, args = (event.id, event.args) if event is not None else (None, None)
                    named = {"id": str(key)[:_MAX_NAME_LENGTH]} if key is not None else {}
                    found.append(named | (args if isinstance(args, dict) else {}))
        except RunDirectoryError:
            pass
        return found + [{}] * (len(offsets) - len(found))


def _select_overlapping(block: Columns, start_s: float, end_s: float) -> np.ndarray:
    """Return the rows of the spans in a block that overlap the interval from `start_s` to `end_s`."""
    starts = block["start"]
    return np.flatnonzero((starts + block["duration"] >= start_s) & (starts <= end_s))


class _Window:
    """Spans in a time window."""

    def __init__(
        self, starts: np.ndarray, ends: np.ndarray, lanes: np.ndarray, names: np.ndarray, offsets: np.ndarray
    ) -> None:
        self.starts, self.ends, self.lanes, self.names, self.offsets = starts, ends, lanes, names, offsets

    @classmethod
    def from_block(cls, block: Columns, rows: np.ndarray, origin: float, positions: np.ndarray) -> _Window:
        """Build a window from rows of a block.

        Args:
            block: The block of spans.
            rows: Rows of the block.
            origin: Time in seconds that becomes 0.
            positions: Position of each lane on the page.
        """
        starts = block["start"][rows] - origin
        ends = starts + block["duration"][rows]
        return cls(starts, ends, positions[block["lane"][rows]], block["name"][rows], block["offset"][rows])

    @classmethod
    def concat(cls, parts: Sequence[_Window]) -> _Window:
        """Concatenate windows, in order."""
        if not parts:
            return cls(*(np.empty(0) for _ in range(5)))
        names = ("starts", "ends", "lanes", "names", "offsets")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def sort_by_start(self) -> _Window:
        """Sort the spans by start; if several spans have the same start, the longest comes first."""
        return self._select(np.lexsort((-self.offsets, -self.ends, self.starts)))

    def downsample(self, width_s: float, max_spans: int) -> _Window:
        """Merge spans that are short compared with `width_s`, until at most `max_spans` spans are left."""
        shortest = width_s / 2000
        window = self
        while len(window.starts) > max_spans and shortest < width_s:
            window, shortest = window.merge_short_spans(shortest), shortest * 2
        kept = np.sort(np.argsort(window.starts - window.ends, kind="stable")[:max_spans])
        return window._select(kept)

    def merge_short_spans(self, min_duration_s: float) -> _Window:
        """Merge the spans of a lane that are shorter than `min_duration_s` seconds and start in the same interval.

        Intervals are `min_duration_s` seconds long. A merged span has the name of its longest part.
        """
        short = (self.ends - self.starts) < min_duration_s
        # One number for each lane and time interval, so that a single sort groups the spans.
        cells = self.lanes[short] * 2**32 + np.clip(self.starts[short] // min_duration_s, 0, 2**32 - 1).astype(np.int64)
        order = np.lexsort((self.starts[short] - self.ends[short], cells))
        part = self._select(np.flatnonzero(short)[order])
        first = np.flatnonzero(np.diff(cells[order], prepend=-1))
        if not len(first):
            return self
        joined = part._select(first)
        joined.starts = np.minimum.reduceat(part.starts, first)
        joined.ends = np.maximum.reduceat(part.ends, first)
        joined.offsets = np.where(np.diff(first, append=len(order)) > 1, -1, joined.offsets)
        return _Window.concat([self._select(np.flatnonzero(~short)), joined])

    def _select(self, indices: np.ndarray) -> _Window:
        return _Window(*(a[indices] for a in (self.starts, self.ends, self.lanes, self.names, self.offsets)))

    def build_rows(self, args: Any) -> Any:
        """Return the start, end, lane, name and arguments of each span, sorted by start.

        Args:
            args: Function that reads the arguments of events by their offsets in the file.
        """
        ordered = self._select(np.argsort(self.starts, kind="stable"))
        columns = (ordered.starts.tolist(), ordered.ends.tolist(), ordered.lanes.tolist(), ordered.names.tolist())
        return zip(*columns, args(ordered.offsets), strict=True)


def _parse_event(line: str) -> _Event | None:
    try:
        found = parse_json(line.rstrip(",\r\n]"))
        event = read_record(_Event, found) if isinstance(found, dict) else None
    except (ValueError, RecursionError, TypeError):  # TypeError: a field is missing
        return None
    if event is None or not isinstance(event.name, str) or not isinstance(event.ph, str):
        return None
    return event if isinstance(event.ts, int | float) and 0 <= event.ts < 1e18 else None


def _find_lane(event: _Event) -> tuple[str, int]:
    number = event.tid if isinstance(event.tid, int) and 0 <= event.tid < _MAX_LANES else 0
    if event.pid == ENGINES:
        return "engine", number
    if event.pid == JUDGE:
        return "judge", number
    return _LANE_KINDS.get(event.name, "controller"), number


_LANE_ORDER = ("controller", "trainer", "engine", "reward", "judge", "environment", "rollout")


def _get_lane_order(lane: tuple[str, int]) -> tuple[int, int]:
    return _LANE_ORDER.index(lane[0]), lane[1]


def _format_lane_name(lane: tuple[str, int]) -> str:
    kind, number = lane
    if kind == "engine":
        return f"engine-{max(number - 1, 0)}"
    return f"rollouts {number}" if kind == "rollout" else kind + (f" {number}" if number else "")
