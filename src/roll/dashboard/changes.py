"""Notifies open pages of new data, within a CPU limit so that a training run is not slowed down."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable

from roll.dashboard.runs import Run

__all__ = ["CpuLimiter", "stream_changes"]

_POLL_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 2.0
"""Minimum time between notifications: a step writes several files, and a page requests everything that changed."""
_MAX_INTERVAL_S = 20.0
"""Maximum delay of a notification, even if the server is over its budget."""
_MAX_CPU_FRACTION = 0.004
"""Fraction of the CPU time of all cores that a server with open pages may use."""


class CpuLimiter:
    """Limits the CPU time of the server: pages are updated less often while it is over budget."""

    def __init__(
        self,
        share: float = _MAX_CPU_FRACTION,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        # `os.cpu_count` ignores the affinity that a scheduler or container sets.
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._rate, self._clock, self._spent = share * num_cores, clock, cpu_clock
        self._owed, self._at, self._before = 0.0, self._clock(), self._spent()

    def is_over_budget(self) -> bool:
        """Return whether the server has used more CPU time than its budget. Idle time adds little budget."""
        at, spent = self._clock(), self._spent()
        earned = self._rate * min(at - self._at, 2 * _POLL_INTERVAL_S)
        owed = self._owed + spent - self._before - earned
        self._owed, self._at, self._before = min(max(owed, 0.0), self._rate * _MAX_INTERVAL_S), at, spent
        return self._owed > 1e-9


async def stream_changes(
    run: Run, limiter: CpuLimiter, is_ending: Callable[[], bool] = lambda: False
) -> AsyncIterator[str]:
    """Yield a server-sent event with the types of changed data whenever the run's data change.

    Args:
        run: The run.
        limiter: Delays events while the server is over its CPU budget.
        is_ending: Returns true when the stream must end.
    """
    # In a thread: `stat` may block on a network file system.
    before = await asyncio.to_thread(run.read_stamps)
    yield "retry: 2000\n\n"
    quiet, told_at = 0, time.monotonic()
    while not is_ending():
        await asyncio.sleep(_POLL_INTERVAL_S)
        now = await asyncio.to_thread(run.read_stamps)
        kinds = [kind for kind, stamp in now.items() if stamp != before[kind]]
        quiet, passed, is_over_budget = quiet + 1, time.monotonic() - told_at, limiter.is_over_budget()
        if kinds and passed >= _MIN_INTERVAL_S and (not is_over_budget or passed >= _MAX_INTERVAL_S):
            before, quiet, told_at = now, 0, time.monotonic()
            step = await asyncio.to_thread(run.get_newest_step)
            yield f"event: changed\ndata: {json.dumps({'step': step, 'kinds': kinds})}\n\n"
        elif quiet % 15 == 0:  # a keep-alive, to notice a closed connection
            yield ": nothing new\n\n"
