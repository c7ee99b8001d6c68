"""Progress notes of a starting run, which takes from seconds to minutes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["StartProgress"]

T = TypeVar("T")


class StartProgress:
    """Reports which roles are still starting, whenever this changes.

    Args:
        report: Called with each note.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = report
        self._clock = clock
        self._began = clock()
        self._waiting: list[str] = []

    async def await_start(self, name: str, awaitable: Awaitable[T]) -> T:
        """Await `awaitable`, which starts the role `name`, and report the progress."""
        self._waiting.append(name)
        self._notify(f"starting {', '.join(self._waiting)}")
        try:
            started = await awaitable
        finally:
            self._waiting.remove(name)
        if self._waiting:
            seconds = self._clock() - self._began
            self._notify(f"starting {', '.join(self._waiting)} ({name}: {seconds:.0f} s)")
        return started
