"""One thread to compute in, which does not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["WorkerThread"]

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class WorkerThread(Executor):
    """Runs functions in order.

    Python's own pool joins its threads when the process ends; a thread that hangs in a computation would hold the
    process forever, and no thread can be ended from outside.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """See `Executor.submit`."""
        future: Future[Any] = Future()
        self._work.put((future, fn, args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its queued work; with `wait`, return when it has ended."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, function, args = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
