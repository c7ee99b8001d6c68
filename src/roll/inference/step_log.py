"""A log of an engine's steps and their durations, to which a simulated engine is fitted.

Consecutive steps that only decode, for the same number of requests, form one stretch; a step that also prefills is a
stretch of its own. So there are about two stretches per request, whatever its number of tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from roll.types import EngineStepSpan

__all__ = ["StepLog"]

KEPT = 100_000
"""Largest number of stretches kept between two calls of `take`; then the oldest are dropped."""


class StepLog:
    """Collects an engine's stretches.

    Args:
        clock: A monotonic clock, in seconds.
        wall: The wall clock, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._epoch = wall() - clock()
        self._since: float | None = None
        self._num_silent = 0
        self._stretches: deque[EngineStepSpan] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Start timing a step of an engine that was idle or paused."""
        self._since = self._clock()

    def step(self, *, num_decoding: int, num_started: int, num_prefilled: int, context_tokens: float) -> None:
        """Record the step that just ended; the next one starts now."""
        now = self._clock()
        since, self._since = self._since, now
        if since is None or self._num_silent or not num_decoding + num_started:
            return
        fresh = EngineStepSpan(
            began_s=self._epoch + since,
            duration_s=now - since,
            num_steps=1,
            num_decoding=num_decoding,
            num_started=num_started,
            num_prefilled=num_prefilled,
            context_tokens=context_tokens,
        )
        last = self._stretches[-1] if self._stretches else None
        if last is not None and _can_merge(last, fresh):
            steps = last.num_steps + 1
            self._stretches[-1] = replace(
                last,
                duration_s=last.duration_s + fresh.duration_s,
                num_steps=steps,
                context_tokens=last.context_tokens + (context_tokens - last.context_tokens) / steps,
            )
        else:
            self._stretches.append(fresh)

    @contextmanager
    def pause_recording(self) -> Generator[None]:
        """Leave out steps that end in the body, because they do more than generate."""
        self._num_silent += 1
        try:
            yield
        finally:
            self._num_silent -= 1

    def take(self) -> list[EngineStepSpan]:
        """Return the stretches collected since the last call."""
        taken = list(self._stretches)
        self._stretches.clear()
        return taken


def _can_merge(last: EngineStepSpan, fresh: EngineStepSpan) -> bool:
    """Return whether two stretches can be merged: both only decode, for equally many requests, without a pause in
    between.
    """
    same = last.num_decoding == fresh.num_decoding and not last.num_started and not fresh.num_started
    return same and abs(last.began_s + last.duration_s - fresh.began_s) < 1e-4
