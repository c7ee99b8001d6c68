"""An event loop whose clock jumps to the next timer as soon as nothing is left to do now: tests of days take moments.

What is ready at one moment runs in the order in which it became ready, or, with `shuffle`, in an order that the seed
draws: every seed is one schedule.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run"]

_T = TypeVar("_T")
_MOST_CALLBACKS = 10_000_000
"""At one moment; after more, the program goes round in circles."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """A loop without sockets, signals and threads; `asyncio.to_thread` calls its function at once.

    Args:
        limit_s: virtual time after which the program is ended.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, *, seed: int = 0, shuffle: bool = False, limit_s: float = math.inf) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self._order = random.Random(seed) if shuffle else None
        self._now, self._limit_s = 0.0, limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._num_now = 0

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:
            self._advance()
        now = list(self._ready)
        self._ready.clear()
        if self._order is not None:
            self._order.shuffle(now)
        self._num_now += len(now)
        assert self._num_now < _MOST_CALLBACKS, f"time stands still at {self._now:g} s: {asyncio.all_tasks(self)}"
        for handle in now:
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        assert self._timers, f"nothing can happen any more at {self._now:g} s: {asyncio.all_tasks(self)}"
        self._now, self._num_now = max(self._now, self._timers[0][0]), 0
        assert self._now <= self._limit_s, f"{self._limit_s:g} s of virtual time have passed: {asyncio.all_tasks(self)}"
        while self._timers and self._timers[0][0] <= self._now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Let it lie until its time comes."""

    def _process_events(self, event_list: Any) -> None:
        """There is no outside world."""

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop never sleeps."""


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a program in virtual time to its end."""
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)
    finally:
        events._set_running_loop(None)
