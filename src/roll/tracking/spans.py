"""The phases of a step and their durations.

    with spans.step(7):
        with spans.phase("generate"): …
        with spans.phase("train"):
            with spans.phase("forward"): …          # nested: inside `train`
        metrics = spans.metrics()                    # time/generate_s, time/train_s, time/forward_s, time/step_s

One event loop or thread uses a `Spans`; phases may overlap when tasks run them concurrently.

Invariants:
    - the time of a phase is the wall time during which at least one phase of that name was open, so overlapping phases
      are not counted twice and no phase exceeds its step;
    - in the trace, spans that overlap without nesting are in different lanes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.tracking.trace import TraceFile

__all__ = ["Spans"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Span:
    name: str
    start: float
    parent: _Span | None
    lane: int
    is_step: bool

    @property
    def is_phase(self) -> bool:
        """Whether the span is a part of the step itself, not of another phase."""
        return not self.is_step and (self.parent is None or self.parent.is_step)


@dataclass(slots=True)
class _Timer:
    """Wall time during which a name is open at least once."""

    is_phase: bool
    elapsed: float = 0.0
    num_open: int = 0
    since: float = field(default=0.0)

    def at(self, now: float) -> float:
        return self.elapsed + (now - self.since if self.num_open else 0.0)


class Spans:
    """Measures phases, per step, and writes them as a trace.

    Args:
        trace_path: Chrome trace file to append to; `None` for no trace. A trace that cannot be written is abandoned
            with a warning: it never stops a run.
        on_phase: called with the name of a phase that begins, and with `""` when one ends; not for nested phases.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        trace_path: Path | None = None,
        *,
        on_phase: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._on_phase = on_phase
        self._current: ContextVar[_Span | None] = ContextVar("span", default=None)
        self._lanes: list[list[_Span]] = []
        self._timers: dict[str, _Timer] = {}
        self._step_start: float | None = None
        self._events: list[dict[str, Any]] = []
        self._trace: TraceFile | None = None
        if trace_path is not None:
            with self._disable_on_error():
                self._trace = TraceFile(trace_path)
            self._emit(name="process_name", ph="M", args={"name": f"roll (process {os.getpid()})"})

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the body as this step; times start from 0."""
        now = self._clock()
        self._timers = {name: timer for name, timer in self._timers.items() if timer.num_open}
        for timer in self._timers.values():
            timer.elapsed, timer.since = 0.0, now
        self._step_start = now
        try:
            with self._span(f"step {number}", is_step=True):
                yield
        finally:
            self._step_start = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body as a phase."""
        with self._span(name, is_step=False):
            yield

    def elapsed(self, name: str) -> float:
        """Return the seconds in this phase so far, in the current step; 0 if it was not entered."""
        timer = self._timers.get(name)
        return timer.at(self._clock()) if timer else 0.0

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase so far in this step, in order of first entry, without nested phases."""
        now = self._clock()
        return {name: timer.at(now) for name, timer in self._timers.items() if timer.is_phase}

    def under_way(self) -> dict[str, float]:
        """Return the phases that are open now, with the seconds since each began, without nested phases."""
        now = self._clock()
        return {span.name: now - span.start for lane in self._lanes for span in lane if span.is_phase}

    def bottleneck(self) -> str:
        """Return the longest phase so far in this step; empty before the first."""
        phases = self.phases()
        return max(phases, key=phases.__getitem__, default="")

    def metrics(self) -> dict[str, float]:
        """Return `time/<phase>_s` of every phase, including nested ones, and `time/step_s` since the step began."""
        now = self._clock()
        times = {f"time/{name}_s": timer.at(now) for name, timer in self._timers.items()}
        return times if self._step_start is None else times | {"time/step_s": now - self._step_start}

    def count(self, name: str, value: float) -> None:
        """Add a counter value to the trace (reward, tokens per second)."""
        self._emit(name=name, ph="C", args={"value": value})

    def event(self, **fields: Any) -> None:
        """Add an event of the trace format to the trace, with the current time; it is written at the end of the
        phase.
        """
        self._emit(**fields)

    def close(self) -> None:
        """Write the remaining events; may be called twice."""
        self._flush()
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def begin(self, name: str, *, is_step: bool = False) -> _Span:
        """Begin a span inside the current one; prefer `phase` where a `with` statement is possible."""
        return self._begin(name, self._current.get(), is_step)

    def follow(self, span: _Span, name: str) -> _Span:
        """End a span and begin another in its place."""
        self.end(span, followed=True)
        return self._begin(name, span.parent, is_step=False)

    def _begin(self, name: str, parent: _Span | None, is_step: bool) -> _Span:
        span = _Span(name, self._clock(), parent, self._free_lane(parent), is_step)
        self._lanes[span.lane].append(span)
        if not is_step:
            self._start_timer(span)
            if span.is_phase:
                self._on_phase(name)
        return span

    def end(self, span: _Span, *, followed: bool = False) -> None:
        """End a span; if another phase follows immediately, `on_phase` is not called for the end."""
        self._lanes[span.lane].remove(span)
        now = self._clock()
        if not span.is_step:
            self._stop_timer(span, now)
            if span.is_phase and not followed:
                self._on_phase("")
        self._emit_span(span.name, span.start, now, span.lane)
        if span.is_phase or span.is_step:
            self._flush()

    @contextlib.contextmanager
    def inside(self, span: _Span) -> Iterator[None]:
        """Run the body with `span` as the parent of the spans that begin in it."""
        token = self._current.set(span)
        try:
            yield
        finally:
            self._current.reset(token)

    @contextlib.contextmanager
    def _span(self, name: str, *, is_step: bool) -> Iterator[None]:
        span = self.begin(name, is_step=is_step)
        try:
            with self.inside(span):
                yield
        finally:
            self.end(span)

    def _emit_span(self, name: str, start: float, end: float, lane: int) -> None:
        self._emit(name=name, ph="X", ts=self._micros(start), dur=round((end - start) * 1e6), tid=lane)

    def _free_lane(self, parent: _Span | None) -> int:
        """Return the parent's lane if nothing overlaps there, otherwise an empty one."""
        if parent is not None and self._lanes[parent.lane][-1:] == [parent]:
            return parent.lane
        for index, lane in enumerate(self._lanes):
            if not lane:
                return index
        self._lanes.append([])
        return len(self._lanes) - 1

    def _start_timer(self, span: _Span) -> None:
        timer = self._timers.setdefault(span.name, _Timer(span.is_phase))
        if timer.num_open == 0:
            timer.since = span.start
        timer.num_open += 1

    def _stop_timer(self, span: _Span, now: float) -> None:
        timer = self._timers[span.name]
        timer.num_open -= 1
        if timer.num_open == 0:
            timer.elapsed += now - timer.since

    def _micros(self, moment: float) -> int:
        return round((self._epoch + moment) * 1e6)

    def _emit(self, **event: Any) -> None:
        if self._trace is not None:
            self._events.append({"ts": self._micros(self._clock()), "pid": os.getpid(), "tid": 0, **event})

    def _flush(self) -> None:
        events, self._events = self._events, []
        with self._disable_on_error():
            if self._trace is not None:
                self._trace.append(events)

    @contextlib.contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._trace = None
            logger.warning("the trace is no longer written: %s", error)
