"""What a run that starts is still waiting for, in words: starting takes from seconds to minutes."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roll.config.pipelines.rlvr import RLVRConfig

__all__ = ["StartNotes", "where_it_runs"]

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
            return await work
        finally:
            self._waiting.remove(what)
            if self._waiting:
                seconds = self._clock() - self._began
                self._say(f"starting {', '.join(self._waiting)} ({what}: {seconds:.0f} s)")


def where_it_runs(config: RLVRConfig) -> str:
    """Engines, trainer and machine in a few words, for the header."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" + ("s" if number != 1 else "")

    kind = "" if config.inference.engine == "auto" else f"{config.inference.engine} "
    engines, ranks = count(config.num_engines, f"{kind}engine"), count(config.num_ranks, "trainer rank")
    if config.replay is not None:
        engines, ranks = (engines, "no trainer") if config.replay.only == "rollout" else ("no engine", ranks)
    return f"{config.cluster.type}: {engines}, {ranks}, {count(os.cpu_count() or 1, 'core')}"
