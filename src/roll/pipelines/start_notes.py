"""Notes of what a run that starts is still waiting for: starting takes from seconds to minutes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["StartNotes"]

T = TypeVar("T")


class StartNotes:
    """Says what is being started, whenever that changes.

    Args:
        say: takes the words.
        clock: seconds that only grow.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = clock()
        self._waiting: list[str] = []

    async def of(self, what: str, work: Awaitable[T]) -> T:
        """Do `work`, which starts `what`."""
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
