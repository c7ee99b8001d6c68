"""Run coroutines from synchronous code, even inside a running loop (a notebook), and threads that outlive callers.

A thread cannot be stopped from outside. When a coroutine that waits for a thread is canceled, the thread is left to
finish, and a process need not wait for it when it exits: see `has_detached_threads`.
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
    "has_detached_threads",
    "interruptible",
    "is_cancelled",
    "run_detached",
    "run_in_thread",
    "run_to_end",
    "wait_for_future",
]

SIGNALS_AFTER_S = 0.2
"""Maximum duration of a single wait. A signal that arrives just before the main thread begins to wait for a lock or a
thread, or in another thread, is handled only after that wait."""

P = ParamSpec("P")
T = TypeVar("T")

_left: set[Future[Any]] = set()
"""Futures of threads whose callers were canceled."""
atexit.register(lambda: wait(_left))  # a thread that still computes while Python exits may crash the process

_requests: dict[int, Callable[[], object]] = {}
"""Functions that ask the work in a thread to stop, by thread id."""


def is_cancelled() -> bool:
    """Return whether the running task itself is being canceled, as opposed to an object that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; inside a running loop, in a separate thread while the caller waits.

    SIGINT (Ctrl-C in a shell, "interrupt" in a notebook) asks `interruptible` work to stop, and the caller keeps
    waiting. A second SIGINT, or the first if the work is not `interruptible`, cancels the work. The caller itself does
    not raise, since it could be anywhere between starting the thread and waiting for it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    context = contextvars.copy_context()
    waiting = _InterruptForwarder()

    async def main() -> T:
        waiting.begin()
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="roll") as thread, waiting.handle_interrupts():
        return wait_for_future(thread.submit(context.run, asyncio.run, main()))


def wait_for_future(work: Future[T]) -> T:
    """Wait for a future of another thread and return its result.

    A signal that arrives while the caller waits is handled within `SIGNALS_AFTER_S`.
    """
    while not work.done():
        wait([work], SIGNALS_AFTER_S)
    return work.result()


class _InterruptForwarder:
    """Forwards an interrupt of the waiting caller to the work in another thread."""

    def __init__(self) -> None:
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], int] | None = None
        self._interrupted = False

    def begin(self) -> None:
        """Record the current task as the work; an interrupt that came earlier cancels it at its first await."""
        task = asyncio.current_task()
        assert task is not None
        self._work = asyncio.get_running_loop(), task, threading.get_ident()
        if self._interrupted:
            task.cancel()

    @contextlib.contextmanager
    def handle_interrupts(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
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
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_requests.pop(thread, None) or task.cancel)


@contextlib.contextmanager
def interruptible(ask: Callable[[], object]) -> Iterator[None]:
    """Run the body with `ask` as the interrupt handler: when the caller of `run_to_end` is interrupted, `ask` is called
    on this thread's event loop.
    """
    thread = threading.get_ident()
    _requests[thread] = ask
    try:
        yield
    finally:
        _requests.pop(thread, None)


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread, like `asyncio.to_thread`; if the caller is canceled, the thread continues.

    The function must not change anything that outlives this process.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=getattr(function, "__name__", ""))
    work = thread.submit(contextvars.copy_context().run, partial(function, *args, **kwargs))
    thread.shutdown(wait=False)
    return await run_detached(work)


async def run_detached(work: Future[T]) -> T:
    """Wait for a thread's result; on cancellation, leave the thread running without waiting for it."""
    try:
        return await asyncio.wrap_future(work)
    finally:
        if not work.done():
            _left.add(work)
            work.add_done_callback(_left.discard)


def has_detached_threads(timeout_s: float) -> bool:
    """Return whether a thread of a canceled caller is still running after `timeout_s` seconds."""
    return bool(wait(_left, timeout_s).not_done)
