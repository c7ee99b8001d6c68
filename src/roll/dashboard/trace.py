"""`trace.json` as lanes: what the controller, trainer, engines, rewards and every rollout did when.

    trace.json ─ each event once ─► spans (32 bytes each) ─ a window, short ones merged ─► lanes for the page

A rollout's states are spans between two events. Rollouts share lanes: each has one of its own from its first event to
its last, and whoever comes next takes it over.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections import defaultdict
from typing import Any

import numpy as np

from roll.dashboard.columns import Columns
from roll.dashboard.files import Inside, Tail
from roll.errors import RunDirectoryError
from roll.tracking.rollout_trace import ENGINES, JUDGE, ROLLOUTS

__all__ = ["Trace"]

_TYPES = {"start": np.float64, "end": np.float64, "lane": np.int32, "name": np.int32, "offset": np.int64}
_MOST_NAMES = 4096
_MOST_LANES = 20_000
_MOST_SPANS = 20_000_000
_LONGEST_ARGS = 4096
_TRAINER = ("train", "train_critic", "forward_backward", "optimizer", "old_logprobs", "reference", "values")
_KINDS = dict.fromkeys(_TRAINER, "trainer") | {"reward": "reward", "environment": "environment"}


class Trace:
    """The trace of one run, brought up to date for a while at a time."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._tail = Tail(inside, "trace.json", end=b",\n")
        self._reading: Any = None
        self.problem = ""
        self._clear()

    def _clear(self) -> None:
        self._spans = Columns(_TYPES)
        self._names: dict[str, int] = {"…": 0}
        self._lanes: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, str], float] = {}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._first_us = math.inf

    @property
    def is_reading(self) -> bool:
        """Whether there is more to read now."""
        return self._reading is not None

    @property
    def bytes_left(self) -> int:
        """That were not read yet."""
        stamp = self._inside.stamp("trace.json")
        return max(0, stamp.size - self._tail.offset - len(self._tail.rest)) if stamp is not None else 0

    def refresh(self, seconds: float) -> None:
        """Read what is new, for about so long; what cannot be read is told by `problem`."""
        ended = time.monotonic() + seconds
        try:
            if self._reading is None and self._tail.grown():
                self._reading = self._tail.chunks()
            while self._reading is not None and time.monotonic() < ended:
                found = next(self._reading, None)
                if found is None:
                    self._reading = None
                elif found[0]:
                    self._clear()
                else:
                    self._add(found[1], self._tail.offset - len(found[1]))
            self.problem = "" if len(self._spans) < _MOST_SPANS else f"Only the first {_MOST_SPANS:,} spans are shown."
        except RunDirectoryError as error:
            self._reading, self.problem = None, str(error)

    def _add(self, lines: bytes, offset: int) -> None:
        rows: list[tuple[float, float, int, int, int]] = []
        for line in lines.split(b"\n"):
            event = _event(line)
            if event is not None:
                self._take(event, offset, rows)
            offset += len(line) + 1
        if rows and len(self._spans) < _MOST_SPANS:
            self._spans.extend(len(rows), dict(zip(_TYPES, (list(c) for c in zip(*rows, strict=True)), strict=True)))

    def _take(self, event: dict[str, Any], offset: int, rows: list[tuple[float, float, int, int, int]]) -> None:
        phase, name, at = event["ph"], event["name"], event["ts"] / 1e6
        self._first_us = min(self._first_us, event["ts"])
        if phase == "X":
            kind, number = _lane_of(event)
            duration = event.get("dur")
            end = at + (duration / 1e6 if isinstance(duration, int | float) and 0 <= duration < 1e15 else 0.0)
            rows.append((at, end, self._lane(kind, number), self._name(name), offset))
            return
        key = str(event.get("id", ""))[:200]
        if phase == "b":
            if key not in self._slots and event.get("pid") == ROLLOUTS:
                self._slots[key] = heapq.heappop(self._free) if self._free else self._new_slot()
            self._open[key, name] = at
        elif phase == "e" and (key, name) in self._open:
            kind, number = ("rollout", self._slots.get(key, 0)) if event.get("pid") == ROLLOUTS else ("judge", 0)
            rows.append((self._open.pop((key, name)), at, self._lane(kind, number), self._name(name), offset))
        elif phase == "n" and key in self._slots:
            heapq.heappush(self._free, self._slots.pop(key))

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _name(self, name: str) -> int:
        if len(self._names) >= _MOST_NAMES:
            return self._names.get(name, 0)
        return self._names.setdefault(name, len(self._names))

    def _lane(self, kind: str, number: int) -> int:
        if len(self._lanes) >= _MOST_LANES:
            return self._lanes.get((kind, number), 0)
        return self._lanes.setdefault((kind, number), len(self._lanes))

    def lanes(self, start_s: float | None, end_s: float | None, most: int) -> dict[str, Any]:
        """For `/trace/lanes`; seconds since the first event."""
        spans = self._spans
        if not len(spans):
            return {"lanes": [], "spans": [], "merged": False, "start_s": 0.0, "end_s": 0.0}
        origin = self._first_us / 1e6
        starts, ends = spans["start"] - origin, spans["end"] - origin
        first = 0.0 if start_s is None else start_s
        last = float(ends.max()) if end_s is None else end_s
        chosen = np.flatnonzero((ends >= first) & (starts <= last))
        order = sorted(self._lanes, key=_lane_order)
        place = np.empty(len(order), np.int64)
        place[[self._lanes[lane] for lane in order]] = np.arange(len(order))
        lanes, names = place[spans["lane"][chosen]], spans["name"][chosen]
        shown = _Window(starts[chosen], ends[chosen], lanes, names, spans["offset"][chosen])
        merged = len(chosen) > most
        if merged:
            shown = shown.thinned(max(last - first, 1e-6), most)
        texts = list(self._names)
        found = [
            {"lane": int(lane), "name": texts[name], "start_s": round(start, 6), "end_s": round(end, 6), "args": args}
            for start, end, lane, name, args in shown.rows(self._args)
        ]
        named = [{"name": _lane_name(lane), "kind": "reward" if lane[0] == "judge" else lane[0]} for lane in order]
        return {"lanes": named, "spans": found, "merged": merged, "start_s": first, "end_s": last}

    def steps(self) -> list[dict[str, Any]]:
        """For `/trace/steps`: each step's phases, those inside others left out, and the longest of them."""
        spans, texts = self._spans, list(self._names)
        kinds = {number: lane[0] for lane, number in self._lanes.items()}
        own = np.array([kinds[n] in ("controller", "trainer", "reward", "environment") for n in range(len(kinds))])
        chosen = np.flatnonzero(own[spans["lane"]]) if len(own) else np.empty(0, np.int64)
        chosen = chosen[np.lexsort((-spans["end"][chosen], spans["start"][chosen]))]
        origin = self._first_us / 1e6
        found: list[dict[str, Any]] = []
        inside = -math.inf
        for start, end, name in zip(*(spans[c][chosen].tolist() for c in ("start", "end", "name")), strict=True):
            text = texts[name]
            if text.startswith("step ") and text[5:].isdecimal() and len(text) < 20:
                found.append({"step": int(text[5:]), "start": start, "end": end, "phases": defaultdict(float)})
                inside = -math.inf
            elif found and start < found[-1]["end"] and start >= inside:
                found[-1]["phases"][text] += min(end, found[-1]["end"]) - start
                inside = end
        return [
            {
                "step": step["step"],
                "start_s": round(step["start"] - origin, 6),
                "end_s": round(step["end"] - origin, 6),
                "phases": {name: round(value, 6) for name, value in step["phases"].items()},
                "held_back_by": max(step["phases"], key=step["phases"].__getitem__, default=None),
            }
            for step in found
        ]

    def _args(self, offsets: np.ndarray) -> list[dict[str, Any]]:
        """What stands beside the events at these places of the file."""
        found: list[dict[str, Any]] = []
        try:
            with self._inside.open("trace.json") as file:
                for offset in offsets.tolist():
                    file.seek(max(offset, 0))
                    event = _event(file.readline(_LONGEST_ARGS)) if offset >= 0 else None
                    args = (event or {}).get("args")
                    key = (event or {}).get("id")
                    named = {"id": str(key)[:200]} if key is not None else {}
                    found.append(named | (args if isinstance(args, dict) else {}))
        except RunDirectoryError:
            pass
        return found + [{}] * (len(offsets) - len(found))


