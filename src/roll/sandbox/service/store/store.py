"""The database of a service: reads at once, writes in groups.

    write ──► queue ──► one thread ──► one transaction for all that has come ──► whoever waits is told

Under SQLite the log is written ahead (WAL) and not flushed at each commit: what was committed outlives the process,
however it ends, and a machine that loses its power loses the sandboxes as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Executable, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from roll.errors import ConfigError
from roll.sandbox.errors import SandboxError

__all__ = ["Store"]

_MOST = 500
"""Writes of one transaction."""
Write: TypeAlias = tuple[Executable, Mapping[str, Any], Callable[[Exception | None], None] | None]


class Store:
    """See the module. Any thread may read; `write` belongs to the event loop that `open` was called in.

    Args:
        url: as SQLAlchemy has them: `sqlite:///file`, `postgresql+psycopg://user@host/name`.

    Raises:
        ConfigError: it is no such address, its driver is missing, or nothing answers there.
    """

    def __init__(self, url: str) -> None:
        try:
            address = make_url(url)
            if address.get_backend_name() == "sqlite" and address.database not in (None, "", ":memory:"):
                Path(str(address.database)).expanduser().parent.mkdir(parents=True, exist_ok=True)
                address = address.set(database=str(Path(str(address.database)).expanduser()))
            self.engine = create_engine(address, pool_pre_ping=True)
        except (ArgumentError, ImportError, OSError) as error:
            raise ConfigError(f"the database '{_shown(url)}' of the sandbox service cannot be used: {error}") from None
        if address.get_backend_name() == "sqlite":
            event.listen(self.engine, "connect", _set_up_sqlite)
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def migrate(self) -> None:
        """Bring the tables to this version.

        Raises:
            ConfigError: the database refuses.
        """
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        try:
            with self.engine.connect() as connection:
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
                connection.commit()
        except SQLAlchemyError as error:
            raise ConfigError(
                f"the database '{self.engine.url.render_as_string()}' of the sandbox service does not answer as it "
                f"should: {str(error).splitlines()[0][:300]}"
            ) from None

    def read(self, statement: Executable) -> list[dict[str, Any]]:
        """All rows."""
        with self.engine.connect() as connection:
            return [
                {str(name): value for name, value in row.items()} for row in connection.execute(statement).mappings()
            ]

    def change(self, statement: Executable, **values: Any) -> int:
        """One write, at once; how many rows it met."""
        with self.engine.begin() as connection:
            return connection.execute(statement, values or None).rowcount  # type: ignore[attr-defined]

    def open(self) -> None:
        """Start the thread that writes."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="sandbox-store", daemon=True)
        self._thread.start()

    def write(
        self, statement: Executable, values: Mapping[str, Any], then: Callable[[Exception | None], None] | None = None
    ) -> None:
        """Write soon; `then` is called in the loop when it is committed, or with what refused it."""
        self._queue.put((statement, values, then))

    def close(self) -> None:
        """Write what is left."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self.engine.dispose()

    def _work(self) -> None:
        open_ = True
        while open_:
            writes = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(writes) < _MOST:
                    writes.append(self._queue.get_nowait())
            open_ = None not in writes
            self._commit([write for write in writes if write is not None])

    def _commit(self, writes: list[Write]) -> None:
        """In one transaction; where that is refused, one by one."""
        errors: list[Exception | None] = [None] * len(writes)
        try:
            with self.engine.begin() as connection:
                _execute(connection, writes)
        except SQLAlchemyError:
            for index, write in enumerate(writes):
                try:
                    with self.engine.begin() as connection:
                        _execute(connection, [write])
                except IntegrityError:
                    errors[index] = SandboxError("that name was used before")
                except SQLAlchemyError as error:
                    errors[index] = SandboxError(f"the service's database refuses: {str(error).splitlines()[0][:200]}")
        told = [(then, error) for (_, _, then), error in zip(writes, errors, strict=True) if then is not None]
        if told and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_tell, told)


def _execute(connection: Connection, writes: list[Write]) -> None:
    """Neighbours with the same statement as one."""
    start = 0
    while start < len(writes):
        statement, end = writes[start][0], start
        while end < len(writes) and writes[end][0] is statement:
            end += 1
        connection.execute(statement, [dict(values) for _, values, _ in writes[start:end]])
        start = end


def _tell(told: list[tuple[Callable[[Exception | None], None], Exception | None]]) -> None:
    for then, error in told:
        then(error)


def _set_up_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _shown(url: str) -> str:
    """Without a password."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]
