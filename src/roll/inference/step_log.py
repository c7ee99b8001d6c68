"""A log of an engine's steps and their durations, to which a simulated engine is fitted.

Consecutive steps that only decode, for the same number of requests, are merged into one span; a step that also prefills
is a separate span. There are thus about two spans per request, regardless of the number of generated tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from roll.types import EngineStepSpan

__all__ = ["MAX_SPANS", "StepLog"]

MAX_SPANS = 100_000
"""Maximum number of spans stored between two calls to `take`; the oldest are dropped."""


class StepLog:
    """Records the times and sizes of an engine's steps; consecutive similar steps form one span.

    Args:
        clock: A monotonic clock, in seconds.
        wall_clock: The wall clock, in seconds since 1970.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._epoch = wall_clock() - clock()
        self._since: float | None = None
        self._num_silent = 0
        self._spans: deque[EngineStepSpan] = deque(maxlen=MAX_SPANS)

    def begin(self) -> None:
        """Start timing the first step of an engine that was idle or paused."""
        self._since = self._clock()

    def record_step(self, *, num_decoding: int, num_started: int, num_prefilled: int, context_tokens: float) -> None:
        """Record the step that just ended; the next step starts now."""
        now = self._clock()
        since, self._since = self._since, now
        if since is None or self._num_silent or not num_decoding + num_started:
            return
        # `perf_counter` starts at an arbitrary moment. The epoch converts its values to wall-clock times, which
        # are comparable between the traces of several processes.
        span = EngineStepSpan(
            began_s=self._epoch + since,
            duration_s=now - since,
            num_steps=1,
            num_decoding=num_decoding,
            num_started=num_started,
            num_prefilled=num_prefilled,
            context_tokens=context_tokens,
        )
        last = self._spans[-1] if self._spans else None
        if last is not None and _can_merge(last, span):
            steps = last.num_steps + 1
            self._spans[-1] = replace(
                last,
                duration_s=last.duration_s + span.duration_s,
                num_steps=steps,
                context_tokens=last.context_tokens + (context_tokens - last.context_tokens) / steps,
            )
        else:
            self._spans.append(span)

    @contextmanager
    def pause_recording(self) -> Generator[None]:
        """Exclude steps that end within the `with` block, because they include work other than generation."""
        self._num_silent += 1
        try:
            yield
        finally:
            self._num_silent -= 1

    def take(self) -> list[EngineStepSpan]:
        """Return the spans collected since the last call."""
        taken = list(self._spans)
        self._spans.clear()
        return taken


def _can_merge(previous: EngineStepSpan, span: EngineStepSpan) -> bool:
    """Return whether two spans can be merged: both only decode, for the same number of requests, without a pause."""
    same = previous.num_decoding == span.num_decoding and not previous.num_started and not span.num_started
    # Floats represent times since 1970 to about 2e-7 s, so a tolerance distinguishes rounding errors from a pause.
    return same and abs(previous.began_s + previous.duration_s - span.began_s) < 1e-4