class _Window:
    """Spans of a window of time."""

    def __init__(
        self, starts: np.ndarray, ends: np.ndarray, lanes: np.ndarray, names: np.ndarray, offsets: np.ndarray
    ) -> None:
        self.starts, self.ends, self.lanes, self.names, self.offsets = starts, ends, lanes, names, offsets

    def thinned(self, width_s: float, most: int) -> _Window:
        """At most so many: of each lane, spans that are short beside the window are joined."""
        shortest = width_s / 2000
        window = self
        while len(window.starts) > most and shortest < width_s:
            window, shortest = window._joined(shortest), shortest * 2
        kept = np.sort(np.argsort(window.starts - window.ends, kind="stable")[:most])
        return window._taken(kept)

    def _joined(self, shortest: float) -> _Window:
        """What is shorter becomes one span of its stretch of its lane, called by the longest of them."""
        short = (self.ends - self.starts) < shortest
        cells = self.lanes[short] * 2**32 + np.clip(self.starts[short] // shortest, 0, 2**32 - 1).astype(np.int64)
        order = np.lexsort((self.starts[short] - self.ends[short], cells))
        part = self._taken(np.flatnonzero(short)[order])
        first = np.flatnonzero(np.diff(cells[order], prepend=-1))
        if not len(first):
            return self
        joined = part._taken(first)
        joined.starts = np.minimum.reduceat(part.starts, first)
        joined.ends = np.maximum.reduceat(part.ends, first)
        joined.offsets = np.where(np.diff(first, append=len(order)) > 1, -1, joined.offsets)
        long = self._taken(np.flatnonzero(~short))
        names = ("starts", "ends", "lanes", "names", "offsets")
        return _Window(*(np.concatenate([getattr(long, name), getattr(joined, name)]) for name in names))

    def _taken(self, places: np.ndarray) -> _Window:
        return _Window(*(a[places] for a in (self.starts, self.ends, self.lanes, self.names, self.offsets)))

    def rows(self, args: Any) -> Any:
        """Plain values, in the order of their starts, with what stands beside each."""
        ordered = self._taken(np.argsort(self.starts, kind="stable"))
        columns = (ordered.starts.tolist(), ordered.ends.tolist(), ordered.lanes.tolist(), ordered.names.tolist())
        return zip(*columns, args(ordered.offsets), strict=True)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip(b",\r\n]"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("name"), str) or not isinstance(event.get("ph"), str):
        return None
    at = event.get("ts")
    return event if isinstance(at, int | float) and 0 <= at < 1e18 else None


def _lane_of(event: dict[str, Any]) -> tuple[str, int]:
    number = event.get("tid")
    number = number if isinstance(number, int) and 0 <= number < _MOST_LANES else 0
    if event.get("pid") == ENGINES:
        return "engine", number
    if event.get("pid") == JUDGE:
        return "judge", number
    return _KINDS.get(event["name"], "controller"), number


_ORDER = ("controller", "trainer", "engine", "reward", "judge", "environment", "rollout")


def _lane_order(lane: tuple[str, int]) -> tuple[int, int]:
    return _ORDER.index(lane[0]), lane[1]


def _lane_name(lane: tuple[str, int]) -> str:
    kind, number = lane
    if kind == "engine":
        return f"engine-{max(number - 1, 0)}"
    return f"rollouts {number}" if kind == "rollout" else kind + (f" {number}" if number else "")
