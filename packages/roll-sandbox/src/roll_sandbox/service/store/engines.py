"""Connections to a database, and a lock so that only one server has it.

A server holds a lock on the database for as long as it writes: under PostgreSQL an advisory lock of the writing
connection, so that a server that lost the lock cannot write either; under SQLite a lock on a file next to it. Both end
with the process, however it ends.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from roll_sandbox.errors import ConfigError

__all__ = ["DatabaseLock", "DatabaseLockedError", "hide_password", "make_engine"]

MAX_CONNECTIONS = 10
_POOL_TIMEOUT_S = 5.0
"""How long a reader waits for a free connection."""
_POSTGRESQL = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "10",
    "options": "-c statement_timeout=10000 -c lock_timeout=5000",
}
"""Timeouts, so that a hanging server counts as away; parameters in the URL take precedence."""
_LOCK_KEY = 0x524F4C4C
"""Key of the advisory lock; any number that other programs do not use."""


def make_engine(url: str) -> Engine:
    """Make the engine for a database URL of SQLAlchemy.

    Raises:
        ConfigError: the URL is invalid, or its driver is missing.
    """
    try:
        address = make_url(url)
        if address.get_backend_name() == "sqlite" and not _is_file(address):
            raise ConfigError(
                f"the database '{url}' is in memory and would be lost: write, for example, sqlite:////a/file.db."
            )
        if address.drivername in ("postgresql", "postgres"):
            address = address.set(drivername="postgresql+psycopg")
        if address.drivername == "postgresql+psycopg":
            address = address.set(query={**_POSTGRESQL, **address.query})
        if _is_file(address):
            path = Path(str(address.database)).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            address = address.set(database=str(path))
        engine = create_engine(
            address, pool_pre_ping=True, pool_size=MAX_CONNECTIONS, max_overflow=0, pool_timeout=_POOL_TIMEOUT_S
        )
    except ArgumentError:
        raise ConfigError(
            f"'{hide_password(url)}' is not a valid database URL: write, for example, sqlite:////a/file.db or "
            "postgresql+psycopg://user@host/name."
        ) from None
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"the database '{hide_password(url)}' of the sandbox service cannot be used: {error}"
        ) from None
    if address.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def hide_password(url: str) -> str:
    """Return the URL without its password."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]


class DatabaseLockedError(Exception):
    """Another server has the database."""


class DatabaseLock:
    """The lock of one server on the database. `take` may be repeated while it is held."""

    def __init__(self, engine: Engine) -> None:
        self._backend = engine.url.get_backend_name()
        self._path = Path(f"{engine.url.database}.lock") if _is_file(engine.url) else None
        self._file: IO[bytes] | None = None

    def acquire(self, connection: Connection) -> None:
        """Take the lock; under PostgreSQL it lasts as long as `connection`.

        Raises:
            TakenError: another server has the lock.
            OSError: the lock file next to the database cannot be made.
        """
        if self._backend == "postgresql":
            if not connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK_KEY})")):
                raise DatabaseLockedError
            connection.commit()
        elif self._path is not None and self._file is None:
            file = self._path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise DatabaseLockedError from None
            self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_file(address: URL) -> bool:
    return address.get_backend_name() == "sqlite" and address.database not in (None, "", ":memory:")


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the driver's own transactions exclude statements that change tables
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=3000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    how = "BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN"
    connection.exec_driver_sql(how)
