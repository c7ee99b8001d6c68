"""A thread that writes records in groups, and keeps them while the database is unavailable.

    write ──► queue ──► one transaction for all queued writes ──► callbacks
                              │ the database is unavailable
                              ├ intents (a sandbox or program that has not started): refused after a few retries
                              └ facts (events that have happened): kept, in order, until they are written

Therefore no reported event is lost, and no sandbox or program starts that cannot be recorded; the number of running
sandboxes and programs bounds the number of kept writes. If the answer to a transaction is lost, it may have been
committed. Therefore writing a fact again changes nothing, an intent whose row exists is treated as written, and a
refused intent is undone when the database is available again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Connection, Delete, Engine, Executable, Insert, select, text
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from roll_sandbox.errors import SandboxDatabaseError, SandboxError
from roll_sandbox.service.store.engines import DatabaseLock, DatabaseLockedError

__all__ = ["UNAVAILABLE_ERRORS", "DatabaseWriter", "QueuedWrite", "describe_error"]

UNAVAILABLE_ERRORS = (OperationalError, InterfaceError, InternalError, PoolTimeoutError, OSError, DatabaseLockedError)
"""Errors that mean that the database does not answer, is locked, is full, or is read-only."""
_MAX_WRITES = 500
"""Maximum number of writes in one transaction."""
_BACKOFF_S = (0.05, 0.2, 0.5)
"""Seconds to wait before each retry; after the last one, intents are refused."""
_RETRY_DELAY_S = 0.25
"""Seconds between tries while the database is unavailable."""
_CLOSE_TIMEOUT_S = 5.0
"""Seconds during which writing facts is retried when the service ends."""
_log = logging.getLogger(__name__)
Callback: TypeAlias = Callable[[Exception | None], None]


@dataclass(eq=False)
class QueuedWrite:
    """A queued write: an intent if it has `undo`, otherwise a fact."""

    statement: Executable
    values: Mapping[str, Any]
    callback: Callback | None = None
    undo: Delete | None = None
    """Statement that deletes the row of an intent; its parameter `b_x` is the row's value of column `x`."""


