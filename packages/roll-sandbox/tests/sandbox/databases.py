"""Databases for tests: files of SQLite, and a PostgreSQL server of the tests' own where its programs are installed."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

KINDS = ("sqlite", "postgresql")


class Postgres:
    """A server in a scratch directory, reached at 127.0.0.1 by anybody on this machine."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
        self.directory = Path(tempfile.mkdtemp(prefix="roll-postgres-"))
        if self._user is not None:
            shutil.chown(self.directory, self._user, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.run("initdb", "--auth=trust", "--username=roll", "--no-sync", "--no-locale", "-E", "UTF8", "-D", "data")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers; after a kill it first waits for what is left of the one before."""
        command = ["-D", "data", "-p", str(self.port), "-h", "127.0.0.1", "-k", str(self.directory), "-F"]
        until = time.monotonic() + 60
        while self.process is None or self.run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port), fails=True):
            assert time.monotonic() < until
            if self.process is None or self.process.poll() is not None:
                log = (self.directory / "log").open("ab")
                self.process = subprocess.Popen(
                    [self._programs / "postgres", *command],
                    cwd=self.directory,
                    user=self._user,
                    group=self._user,
                    extra_groups=[] if self._user else None,
                    stdout=log,
                    stderr=log,
                )
            time.sleep(0.05)

    def kill(self) -> None:
        """At once, with all that it started."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def database(self) -> str:
        """The address of a new one."""
        name = f"d{uuid.uuid4().hex}"
        self.run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "roll", name)
        return f"postgresql+psycopg://roll@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """It, and what it wrote."""
        if self.process is not None:
            self.process.terminate()  # waits for clients; those of tests have gone, or are told by the next line
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.send_signal(2)
                self.process.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, program: str, *arguments: str, fails: bool = False) -> int:
        """One of its programs; the exit status, which `fails` lets be another than 0."""
        done = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.directory,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user else None,
            capture_output=True,
        )
        assert fails or done.returncode == 0, done.stderr.decode()
        return done.returncode


def new_postgres() -> Postgres:
    """One that runs; skips where it is not installed."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed (the extra 'postgres')")
    found = [str(Path(path).parent) for path in sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))]
    path = shutil.which("postgres")
    programs = found[-1] if found else path and str(Path(path).parent)
    if not programs:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    if os.geteuid() == 0 and not _known("postgres"):
        pytest.skip("there is no user 'postgres' to run PostgreSQL as, which refuses to run as root")
    server = Postgres(Path(programs))
    server.start()
    return server


def _known(user: str) -> bool:
    try:
        return pwd.getpwnam(user) is not None
    except KeyError:
        return False


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """For tests that leave it running."""
    server = new_postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def new_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The address of a new database of a kind."""
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

    def made(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path_factory.mktemp('database')}/sandboxes.db"
        server: Postgres = request.getfixturevalue("postgres")
        return server.database()

    return made


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """The address of a new database of each kind."""
    return new_database(request.param)
