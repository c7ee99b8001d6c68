"""Running a coroutine to its end from plain code, also where a loop runs already (a notebook)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["interruptible", "run_to_end"]

T = TypeVar("T")

_requests: dict[int, Callable[[], object]] = {}
"""By thread: what asks the work in it to stop."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; where a loop is running already, in a thread of its own, while the caller waits.

    A `KeyboardInterrupt` that reaches the waiting caller (Ctrl-C in a shell, "interrupt" in a notebook) asks the work
    to stop, as far as it is `interruptible`, and is waited for; a second one cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    context = contextvars.copy_context()
    started: dict[str, Any] = {}

    async def main() -> T:
        started.update(loop=asyncio.get_running_loop(), task=asyncio.current_task(), thread=threading.get_ident())
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="roll") as thread:
        future = thread.submit(context.run, asyncio.run, main())
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done() or "loop" not in started:
                    raise
                ask = _requests.pop(started["thread"], None) or started["task"].cancel
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    started["loop"].call_soon_threadsafe(ask)


@contextlib.contextmanager
def interruptible(ask: Callable[[], object]) -> Iterator[None]:
    """While inside, an interrupt of who waits in `run_to_end` calls `ask` on this thread's loop."""
    thread = threading.get_ident()
    _requests[thread] = ask
    try:
        yield
    finally:
        _requests.pop(thread, None)
