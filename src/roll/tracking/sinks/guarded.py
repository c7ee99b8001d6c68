"""Wrap a tracker so that it can neither block nor end a run.

    run's thread: log, table ──► queue (bounded) ──► thread of the sink ──► its client, one call at a time

Invariants:
    - the client is opened, used and closed by one thread, which is not the main thread (where some clients would catch
      Ctrl-C);
    - calls are made in order; a call that fails, or is dropped because the queue is full, is counted and logged; the
      run directory is complete without it;
    - `flush` and `close` wait for a limited time, so a server that does not respond delays a run only once, at its end.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from textwrap import shorten

from roll.errors import ConfigError
from roll.tracking.sinks.base import RolloutTable, Sink

__all__ = ["GuardedSink", "has_detached_threads"]

logger = logging.getLogger(__name__)

MAX_QUEUED_CALLS = 1000
"""Maximum number of calls that wait for a slow tracker."""
OPEN_TIMEOUT_S = 120.0
"""Timeout for a tracker at the start of a run."""
CLOSE_TIMEOUT_S = 60.0
"""Timeout for a tracker at the end of a run."""

_MAX_REASON_LENGTH = 300
_abandoned_trackers: set[str] = set()


class GuardedSink:
    """Passes calls to a sink in a separate thread, and counts failures instead of raising them.

    Args:
        name: Key of the tracker in `tracking`.
        factory: Opens the sink, in the thread; the constructor waits for the result.
        max_waiting: Maximum number of waiting calls; further calls are failures.
        open_limit_s: Timeout for opening the sink.
        close_limit_s: Total timeout for `flush` and `close`.

    Raises:
        ConfigError: The sink cannot be opened (only in the constructor).
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[], Sink],
        *,
        max_waiting: int = MAX_QUEUED_CALLS,
        open_limit_s: float = OPEN_TIMEOUT_S,
        close_limit_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.num_failures = 0
        self.is_abandoned = False
        self._limit_s = close_limit_s
        self._counting = threading.Lock()
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        sink_future: Future[Sink] = Future()
        # A daemon thread, so that a hanging client does not keep the process from exiting.
        self._thread = threading.Thread(
            target=self._run_calls, args=(factory, sink_future), name=f"tracker {name}", daemon=True
        )
        self._thread.start()
        try:
            self._sink = sink_future.result(open_limit_s)
        except ConfigError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not sink_future.done():  # Ctrl-C here, not an exit of the client
                raise
            late = isinstance(error, TimeoutError) and not sink_future.done()
            why = f"no response within {open_limit_s:g} s" if late else _format_one_line(error).rstrip(".")
            raise ConfigError(
                f"tracking.{name}: the tracker could not be started ({why}). "
                "Fix the cause, or disable the tracker: "
                f"`tracking.{name}={'false' if name == 'tensorboard' else 'null'}`."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite metrics, or count a failure and drop them if the queue is full; returns immediately."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._enqueue(lambda: self._sink.log(step, finite))

    def log_table(self, step: int, table: RolloutTable) -> None:
        """Queue some rollouts, or count a failure and drop them if the queue is full; returns immediately."""
        self._enqueue(lambda: self._sink.log_table(step, table))

    def flush(self) -> None:
        """Wait until all queued calls have been made, at most until the time limit for closing."""
        arrived = threading.Event()
        started = time.monotonic()
        if self._enqueue(arrived.set):
            arrived.wait(self._limit_s)
        self._limit_s = max(0.0, self._limit_s - (time.monotonic() - started))

    def close(self) -> None:
        """Close the sink; calling this twice is safe. A sink that does not close in time is abandoned, which is counted
        as a failure.
        """
        if self._thread.is_alive():
            self._enqueue(self._sink.close)
            self._enqueue(None)
            self._thread.join(self._limit_s)
        if self._thread.is_alive():
            self.is_abandoned = True
            _abandoned_trackers.add(self.name)
            self._record_failure(f"{self._calls.qsize()} calls were still queued when the run ended")

    def _enqueue(self, call: Callable[[], None] | None) -> bool:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._record_failure(f"the queue of {self._calls.maxsize} calls is full")
            return False
        return True

    def _run_calls(self, factory: Callable[[], Sink], sink_future: Future[Sink]) -> None:
        try:
            sink_future.set_result(factory())
        except BaseException as error:
            sink_future.set_exception(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # some clients call `sys.exit`
                self._record_failure(_format_one_line(error), error)

    def _record_failure(self, reason: str, error: BaseException | None = None) -> None:
        with self._counting:
            self.num_failures += 1
            level = logging.WARNING if self.num_failures == 1 else logging.INFO
        logger.log(level, "tracking.%s failed, and training continues: %s", self.name, reason, exc_info=error)


def has_detached_threads() -> bool:
    """Return whether a tracker of this process was abandoned, so that its thread may keep Python from exiting."""
    return bool(_abandoned_trackers)


def _format_one_line(error: BaseException) -> str:
    """Return the error's class and message on one line, truncated, since some messages contain whole SQL statements."""
    return shorten(f"{type(error).__name__}: {error}", _MAX_REASON_LENGTH, placeholder=" …")
