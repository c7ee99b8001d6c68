"""Grouped writes by one thread, which survive outages of the database.

    write ──► queue ──► one transaction for all queued writes ──► callbacks
                              │ the database is away
                              ├ intents (a sandbox or program that has not started): refused after a few retries
                              └ facts (events that have happened): held, in order, until they are written

So no reported event is lost, nothing starts that cannot be recorded, and the number of held writes is bounded by the
number of running sandboxes and programs. A transaction whose answer was lost may have been committed: writing a fact
again changes nothing, an intent whose row exists counts as written, and a refused intent is undone when the database is
available again.
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

__all__ = ["UNAVAILABLE_ERRORS", "Write", "Writer", "describe_error"]

UNAVAILABLE_ERRORS = (OperationalError, InterfaceError, InternalError, PoolTimeoutError, OSError, DatabaseLockedError)
"""Errors of a database that does not answer, is locked, full or read-only."""
_MAX_WRITES = 500
"""Most writes of one transaction."""
_BACKOFF_S = (0.05, 0.2, 0.5)
"""Pauses between tries, before intents are refused."""
_RETRY_S = 0.25
"""Pause between tries while the database is away."""
_CLOSE_TIMEOUT_S = 5.0
"""How long to try to write facts when the service ends."""
_log = logging.getLogger(__name__)
Callback: TypeAlias = Callable[[Exception | None], None]


@dataclass(eq=False)
class Write:
    """One write: of a fact, or, with `undo`, of an intent."""

    statement: Executable
    values: Mapping[str, Any]
    callback: Callback | None = None
    undo: Delete | None = None
    """Deletes an intent's row; its parameters are named `b_` and the column."""


class Writer:
    """The writer thread; see the module."""

    def __init__(self, engine: Engine, lock: DatabaseLock) -> None:
        self._engine = engine
        self._lock = lock
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._held: list[Write] = []
        self._last_attempt = 0.0
        self.unavailable_reason = ""
        """Why the database cannot be written; empty while it answers."""
        self._thread = threading.Thread(target=self._run, name="sandbox-store", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return self._queue.qsize() + len(self._held)

    def connect(self) -> None:
        """Connect to the database and lock it for this server.

        Raises:
            AWAY: the database is away, or another server has it.
        """
        connection = self._engine.connect()
        try:
            self._lock.acquire(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; `then` callbacks are called in `loop`."""
        self._loop = loop
        self._thread.start()

    def put(self, write: Write) -> None:
        """Queue a write."""
        self._queue.put(write)

    def close(self) -> None:
        """Write what is queued, and stop the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._disconnect()
        self._lock.release()

    def _run(self) -> None:
        open_ = True
        while open_:
            came = self._next()
            open_ = None not in came
            self._write_batch([write for write in came if write is not None])
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._held and time.monotonic() < until:
            time.sleep(_RETRY_S)
            self._write_batch([])
        if self._held:
            _log.warning("the sandbox service ends with %d records not written to the database", len(self._held))

    def _next(self) -> list[Write | None]:
        found: list[Write | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._queue.get(timeout=_RETRY_S if self.unavailable_reason else None))
            while len(found) < _MAX_WRITES:
                found.append(self._queue.get_nowait())
        return found

    def _write_batch(self, came: list[Write]) -> None:
        """Write new and held writes; if the database is away, refuse intents and hold facts."""
        if self.unavailable_reason and time.monotonic() - self._last_attempt < _RETRY_S:
            self._refuse(came)
            return
        writes = [*self._held, *came]
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
                    self._refuse([write for write in writes if write.undo is not None])
                else:
                    time.sleep(pause_s)
            else:
                self._held = []
                return

    def _refuse(self, writes: list[Write]) -> None:
        """Report to intents that they are not written, now or later; hold facts."""
        error = SandboxDatabaseError(
            f"the service's database does not answer ({self.unavailable_reason}), so nothing was started: retry."
        )
        for write in writes:
            if write.undo is None:
                self._held.append(write)
            else:
                undone = {f"b_{name}": value for name, value in write.values.items()}
                self._held.append(Write(write.undo, {name: undone[name] for name in write.undo.compile().params}))
        self._report([(write, error) for write in writes if write.undo is not None])

    def _write_or_raise(self, writes: list[Write]) -> None:
        """Write everything in one transaction, or one by one if that is refused; remove from the list what is written.

        Raises:
            AWAY: the rest is not written, or its state is unknown.
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
            except Exception:  # also values that a driver cannot encode, which raise no SQLAlchemy error
                errors = [_execute_alone(connection, write) for write in some]
            del writes[: len(some)]
            self._mark_available()
            self._report(list(zip(some, errors, strict=True)))
        if self.unavailable_reason:
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
                connection.invalidate()  # releases the session's lock
                connection.close()

    def _report(self, told: Sequence[tuple[Write, Exception | None]]) -> None:
        waiting = [(write.callback, error) for write, error in told if write.callback is not None]
        if waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_run_callbacks, waiting)


def describe_error(error: BaseException) -> str:
    """Return an error's reason in one line."""
    if isinstance(error, DatabaseLockedError):
        return "another server has locked it"
    origin = getattr(error, "orig", None) or error
    return (str(origin).strip().splitlines() or [type(origin).__name__])[0][:200]


def _run_callbacks(told: list[tuple[Callback, Exception | None]]) -> None:
    for then, error in told:
        try:
            then(error)
        except Exception:  # an error of one callback must not stop the others
            _log.exception("a callback after a database write of the sandbox service failed")


def _execute(connection: Connection, writes: Sequence[Write]) -> None:
    """Execute the writes, consecutive ones with the same statement together."""
    start = 0
    while start < len(writes):
        statement, end = writes[start].statement, start
        while end < len(writes) and writes[end].statement is statement:
            end += 1
        connection.execute(statement, [dict(write.values) for write in writes[start:end]])
        start = end


def _execute_alone(connection: Connection, write: Write) -> Exception | None:
    """Execute one write and return the error that refuses it.

    An insert whose row exists, from a transaction whose answer was lost, counts as written.
    """
    try:
        with connection.begin():
            _execute(connection, [write])
    except IntegrityError:
        return None if _row_exists(connection, write) else SandboxError("the name was already used")
    except UNAVAILABLE_ERRORS:
        raise
    except Exception as error:
        return SandboxError(f"the service's database rejects the write: {describe_error(error)}")
    return None


def _row_exists(connection: Connection, write: Write) -> bool:
    if not isinstance(write.statement, Insert):
        return False
    columns = write.statement.table.c
    values = {name.removeprefix("b_"): value for name, value in write.values.items()}
    mine = select(text("1")).where(*(columns[name] == value for name, value in values.items()))
    with connection.begin():
        return connection.execute(mine).first() is not None
