"""Measure the phases of a step.

    with spans.step(7):
        with spans.phase("generate"): …
        with spans.phase("train"):
            with spans.phase("forward"): …          # nested: inside `train`
        metrics = spans.get_metrics()                # time/generate_s, time/train_s, time/forward_s, time/step_s

A `Spans` object belongs to one event loop or thread. Phases of concurrent tasks may overlap.

Invariants:
    - the time of a phase is the wall time during which at least one phase of that name was open, so overlapping phases
      are not counted twice and no phase is longer than its step;
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
    """An open span: a step, a phase, or a part of a phase."""

    name: str
    start: float
    parent: _Span | None
    lane: int
    is_step: bool

    @property
    def is_phase(self) -> bool:
        """True if the span is a phase: directly in a step, not nested in another phase."""
        return not self.is_step and (self.parent is None or self.parent.is_step)


@dataclass(slots=True)
class _Timer:
    """Measures the time in which at least one phase with a certain name is open."""

    is_phase: bool
    elapsed: float = 0.0
    num_open: int = 0
    opened_at: float = field(default=0.0)

    def compute_elapsed(self, now: float) -> float:
        return self.elapsed + (now - self.opened_at if self.num_open else 0.0)


class Spans:
    """Measures the phases of each step, and writes them to a trace.

    Args:
        trace_path: Chrome trace file to append to; `None` for no trace. If the trace cannot be written, a warning is
            logged and the run continues without it.
        on_phase: Called with the name of a phase when it begins, and with `""` when it ends; not for nested phases.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        trace_path: Path | None = None,
        *,
        on_phase: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        # The monotonic clock measures; the epoch makes traces of several processes and sessions comparable.
        self._epoch = time.time() - clock()
        self._on_phase = on_phase
        # Tasks that run concurrently have separate contexts, and so separate parents for their spans.
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
        """Measure a `with` block as step `number`; the times of all phases start at 0."""
        now = self._clock()
        # An evaluation may run across the boundary of two steps: its timer stays open, and restarts at 0.
        self._timers = {name: timer for name, timer in self._timers.items() if timer.num_open}
        for timer in self._timers.values():
            timer.elapsed, timer.opened_at = 0.0, now
        self._step_start = now
        try:
            with self._span(f"step {number}", is_step=True):
                yield
        finally:
            self._step_start = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a `with` block as the phase `name` of the current step."""
        with self._span(name, is_step=False):
            yield

    def get_elapsed(self, name: str) -> float:
        """Return the seconds that the phase `name` took so far in the current step; 0 if it has not begun."""
        timer = self._timers.get(name)
        return timer.compute_elapsed(self._clock()) if timer else 0.0

    def get_phases(self) -> dict[str, float]:
        """Return the seconds of each phase so far in this step, in order of first entry, without nested phases."""
        now = self._clock()
        return {name: timer.compute_elapsed(now) for name, timer in self._timers.items() if timer.is_phase}

    def get_open_phases(self) -> dict[str, float]:
        """Return the seconds since each open phase began, by name, without nested phases."""
        now = self._clock()
        return {span.name: now - span.start for lane in self._lanes for span in lane if span.is_phase}

    def find_bottleneck(self) -> str:
        """Return the longest phase so far in this step; empty before the first phase."""
        phases = self.get_phases()
        return max(phases, key=phases.__getitem__, default="")

    def get_metrics(self) -> dict[str, float]:
        """Return `time/<phase>_s` of every phase, including nested ones, and `time/step_s`, the time of the step."""
        now = self._clock()
        times = {f"time/{name}_s": timer.compute_elapsed(now) for name, timer in self._timers.items()}
        return times if self._step_start is None else times | {"time/step_s": now - self._step_start}

    def add_counter_value(self, name: str, value: float) -> None:
        """Add a value of the counter `name` to the trace, at the current time."""
        self._emit(name=name, ph="C", args={"value": value})

    def add_event(self, **fields: Any) -> None:
        """Add an event with these fields to the trace, at the current time; written at the end of the phase."""
        self._emit(**fields)

    def close(self) -> None:
        """Write the remaining events to the trace. Calling it twice is safe."""
        self._flush()
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def begin(self, name: str, *, is_step: bool = False) -> _Span:
        """Begin a span inside the current span; prefer `phase` where a `with` statement is possible."""
        return self._begin(name, self._current.get(), is_step)

    def replace_span(self, span: _Span, name: str) -> _Span:
        """End `span`, and begin the span `name` with the same parent, without a gap."""
        self.end(span, is_followed=True)
        return self._begin(name, span.parent, is_step=False)

    def _begin(self, name: str, parent: _Span | None, is_step: bool) -> _Span:
        span = _Span(name, self._clock(), parent, self._find_free_lane(parent), is_step)
        self._lanes[span.lane].append(span)
        if not is_step:
            self._start_timer(span)
            if span.is_phase:
                self._on_phase(name)
        return span

    def end(self, span: _Span, *, is_followed: bool = False) -> None:
        """End a span; if another phase follows immediately, `on_phase` is not called for the end."""
        self._lanes[span.lane].remove(span)
        now = self._clock()
        if not span.is_step:
            self._stop_timer(span, now)
            if span.is_phase and not is_followed:
                self._on_phase("")
        self._emit_span(span.name, span.start, now, span.lane)
        if span.is_phase or span.is_step:
            self._flush()

    @contextlib.contextmanager
    def use_parent(self, span: _Span) -> Iterator[None]:
        """Make `span` the parent of the spans that begin in a `with` block."""
        token = self._current.set(span)
        try:
            yield
        finally:
            self._current.reset(token)

    @contextlib.contextmanager
    def _span(self, name: str, *, is_step: bool) -> Iterator[None]:
        span = self.begin(name, is_step=is_step)
        try:
            with self.use_parent(span):
                yield
        finally:
            self.end(span)

    def _emit_span(self, name: str, start: float, end: float, lane: int) -> None:
        self._emit(name=name, ph="X", ts=self._to_microseconds(start), dur=round((end - start) * 1e6), tid=lane)

    def _find_free_lane(self, parent: _Span | None) -> int:
        """Return a trace lane for a new span: the parent's lane if no other span is open in it, otherwise an empty
        lane.
        """
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
            timer.opened_at = span.start
        timer.num_open += 1

    def _stop_timer(self, span: _Span, now: float) -> None:
        timer = self._timers[span.name]
        timer.num_open -= 1
        if timer.num_open == 0:
            timer.elapsed += now - timer.opened_at

    def _to_microseconds(self, moment: float) -> int:
        return round((self._epoch + moment) * 1e6)

    def _emit(self, **event: Any) -> None:
        if self._trace is not None:
            self._events.append({"ts": self._to_microseconds(self._clock()), "pid": os.getpid(), "tid": 0, **event})

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
            logger.warning("the trace file cannot be written, so no more trace events are recorded: %s", error)
