"""Running a coroutine to its end from plain code, also where a loop runs already (a notebook); and what has no end yet.

A thread cannot be ended from outside. What it computes for a coroutine that is cancelled is left to it, and a process
that does nothing else need not wait for that at its end: see `left_behind`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "SIGNALS_AFTER_S",
    "in_thread",
    "interruptible",
    "is_cancelled",
    "left_behind",
    "or_leave",
    "result_of",
    "run_to_end",
]

SIGNALS_AFTER_S = 0.2
"""A signal that comes just before the main thread begins to wait for a lock, or to another thread, does not end that
wait, and Python handles it only after it: so no wait is longer."""

P = ParamSpec("P")
T = TypeVar("T")

_left: set[Future[Any]] = set()
"""What threads compute for coroutines that were cancelled."""
atexit.register(lambda: wait(_left))  # a thread that computes while Python ends may crash it

_requests: dict[int, Callable[[], object]] = {}
"""By thread: what asks the work in it to stop."""


def is_cancelled() -> bool:
    """Return whether somebody cancels the running task, where a `CancelledError` may come from what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; where a loop is running already, in a thread of its own, while the caller waits.

    SIGINT while the caller waits (Ctrl-C in a shell, "interrupt" in a notebook) asks the work to stop, as far as it is
    `interruptible`, and is waited for; a second one cancels it. Nothing is raised in the caller itself, which could be
    anywhere between starting the thread and waiting for it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    context = contextvars.copy_context()
    waiting = _Waiting()

    async def main() -> T:
        waiting.begin()
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="roll") as thread, waiting.takes_interrupts():
        return result_of(thread.submit(context.run, asyncio.run, main()))


def result_of(work: Future[T]) -> T:
    """What another thread brings; a signal that comes while the caller waits is handled within `SIGNALS_AFTER_S`."""
    while not work.done():
        wait([work], SIGNALS_AFTER_S)
    return work.result()


class _Waiting:
    """What an interrupt of who waits does to the work that runs in another thread."""

    def __init__(self) -> None:
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], int] | None = None
        self._interrupted = False

    def begin(self) -> None:
        """The work begins, in this task; an interrupt that was there before cancels it at its first wait."""
        task = asyncio.current_task()
        assert task is not None
        self._work = asyncio.get_running_loop(), task, threading.get_ident()
        if self._interrupted:
            task.cancel()

    @contextlib.contextmanager
    def takes_interrupts(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # no signal is handled in any other
            yield
            return
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        if self._work is None:
            return
        loop, task, thread = self._work
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_requests.pop(thread, None) or task.cancel)


@contextlib.contextmanager
def interruptible(ask: Callable[[], object]) -> Iterator[None]:
    """While inside, an interrupt of who waits in `run_to_end` calls `ask` on this thread's loop."""
    thread = threading.get_ident()
    _requests[thread] = ask
    try:
        yield
    finally:
        _requests.pop(thread, None)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, for what may be left behind: it changes nothing that outlives this process."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=getattr(function, "__name__", ""))
    work = thread.submit(contextvars.copy_context().run, partial(function, *args, **kwargs))
    thread.shutdown(wait=False)
    return await or_leave(work)


async def or_leave(work: Future[T]) -> T:
    """Wait for what a thread computes; when cancelled, leave it to the thread, and do not wait for its end."""
    try:
        return await asyncio.wrap_future(work)
    finally:
        if not work.done():
            _left.add(work)
            work.add_done_callback(_left.discard)


def left_behind(patience_s: float) -> bool:
    """Whether a thread still computes what nobody waits for, after so many seconds at most."""
    return bool(wait(_left, patience_s).not_done)
