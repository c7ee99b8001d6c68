"""Connects to a database, and locks it, so that only one server uses it.

A server locks the database as long as it writes. With PostgreSQL this is an advisory lock of the writing connection, so
a server that loses the lock can no longer write. With SQLite it is a lock on a file next to the database. Both are
released when the process ends for any reason.
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
"""Seconds that a reader waits for a free connection."""
_POSTGRESQL_OPTIONS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "10",
    "options": "-c statement_timeout=10000 -c lock_timeout=5000",
}
"""Timeouts, so that a database server that hangs is treated as unavailable; parameters in the URL take precedence."""
_LOCK_KEY = 0x524F4C4C
"""Key of the advisory lock: an arbitrary number that other programs do not use."""


def make_engine(url: str) -> Engine:
    """Return the SQLAlchemy engine for a database URL.

    Raises:
        ConfigError: the URL is invalid, or its driver is missing.
    """
    try:
        address = make_url(url)
        if address.get_backend_name() == "sqlite" and not _is_sqlite_file(address):
            raise ConfigError(
                f"in-memory databases are not supported, got '{url}': use a file, for example sqlite:////a/file.db."
            )
        if address.drivername in ("postgresql", "postgres"):
            address = address.set(drivername="postgresql+psycopg")
        if address.drivername == "postgresql+psycopg":
            address = address.set(query={**_POSTGRESQL_OPTIONS, **address.query})
        if _is_sqlite_file(address):
            path = Path(str(address.database)).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            address = address.set(database=str(path))
        # `pool_pre_ping` replaces pooled connections that the database has closed meanwhile.
        engine = create_engine(
            address, pool_pre_ping=True, pool_size=MAX_CONNECTIONS, max_overflow=0, pool_timeout=_POOL_TIMEOUT_S
        )
    except ArgumentError:
        raise ConfigError(
            f"'{hide_password(url)}' is not a valid database URL: expected, for example, sqlite:////a/file.db or "
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
    """Another server has locked the database."""


class DatabaseLock:
    """The lock of a server on the database. `acquire` may be called again while the lock is held."""

    def __init__(self, engine: Engine) -> None:
        self._backend = engine.url.get_backend_name()
        self._path = Path(f"{engine.url.database}.lock") if _is_sqlite_file(engine.url) else None
        self._file: IO[bytes] | None = None

    def acquire(self, connection: Connection) -> None:
        """Acquire the lock; with PostgreSQL, it lasts as long as `connection`.

        Raises:
            DatabaseLockedError: another server has the lock.
            OSError: the lock file next to the database cannot be created.
        """
        if self._backend == "postgresql":
            if not connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK_KEY})")):
                raise DatabaseLockedError
            connection.commit()  # the lock belongs to the session, and outlives the transaction
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


def _is_sqlite_file(address: URL) -> bool:
    return address.get_backend_name() == "sqlite" and address.database not in (None, "", ":memory:")


def _set_up_sqlite(connection: Any, _: object) -> None:
    # Python's sqlite3 begins no transaction before statements that change tables. So its own transactions are turned
    # off, and `_begin_sqlite` begins all of them (SQLAlchemy, "Transactional DDL" of pysqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=3000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads before it writes fails at once, without waiting, if another one has written meanwhile
    # (SQLITE_BUSY_SNAPSHOT). With IMMEDIATE, it takes the lock for writing when it begins.
    statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN"
    connection.exec_driver_sql(statement)
