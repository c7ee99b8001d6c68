"""A wrapper with which a tracker can neither block a run nor end it.

    run's thread: log, table ──► queue (bounded) ──► thread of the sink ──► its client, one call at a time

Invariants:
    - the client is opened, used and closed by one thread, which is not the main thread (where some clients would catch
      Ctrl-C);
    - calls are made in order; a call that fails, or for which the queue is full, is counted and logged, and the run's
      own record is complete without it;
    - `settle` and `close` wait for a limited time: a server that does not respond costs a run that time once, at its
      end.
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

MOST_WAITING = 1000
"""Maximum number of calls that wait for a slow tracker."""
OPEN_LIMIT_S = 120.0
"""Timeout for a tracker at the start of a run."""
CLOSE_LIMIT_S = 60.0
"""Timeout for a tracker at the end of a run."""

_LONGEST_REASON = 300
_left_behind: set[str] = set()


class GuardedSink:
    """A sink whose failures are counted, not raised.

    Args:
        name: key of the tracker in `tracking`.
        make: opens the sink; the constructor waits for it.
        most_waiting: maximum number of waiting calls; further calls are failures.
        open_limit_s: timeout for opening the sink.
        close_limit_s: timeout for `settle` and `close` together.

    Raises:
        ConfigError: the sink cannot be opened (only in the constructor).
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        most_waiting: int = MOST_WAITING,
        open_limit_s: float = OPEN_LIMIT_S,
        close_limit_s: float = CLOSE_LIMIT_S,
    ) -> None:
        self.name = name
        self.num_failures = 0
        self.is_left_behind = False
        self._limit_s = close_limit_s
        self._counting = threading.Lock()
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        opened: Future[Sink] = Future()
        self._thread = threading.Thread(target=self._work, args=(make, opened), name=f"tracker {name}", daemon=True)
        self._thread.start()
        try:
            self._sink = opened.result(open_limit_s)
        except ConfigError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not opened.done():  # Ctrl-C here, not an exit of the client
                raise
            late = isinstance(error, TimeoutError) and not opened.done()
            why = f"no answer in {open_limit_s:g} s" if late else _in_a_line(error).rstrip(".")
            raise ConfigError(
                f"tracking.{name}: it could not be started ({why}). "
                "Fix the cause, or turn the tracker off: "
                f"`tracking.{name}={'false' if name == 'tensorboard' else 'null'}`."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite metrics; returns immediately."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda: self._sink.log(step, finite))

    def table(self, step: int, table: RolloutTable) -> None:
        """Queue some rollouts; returns immediately."""
        self._put(lambda: self._sink.table(step, table))

    def settle(self) -> None:
        """Wait, for a limited time, until all calls so far have been made."""
        arrived = threading.Event()
        started = time.monotonic()
        if self._put(arrived.set):
            arrived.wait(self._limit_s)
        self._limit_s = max(0.0, self._limit_s - (time.monotonic() - started))

    def close(self) -> None:
        """Close the sink; may be called twice. A sink that does not end in time is abandoned, and counted."""
        if self._thread.is_alive():
            self._put(self._sink.close)
            self._put(None)
            self._thread.join(self._limit_s)
        if self._thread.is_alive():
            self.is_left_behind = True
            _left_behind.add(self.name)
            self._failed(f"{self._calls.qsize()} calls were still waiting when the run ended")

    def _put(self, call: Callable[[], None] | None) -> bool:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed(f"it is {self._calls.maxsize} calls behind")
            return False
        return True

    def _work(self, make: Callable[[], Sink], opened: Future[Sink]) -> None:
        try:
            opened.set_result(make())
        except BaseException as error:
            opened.set_exception(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # some clients call `sys.exit`
                self._failed(_in_a_line(error), error)

    def _failed(self, why: str, error: BaseException | None = None) -> None:
        with self._counting:
            self.num_failures += 1
            level = logging.WARNING if self.num_failures == 1 else logging.INFO
        logger.log(level, "tracking.%s failed, training goes on: %s", self.name, why, exc_info=error)


def has_detached_threads() -> bool:
    """Return whether this process gave up a tracker, whose client's exit hooks may then keep Python from ending."""
    return bool(_left_behind)


def _in_a_line(error: BaseException) -> str:
    """Return the error's name and the beginning of its message; some clients' messages hold a whole SQL statement."""
    return shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" …")
