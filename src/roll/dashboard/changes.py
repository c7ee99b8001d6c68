"""Notifies open pages of new data, rarely enough that watching takes almost nothing from a training run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable

from roll.dashboard.runs import Run

__all__ = ["Pace", "changes"]

_POLL_S = 1.0
_REST_S = 2.0
"""Delay after a change: a step writes several files, and a notified page requests everything that changed."""
_LATEST_S = 20.0
"""Maximum delay of a notification, whatever its cost."""
_SHARE = 0.004
"""Share of all processors' time that a server with open pages may use."""


class Pace:
    """Limits a server's processor time to its share: excess time is followed by waiting. Shared by all pages."""

    def __init__(
        self,
        share: float = _SHARE,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.process_time,
    ) -> None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._rate, self._clock, self._spent = share * num_cores, clock, spent
        self._owed, self._at, self._before = 0.0, self._clock(), self._spent()

    def is_over_budget(self) -> bool:
        """Return whether more time was spent than allowed; time without requests counts only a little."""
        at, spent = self._clock(), self._spent()
        earned = self._rate * min(at - self._at, 2 * _POLL_S)
        owed = self._owed + spent - self._before - earned
        self._owed, self._at, self._before = min(max(owed, 0.0), self._rate * _LATEST_S), at, spent
        return self._owed > 1e-9


async def changes(run: Run, pace: Pace, is_ending: Callable[[], bool] = lambda: False) -> AsyncIterator[str]:
    """Yield Server-Sent Events with what has grown since the last one, until the server, which waits for them, ends."""
    before = await asyncio.to_thread(run.stamps)
    yield "retry: 2000\n\n"
    quiet, told_at = 0, time.monotonic()
    while not is_ending():
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(run.stamps)
        kinds = [kind for kind, stamp in now.items() if stamp != before[kind]]
        quiet, passed, is_over_budget = quiet + 1, time.monotonic() - told_at, pace.is_over_budget()
        if kinds and passed >= _REST_S and (not is_over_budget or passed >= _LATEST_S):
            before, quiet, told_at = now, 0, time.monotonic()
            step = await asyncio.to_thread(run.step)
            yield f"event: changed\ndata: {json.dumps({'step': step, 'kinds': kinds})}\n\n"
        elif quiet % 15 == 0:  # a keep-alive, to notice a closed connection
            yield ": nothing new\n\n"
