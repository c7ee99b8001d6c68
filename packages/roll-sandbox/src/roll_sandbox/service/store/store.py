"""The database of a service: reads are immediate, writes are grouped (`writer`).

Under SQLite a write-ahead log (WAL) is used that is not flushed at each commit: commits outlive the process, however it
ends, and a machine that loses power loses the sandboxes as well.
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
from roll_sandbox.service.store.writer import UNAVAILABLE_ERRORS, Callback, Write, Writer, describe_error

__all__ = ["Store"]

_LOCK_TIMEOUT_S = 5.0
"""How long a starting server waits for another one to end."""


class Store:
    """A service's database; see the module. Any thread may read; `write` belongs to the event loop of `open`.

    Args:
        url: database URL of SQLAlchemy: `sqlite:///file`, `postgresql+psycopg://user@host/name`.

    Raises:
        ConfigError: the URL is invalid, its driver is missing, or the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self._shown = hide_password(url)
        self._writer: Writer | None = None

    @property
    def unavailable_reason(self) -> str:
        """Why the database cannot be written; empty while it answers."""
        return "" if self._writer is None else self._writer.unavailable_reason

    @property
    def num_waiting(self) -> int:
        """Number of writes that are not in the database yet."""
        return 0 if self._writer is None else self._writer.num_waiting

    def lock(self) -> None:
        """Lock the database for this server.

        Raises:
            ConfigError: another server has it, or it does not answer.
        """
        self._writer = Writer(self.engine, DatabaseLock(self.engine))
        self._wait_for_lock(self._writer.connect)

    def migrate(self, revision: str = "head") -> None:
        """Migrate the tables to this version; not while another server runs.

        Raises:
            ConfigError: the database refuses, a newer ROLL has written it, or a server has it.
        """
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        script = ScriptDirectory.from_config(config)
        try:
            with self.engine.connect() as connection:
                found = MigrationContext.configure(connection).get_current_revision()
            if found is not None and found not in {each.revision for each in script.walk_revisions()}:
                raise ConfigError(
                    f"the database '{self._shown}' was written by a newer ROLL (its revision is {found[:40]}, the "
                    f"latest known one is {script.get_current_head()}): install the newer version, or restore an older "
                    "copy of the database."
                )
            if found != script.get_current_head():
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
                connection.invalidate()

    def _wait_for_lock(self, take: Callable[[], None]) -> None:
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                return take()
            except DatabaseLockedError:
                if time.monotonic() > until:
                    raise ConfigError(
                        f"another server has locked the database '{self._shown}': stop that server, or choose another "
                        "database (`--database`)."
                    ) from None
                time.sleep(0.1)
            except (*UNAVAILABLE_ERRORS, SQLAlchemyError) as error:
                raise ConfigError(f"the database '{self._shown}' does not answer: {describe_error(error)}.") from None

    def read(self, statement: Executable) -> Sequence[Row[Any]]:
        """Return all rows; their columns are attributes.

        Raises:
            SandboxDatabaseError: the database does not answer.
        """
        with _translate_errors(), self.engine.connect() as connection:
            return connection.execute(statement).all()

    def write_now(self, *statements: Executable) -> None:
        """Write immediately, in one transaction.

        Raises:
            SandboxDatabaseError: the database does not answer, or refuses.
        """
        with _translate_errors(), self.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)

    def open(self) -> None:
        """Start to write, in this event loop; `claim` must have been called."""
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
        """Queue a write; `callback` is called in the loop once it is committed, or with the error that refused it.

        Args:
            statement: the statement.
            values: its parameters.
            callback: callback.
            undo: deletes the written row. With it, the write is an intent, which is refused while the database is
                away; without it, the write is a fact, which waits (`writer`).
        """
        assert self._writer is not None
        self._writer.put(Write(statement, values, callback, undo))

    def close(self) -> None:
        """Write what is queued, and disconnect."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.engine.dispose()


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise SandboxDatabaseError(f"the service's database does not answer: {describe_error(error)}; retry.") from None
