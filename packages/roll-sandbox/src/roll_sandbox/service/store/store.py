"""The database of a service: reads are immediate, and writes are grouped by a thread (`writer`).

With SQLite, a write-ahead log (WAL) is used and not flushed to disk at each commit. Commits survive the end of the
process, but not a power failure, in which the sandboxes are lost as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Delete, Executable, Row
from sqlalchemy.exc import SQLAlchemyError

from roll_sandbox.errors import ConfigError, SandboxDatabaseError
from roll_sandbox.service.store.engines import DatabaseLock, DatabaseLockedError, hide_password, make_engine
from roll_sandbox.service.store.writer import UNAVAILABLE_ERRORS, Callback, DatabaseWriter, QueuedWrite, describe_error

__all__ = ["Store"]

_LOCK_TIMEOUT_S = 5.0
"""Seconds that a starting server waits for another server to end."""


class Store:
    """Reads and writes a service's database. Any thread may read; `write` must be called in the event loop of `open`.

    Args:
        url: database URL of SQLAlchemy: `sqlite:///file`, `postgresql+psycopg://user@host/name`.

    Raises:
        ConfigError: the URL is invalid, its driver is missing, or the database cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self._shown = hide_password(url)
        self._writer: DatabaseWriter | None = None

    @property
    def unavailable_reason(self) -> str:
        """The reason why writes to the database fail; empty if they succeed."""
        return "" if self._writer is None else self._writer.unavailable_reason

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return 0 if self._writer is None else self._writer.num_waiting

    def lock(self) -> None:
        """Lock the database for this server.

        Raises:
            ConfigError: another server has locked the database, or the database cannot be used.
        """
        self._writer = DatabaseWriter(self.engine, DatabaseLock(self.engine))
        self._wait_for_lock(self._writer.connect)

    def migrate(self, revision: str = "head") -> None:
        """Migrate the tables to the schema `revision`, by default the latest. Fails while another server runs.

        Raises:
            ConfigError: another server has locked the database, a newer ROLL has written it, or a statement fails.
        """
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        script = ScriptDirectory.from_config(config)
        try:
            with self.engine.connect() as connection:
                stored = MigrationContext.configure(connection).get_current_revision()
            known_revisions = {each.revision for each in script.walk_revisions()}
            if stored is not None and stored not in known_revisions:
                raise ConfigError(
                    f"the database '{self._shown}' was written by a newer version of ROLL (revision {stored[:40]}; "
                    f"this version supports {script.get_current_head()}): upgrade ROLL, or restore an older copy of "
                    "the database."
                )
            if stored != script.get_current_head():
                self._upgrade(config, revision)
        except SQLAlchemyError as error:
            raise ConfigError(
                f"the tables of the database '{self._shown}' cannot be migrated: {describe_error(error)}"
            ) from None

    def _upgrade(self, config: Config, revision: str) -> None:
        claim = DatabaseLock(self.engine)
        with self.engine.connect().execution_options(writes=True) as connection:
            try:
                if self._writer is None:
                    self._wait_for_lock(lambda: claim.acquire(connection))
                with connection.begin():
                    config.attributes["connection"] = connection
                    command.upgrade(config, revision)
            finally:
                claim.release()
                # Closing would return the connection to the pool, together with the lock of its session.
                connection.invalidate()

    def _wait_for_lock(self, acquire: Callable[[], None]) -> None:
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                return acquire()
            except DatabaseLockedError:
                if time.monotonic() > until:
                    raise ConfigError(
                        f"another server has locked the database '{self._shown}': stop that server, or choose another "
                        "database (`--database`)."
                    ) from None
                time.sleep(0.1)
            except (*UNAVAILABLE_ERRORS, SQLAlchemyError) as error:
                raise ConfigError(f"the database '{self._shown}' cannot be used: {describe_error(error)}.") from None

    def read(self, statement: Executable) -> Sequence[Row[Any]]:
        """Return all rows of a query; the columns are attributes of the rows.

        Raises:
            SandboxDatabaseError: the database does not respond, or rejects the query.
        """
        with _translate_errors(), self.engine.connect() as connection:
            return connection.execute(statement).all()

    def write_now(self, *statements: Executable) -> None:
        """Execute the statements immediately, in one transaction.

        Raises:
            SandboxDatabaseError: the database does not respond, or rejects a statement.
        """
        with _translate_errors(), self.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)

    def open(self) -> None:
        """Start the writer thread; callbacks run in the current event loop. Call `lock` first."""
        assert self._writer is not None
        self._writer.start(asyncio.get_running_loop())

    def write(
        self,
        statement: Executable,
        values: Mapping[str, Any],
        callback: Callback | None = None,
        *,
        undo: Delete | None = None,
    ) -> None:
        """Queue a write; `callback` is called in the event loop after the write is committed or rejected.

        Args:
            statement: the statement.
            values: the parameters of the statement.
            callback: called with `None` after a commit, or with the error.
            undo: statement that deletes the written row. A write with `undo` is an intent, which is rejected while the
                database is unavailable. A write without `undo` is a fact, which stays queued (see `writer`).
        """
        assert self._writer is not None
        self._writer.put(QueuedWrite(statement, values, callback, undo))

    def close(self) -> None:
        """Write the queued records, and disconnect from the database."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.engine.dispose()


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise SandboxDatabaseError(
            f"the service's database failed: {describe_error(error)}. Retry; if it fails again, check the database of "
            "the service."
        ) from None
