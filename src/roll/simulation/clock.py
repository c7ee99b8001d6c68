"""Virtual time: an asyncio event loop whose clock jumps to the next timer as soon as no callback is ready.

    ready callbacks ──► none left ──► idle callbacks ──► none left ──► time := next timer ──► its callbacks …
          ▲                                 │                                │
          └─────────────────────────────────┴────────────────────────────────┘

Code that gets the time from the running loop (`loop.time`, `asyncio.sleep`, `asyncio.timeout`) runs here unchanged; a
simulated day takes only the compute time of its callbacks.

Invariants:
    - time never goes back, and advances only when no callback is ready; callbacks take no time;
    - timers due at the same time run in the order in which they were set (asyncio's own loop does not guarantee that),
      and ready callbacks in the order in which they became ready, so every run of a program is identical. With
    `shuffle`, the seed determines both orders;
    - a program that waits for an event that never happens ends with `DeadlockError`, which names the waiting tasks.
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

from roll.errors import RollError

__all__ = ["DeadlockError", "TimeLimitError", "VirtualTimeLoop", "run"]

T = TypeVar("T")

MAX_CALLBACKS_PER_INSTANT = 50_000_000
"""Maximum number of callbacks at the same virtual time; a larger number indicates an endless loop."""
MAX_LISTED_TASKS = 20
"""Maximum number of waiting tasks that an error lists."""
PRUNE_THRESHOLD = 100
"""Canceled timers are removed when their number exceeds this threshold and the number of live timers."""


class DeadlockError(RollError):
    """No callback is ready and no timer is set, but the program has not ended."""


class TimeLimitError(RollError):
    """The program reached its limit of virtual time, or virtual time did not advance."""


class _Timer(asyncio.TimerHandle):
    """Asyncio's timer, with its private attributes declared."""

    _scheduled: bool
    """True if the timer is in the loop's queue."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop without I/O: it has no sockets, signals or threads, and its own clock.

    `run_in_executor` (and so `asyncio.to_thread`) calls the function immediately; the call takes no virtual time.

    Args:
        seed: Seed of `random`, and of the order of callbacks if `shuffle` is true.
        shuffle: If True, callbacks that are ready at the same time run in a random order, which the seed determines.
        limit_s: Limit on the virtual time, after which the program is ended; it detects programs that wait forever
            while a timer repeats.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, *, seed: int = 0, shuffle: bool = False, limit_s: float = math.inf) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)
        self.num_callbacks = 0
        """Number of callbacks so far, for measurements."""
        self._now = 0.0
        self._limit_s = limit_s
        self._order = random.Random(seed) if shuffle else None
        self._timers: list[tuple[float, int, _Timer]] = []
        self._sequence = itertools.count()
        self._num_cancelled = 0
        self._idle_callbacks: deque[asyncio.Handle] = deque()
        self._num_this_instant = 0

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a virtual time; a time in the past means now."""
        if not when >= 0:
            raise ValueError(f"a timer was set to {when}: times must be 0 or greater")
        if self.is_closed():
            raise RuntimeError("the event loop is closed")
        timer = _Timer(when, callback, args, self, context)
        timer._scheduled = True
        heapq.heappush(self._timers, (when, next(self._sequence), timer))
        return timer

    def call_when_idle(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Schedule a callback at the current time, after all other callbacks that become ready at this time.

        This lets one callback handle all events that occur at the same time.
        """
        handle = asyncio.Handle(callback, args, self)
        self._idle_callbacks.append(handle)
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call the function immediately, in this thread; `executor` is ignored."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # like a thread, pass any exception to the awaiting task
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """Run every callback that is ready now; if none is ready, advance the time first."""
        ready = self._ready
        if not ready:
            if self._idle_callbacks:
                ready.append(self._idle_callbacks.popleft())
            elif not self._stopping:
                self._advance()
        if self._order is not None and len(ready) > 1:
            handles = list(ready)
            self._order.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        num_ready = len(ready)
        self.num_callbacks += num_ready
        self._num_this_instant += num_ready
        if self._num_this_instant > MAX_CALLBACKS_PER_INSTANT:
            raise TimeLimitError(
                f"virtual time is stuck at {self._now:g} s: {self._num_this_instant:,} callbacks ran without advancing "
                f"it. {self._describe_waiting_tasks()}"
            )
        for _ in range(num_ready):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> None:
        """Advance the time to the next timer, and make all timers that are due at that time ready.

        Raises:
            DeadlockError: No timer is set.
            TimeLimitError: The next timer is due after the time limit.
        """
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._num_cancelled -= 1
        if not timers:
            raise DeadlockError(f"no event is scheduled after {self._now:g} s. {self._describe_waiting_tasks()}")
        now = max(self._now, timers[0][0])
        if now > self._limit_s:
            raise TimeLimitError(
                f"the limit of {self._limit_s:g} s of virtual time is reached. {self._describe_waiting_tasks()}"
            )
        if now > self._now:
            self._num_this_instant = 0
        self._now = now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._num_cancelled -= 1
            else:
                self._ready.append(timer)

    def _timer_handle_cancelled(self, handle: _Timer) -> None:
        """Count a canceled timer, and remove canceled timers once there are many.

        asyncio calls this for a timer that is canceled before it is due.
        """
        if not handle._scheduled:
            return
        self._num_cancelled += 1
        if self._num_cancelled > max(PRUNE_THRESHOLD, len(self._timers) // 2):
            for entry in self._timers:
                entry[2]._scheduled = not entry[2]._cancelled
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _describe_waiting_tasks(self) -> str:
        """Describe the waiting tasks, each with its location in the code."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        if not tasks:
            return "No task is waiting."
        named = [f"  {task.get_name()}: {_describe_location(task)}" for task in tasks[:MAX_LISTED_TASKS]]
        more = f"\n  … and {len(tasks) - MAX_LISTED_TASKS} more" if len(tasks) > MAX_LISTED_TASKS else ""
        return f"{len(tasks)} task{'s wait' if len(tasks) > 1 else ' waits'}:\n" + "\n".join(named) + more

    def _process_events(self, event_list: Any) -> None:
        """Do nothing, since the loop has no I/O."""

    def _write_to_self(self) -> None:
        """Do nothing, since the loop never sleeps and needs no wake-up."""


def _describe_location(task: asyncio.Task[Any]) -> str:
    """Return the location at which a task waits: the innermost function and the caller, with line numbers."""
    frames: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return " ← ".join(frames[-1:-3:-1]) or "not begun"


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, shuffle: bool = False, limit_s: float = math.inf) -> T:
    """Run a program in virtual time to its end, and return its result; tasks that are still running are then canceled.

    Any exception carries a note with the seed that reproduces it.

    Args:
        main: The program.
        seed: Seed of the loop's `random`, and of the order of callbacks if `shuffle` is true.
        shuffle: If True, callbacks that are ready at the same time run in a random order, which the seed determines.
        limit_s: Virtual time after which the program is ended.

    Raises:
        DeadlockError: The program waits for an event that can never happen.
        TimeLimitError: The program runs for longer than `limit_s`, or runs forever without advancing the virtual time.
    """
    loop = VirtualTimeLoop(seed=seed, shuffle=shuffle, limit_s=limit_s)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
    except BaseException as error:
        error.add_note(f"in virtual time, seed {seed}{', shuffled' if shuffle else ''}, at {loop.time():g} s")
        raise
    finally:
        events._set_running_loop(None)
