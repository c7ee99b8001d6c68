"""Progress notes of a starting run, which takes from seconds to minutes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["StartNotes"]

T = TypeVar("T")


class StartNotes:
    """Reports the roles that are still starting, whenever they change.

    Args:
        say: Called with the text.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = clock()
        self._waiting: list[str] = []

    async def of(self, what: str, work: Awaitable[T]) -> T:
        """Await `work`, which starts `what`, and report the progress."""
        self._waiting.append(what)
        self._say(f"starting {', '.join(self._waiting)}")
        try:
            started = await work
        finally:
            self._waiting.remove(what)
        if self._waiting:
            seconds = self._clock() - self._began
            self._say(f"starting {', '.join(self._waiting)} ({what}: {seconds:.0f} s)")
        return started
