"""Run coroutines from synchronous code, and functions in detached threads or in workers that may die.

A thread cannot be stopped. If a coroutine that waits for a thread is canceled, the thread continues in the background,
and the process may exit without waiting for the thread: see `has_detached_threads`.
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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from roll.errors import WorkerDiedError

if TYPE_CHECKING:
    from roll.protocols import WorkerPool

__all__ = [
    "MAX_SIGNAL_DELAY_S",
    "handle_interrupt",
    "has_detached_threads",
    "is_cancelled",
    "run_detached",
    "run_in_thread",
    "run_to_end",
    "submit_with_retries",
    "wait_for_future",
]

MAX_SIGNAL_DELAY_S = 0.2
"""Maximum duration of a single wait. A signal that arrives just before the main thread begins to wait for a lock or a
thread, or in another thread, is handled only after that wait."""

MAX_WORKER_ATTEMPTS = 3
"""Maximum number of times that a call is sent to a worker pool whose workers die."""

P = ParamSpec("P")
T = TypeVar("T")

_detached_futures: set[Future[Any]] = set()
"""Futures of threads whose callers were canceled."""
# A thread that still computes while Python exits may crash the process.
atexit.register(lambda: wait(_detached_futures))

_interrupt_handlers: dict[int, Callable[[], object]] = {}
"""Interrupt handlers, by thread id."""


def is_cancelled() -> bool:
    """Return whether the current task itself is being canceled, rather than only an object that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; inside a running event loop, run it in a separate thread and wait.

    SIGINT (Ctrl-C in a shell, "interrupt" in a notebook) calls the handler of `handle_interrupt`, and the caller
    continues to wait. A second SIGINT, or the first if no handler is set, cancels the work. The signal handler itself
    does not raise an exception in the caller.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    context = contextvars.copy_context()
    waiting = _InterruptForwarder()

    async def main() -> T:
        waiting.begin()
        return await coroutine

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="roll") as thread, waiting.handle_interrupts():
        return wait_for_future(thread.submit(context.run, asyncio.run, main()))


def wait_for_future(future: Future[T]) -> T:
    """Wait for a future of another thread and return its result.

    A signal that arrives while the caller waits is handled within `MAX_SIGNAL_DELAY_S`.
    """
    while not future.done():
        wait([future], MAX_SIGNAL_DELAY_S)
    return future.result()


class _InterruptForwarder:
    """Forwards SIGINT from the waiting main thread to the work in another thread."""

    def __init__(self) -> None:
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], int] | None = None
        self._interrupted = False

    def begin(self) -> None:
        """Register the current task as the work that an interrupt cancels; cancel it now if one has already arrived."""
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
            loop.call_soon_threadsafe(_interrupt_handlers.pop(thread, None) or task.cancel)


@contextlib.contextmanager
def handle_interrupt(handler: Callable[[], object]) -> Iterator[None]:
    """Set the handler that runs on this thread's event loop when the caller of `run_to_end` is interrupted."""
    thread = threading.get_ident()
    _interrupt_handlers[thread] = handler
    try:
        yield
    finally:
        _interrupt_handlers.pop(thread, None)


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread, like `asyncio.to_thread`; if the caller is canceled, the thread continues.

    The function must not have side effects outside this process.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=getattr(function, "__name__", ""))
    work = thread.submit(contextvars.copy_context().run, partial(function, *args, **kwargs))
    thread.shutdown(wait=False)
    return await run_detached(work)


async def submit_with_retries(pool: WorkerPool, function: Callable[..., T], *args: Any, time_limit_s: float) -> T:
    """Run a function in a worker; if the worker dies, run it again, up to `MAX_WORKER_ATTEMPTS` times.

    The death of a single worker may have nothing to do with the call, because the kernel kills processes when memory
    runs out. The function may therefore run several times.

    Raises:
        TimeoutError: The function took longer than `time_limit_s`.
        WorkerDiedError: A worker died in every attempt, or the pool is closed.
    """
    for attempt in range(1, MAX_WORKER_ATTEMPTS + 1):
        try:
            return await pool.submit(function, *args, time_limit_s=time_limit_s)
        except WorkerDiedError:
            if attempt == MAX_WORKER_ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


async def run_detached(future: Future[T]) -> T:
    """Wait for a thread's result; on cancellation, let the thread continue and do not wait for it."""
    try:
        return await asyncio.wrap_future(future)
    finally:
        if not future.done():
            _detached_futures.add(future)
            future.add_done_callback(_detached_futures.discard)


def has_detached_threads(timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds for detached threads, and return whether any is still running."""
    return bool(wait(_detached_futures, timeout_s).not_done)