class DatabaseWriter:
    """Queues writes, and executes them in a thread."""

    def __init__(self, engine: Engine, lock: DatabaseLock) -> None:
        self._engine = engine
        self._lock = lock
        self._queue: queue.SimpleQueue[QueuedWrite | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._held: list[QueuedWrite] = []
        self._last_attempt = 0.0
        self.unavailable_reason = ""
        """The reason why writing to the database fails; empty if it does not fail."""
        self._thread = threading.Thread(target=self._run, name="sandbox-store", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return self._queue.qsize() + len(self._held)

    def connect(self) -> None:
        """Connect to the database, and lock it for this server.

        Raises:
            UNAVAILABLE_ERRORS: the database is unavailable, or another server has locked it.
        """
        connection = self._engine.connect()
        try:
            self._lock.acquire(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer thread; callbacks are called in `loop`."""
        self._loop = loop
        self._thread.start()

    def put(self, write: QueuedWrite) -> None:
        """Queue a write."""
        self._queue.put(write)

    def close(self) -> None:
        """Write the queued records, and stop the writer thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._disconnect()
        self._lock.release()

    def _run(self) -> None:
        open_ = True
        while open_:
            received = self._collect_writes()
            open_ = None not in received
            self._write_batch([write for write in received if write is not None])
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._held and time.monotonic() < until:
            time.sleep(_RETRY_DELAY_S)
            self._write_batch([])
        if self._held:
            _log.warning("the sandbox service stopped before %d records were written to the database", len(self._held))

    def _collect_writes(self) -> list[QueuedWrite | None]:
        writes: list[QueuedWrite | None] = []
        with contextlib.suppress(queue.Empty):
            writes.append(self._queue.get(timeout=_RETRY_DELAY_S if self.unavailable_reason else None))
            while len(writes) < _MAX_WRITES:
                writes.append(self._queue.get_nowait())
        return writes

    def _write_batch(self, received: list[QueuedWrite]) -> None:
        """Execute the received and the kept writes; if the database is unavailable, reject intents and keep facts."""
        if self.unavailable_reason and time.monotonic() - self._last_attempt < _RETRY_DELAY_S:
            self._refuse_intents(received)
            return
        writes = [*self._held, *received]
        for pause_s in (None,) if self.unavailable_reason else (*_BACKOFF_S, None):
            try:
                self._write_or_raise(writes)
            except UNAVAILABLE_ERRORS as error:
                self._disconnect()
                self._last_attempt = time.monotonic()
                if pause_s is None:
                    if not self.unavailable_reason:
                        _log.warning("the sandbox service's database is unavailable: %s", describe_error(error))
                    self.unavailable_reason = describe_error(error)
                    self._held = [write for write in writes if write.undo is None]
                    self._refuse_intents([write for write in writes if write.undo is not None])
                else:
                    time.sleep(pause_s)
            else:
                self._held = []
                return

    def _refuse_intents(self, writes: list[QueuedWrite]) -> None:
        """Report an error to the callbacks of intents. Keep facts for later, and statements that delete the intents'
        rows.
        """
        error = SandboxDatabaseError(
            f"the service's database is unavailable ({self.unavailable_reason}), so nothing was started: retry."
        )
        for write in writes:
            if write.undo is None:
                self._held.append(write)
            else:
                undone = {f"b_{name}": value for name, value in write.values.items()}
                self._held.append(QueuedWrite(write.undo, {name: undone[name] for name in write.undo.compile().params}))
        self._schedule_callbacks([(write, error) for write in writes if write.undo is not None])

    def _write_or_raise(self, writes: list[QueuedWrite]) -> None:
        """Execute writes in large transactions, or one by one if a transaction is rejected; remove executed writes from
        the list.

        Raises:
            UNAVAILABLE_ERRORS: the writes left in the list were not executed, or it is unknown whether they were
                executed.
        """
        if self._connection is None:
            self.connect()
        connection = self._connection
        assert connection is not None
        while writes:
            some = writes[:_MAX_WRITES]
            errors: list[Exception | None] = [None] * len(some)
            try:
                with connection.begin():
                    _execute(connection, some)
            except UNAVAILABLE_ERRORS:
                raise
            except Exception:  # not only SQLAlchemy's errors: a driver may be unable to encode a value
                errors = [_execute_single(connection, write) for write in some]
            del writes[: len(some)]
            self._mark_available()
            self._schedule_callbacks(list(zip(some, errors, strict=True)))
        if self.unavailable_reason:  # without a write, only a query shows whether the database answers
            with connection.begin():
                connection.execute(text("SELECT 1"))
            self._mark_available()

    def _mark_available(self) -> None:
        if self.unavailable_reason:
            _log.warning("the sandbox service's database is available again")
            self.unavailable_reason = ""

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                connection.invalidate()  # also releases the lock of the session
                connection.close()

    def _schedule_callbacks(self, outcomes: Sequence[tuple[QueuedWrite, Exception | None]]) -> None:
        waiting = [(write.callback, error) for write, error in outcomes if write.callback is not None]
        if waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_run_callbacks, waiting)


def describe_error(error: BaseException) -> str:
    """Return the cause of a database error as one line, at most 200 characters."""
    if isinstance(error, DatabaseLockedError):
        return "another server has locked it"
    origin = getattr(error, "orig", None) or error
    return (str(origin).strip().splitlines() or [type(origin).__name__])[0][:200]


def _run_callbacks(outcomes: list[tuple[Callback, Exception | None]]) -> None:
    for callback, error in outcomes:
        try:
            callback(error)
        except Exception:  # an error in one callback must not prevent the others
            _log.exception("a callback after a database write of the sandbox service failed")


def _execute(connection: Connection, writes: Sequence[QueuedWrite]) -> None:
    """Execute the writes; consecutive writes with the same statement are executed together."""
    start = 0
    while start < len(writes):
        statement, end = writes[start].statement, start
        while end < len(writes) and writes[end].statement is statement:
            end += 1
        connection.execute(statement, [dict(write.values) for write in writes[start:end]])
        start = end


def _execute_single(connection: Connection, write: QueuedWrite) -> Exception | None:
    """Execute one write; return `None`, or the error if the database rejected it.

    An insert whose row already exists is treated as written, because the response to an earlier transaction may have
    been lost.
    """
    try:
        with connection.begin():
            _execute(connection, [write])
    except IntegrityError:
        if _row_exists(connection, write):
            return None
        return SandboxError("the name of the sandbox or program was already used: choose another name")
    except UNAVAILABLE_ERRORS:
        raise
    except Exception as error:
        return SandboxError(f"the service's database rejected a write: {describe_error(error)}")
    return None


def _row_exists(connection: Connection, write: QueuedWrite) -> bool:
    if not isinstance(write.statement, Insert):
        return False
    columns = write.statement.table.c
    values = {name.removeprefix("b_"): value for name, value in write.values.items()}
    same_row = select(text("1")).where(*(columns[name] == value for name, value in values.items()))
    with connection.begin():
        return connection.execute(same_row).first() is not None
