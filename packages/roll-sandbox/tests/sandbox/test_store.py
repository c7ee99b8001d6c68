"""The service's database: groups, outages, migrations, one server at a time; under SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox.databases import Postgres, new_postgres

sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from alembic.autogenerate import compare_metadata  # noqa: E402
from alembic.migration import MigrationContext  # noqa: E402
from alembic.script import ScriptDirectory  # noqa: E402

from roll_sandbox.errors import (  # noqa: E402
    ConfigError,
    SandboxDatabaseError,
    SandboxError,
)
from roll_sandbox.service.records import RecordStore  # noqa: E402
from roll_sandbox.service.store import Store, migrations, writer  # noqa: E402
from roll_sandbox.service.store.tables import METADATA, executions, sandboxes  # noqa: E402

pytestmark = pytest.mark.asyncio
WAIT_S = 30.0


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    store.lock()
    store.migrate()
    store.open()
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


async def said(call: Callable[..., None], *arguments: Any) -> Exception | None:
    """What `then` is told."""
    told: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    call(*arguments, told.set_result)
    return await asyncio.wait_for(told, WAIT_S)


async def open_one(records: RecordStore, name: str, owner: str = "ann") -> Exception | None:
    return await said(records.record_sandbox, owner, name, "local", {}, 9e9)


END = {"op": "end", "sandbox": "s", "id": "p", "end": {"code": 0}, "pieces": 2}


async def test_sandbox_service_database_what_is_written_is_found_and_a_name_is_taken_once(database: str) -> None:
    async with opened(database) as store:
        records = RecordStore(store)
        assert await asyncio.gather(*(open_one(records, f"s{number}") for number in range(700))) == [None] * 700
        again = await open_one(records, "s7")
        assert type(again) is SandboxError and "already used" in str(again)
        assert await said(records.record_program, "ann", "s7", "p") is None
        assert records.load_live_programs() == {("ann", "s7"): {"p": "running"}}
        assert await said(records.record_program_end, "ann", "s7", "p", END) is None
        assert records.load_program("ann", "s7", "p").end == {"end": {"code": 0}, "pieces": 2}
        assert await said(records.record_sandbox_end, "ann", "s7", "ended", "") is None
        assert len(records.load_live_sandboxes()) == 699
    async with opened(database) as store:
        assert len(RecordStore(store).load_live_sandboxes()) == 699


async def test_sandbox_service_database_a_second_server_is_refused_until_the_first_has_gone(
    database: str, monkeypatch
) -> None:
    monkeypatch.setattr("roll_sandbox.service.store.store._LOCK_TIMEOUT_S", 0.2)
    async with opened(database):
        with pytest.raises(ConfigError, match="another server has locked the database"):
            Store(database).lock()
    async with opened(database):
        pass


async def test_sandbox_service_database_tables_are_not_changed_under_a_server_that_runs(
    new_database, monkeypatch
) -> None:
    monkeypatch.setattr("roll_sandbox.service.store.store._LOCK_TIMEOUT_S", 0.2)
    url = new_database("sqlite")
    first = Store(url)
    first.lock()
    with pytest.raises(ConfigError, match="another server has locked the database"):
        Store(url).migrate()
    first.close()
    Store(url).migrate()


def _revisions() -> list[str]:
    script = ScriptDirectory(str(Path(migrations.__file__).parent))
    return [each.revision for each in reversed(list(script.walk_revisions()))]


@pytest.mark.parametrize("revision", _revisions())
async def test_sandbox_service_database_rows_of_every_older_version_are_there_in_this_one(
    database: str, revision: str
) -> None:
    store = Store(database)
    store.migrate(revision)
    before = sqlalchemy.MetaData()
    before.reflect(store.engine)
    rows = {}
    for table in before.sorted_tables:
        if table.name != "alembic_version":
            rows[table.name] = {column.name: _value(column) for column in table.columns}
            store.write_now(table.insert().values(rows[table.name]))
    store.migrate()
    for name, row in rows.items():
        (found,) = (dict(each._mapping) for each in store.read(sqlalchemy.select(METADATA.tables[name])))
        kept = {column: value for column, value in row.items() if column in found}
        assert kept == {column: found[column] for column in kept}
    assert RecordStore(store).load_live_sandboxes() == []
    store.close()


def _value(column: Any) -> Any:
    if isinstance(column.type, sqlalchemy.String):
        return "{}" if column.name in ("spec", "end", "quota") else "x"
    return 1


async def test_sandbox_service_database_the_migrations_make_the_tables_that_the_code_has(database: str) -> None:
    store = Store(database)
    store.migrate()
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
    store.close()


async def test_sandbox_service_database_a_database_of_a_newer_version_is_refused_by_one_line(database: str) -> None:
    store = Store(database)
    store.migrate()
    store.write_now(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"written by a newer version of ROLL \(revision 9999; this version supports"):
        store.migrate()
    store.close()


async def test_sandbox_service_database_a_migration_that_fails_changes_nothing(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(database)
    monkeypatch.setattr("alembic.op.create_index", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.migrate()
    assert sqlalchemy.inspect(store.engine).get_table_names() == []
    monkeypatch.undo()
    store.migrate()
    store.close()


@contextlib.contextmanager
def _locked(store: Store):
    with contextlib.closing(sqlite3.connect(store.engine.url.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextlib.contextmanager
def _full(store: Store):
    connection = store._writer._connection
    pages = connection.connection.execute("PRAGMA page_count").fetchone()[0]
    listen = lambda made, _: made.execute(f"PRAGMA max_page_count={pages}")  # noqa: E731
    sqlalchemy.event.listen(store.engine, "connect", listen)
    connection.connection.execute(f"PRAGMA max_page_count={pages}")
    yield
    sqlalchemy.event.remove(store.engine, "connect", listen)
    store._writer._connection = None


@contextlib.contextmanager
def _read_only(store: Store):
    listen = lambda made, _: made.execute("PRAGMA query_only=ON")  # noqa: E731
    sqlalchemy.event.listen(store.engine, "connect", listen)
    store._writer._connection.connection.execute("PRAGMA query_only=ON")
    yield
    sqlalchemy.event.remove(store.engine, "connect", listen)


@pytest.mark.parametrize(
    ("harm", "why"),
    [(_locked, "locked"), (_full, "full"), (_read_only, "readonly")],
    ids=["locked", "full", "readonly"],
)
async def test_sandbox_service_database_a_sqlite_that_takes_no_writes_refuses_what_would_start_and_keeps_what_has_ended(
    new_database, monkeypatch: pytest.MonkeyPatch, harm: Any, why: str
) -> None:
    monkeypatch.setattr(writer, "_BACKOFF_S", ())
    async with opened(new_database("sqlite")) as store:
        store._writer._connection.connection.execute("PRAGMA busy_timeout=50")
        sqlalchemy.event.listen(store.engine, "connect", lambda made, _: made.execute("PRAGMA busy_timeout=50"))
        records = RecordStore(store)
        assert await open_one(records, "first") is None
        assert await said(records.record_program, "ann", "first", "p") is None
        with harm(store):
            refused = await said(records.record_sandbox, "ann", "second", "local", {"long": "x" * 100_000}, 9e9)
            assert isinstance(refused, SandboxDatabaseError) and why in str(refused)
            assert store.unavailable_reason
            ended = asyncio.create_task(
                said(records.record_program_end, "ann", "first", "p", {**END, "long": "x" * 100_000})
            )
            assert isinstance(await open_one(records, "third"), SandboxDatabaseError)
            assert not ended.done()
        assert await ended is None
        assert (records.load_program("ann", "first", "p").state, store.unavailable_reason) == ("ended", "")
        assert await open_one(records, "second") is None


async def test_sandbox_service_database_readers_that_get_no_connection_are_told_so(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_sandbox.service.store.engines._POOL_TIMEOUT_S", 0.05)
    store = Store(database)
    store.migrate()
    with contextlib.ExitStack() as held:
        for _ in range(10):
            held.enter_context(store.engine.connect())
        with pytest.raises(SandboxDatabaseError, match="database failed"):
            store.read(sqlalchemy.select(sandboxes))
    assert store.read(sqlalchemy.select(sandboxes)) == []
    store.close()


async def test_sandbox_service_database_keeps_what_it_acknowledged_when_postgresql_is_killed_under_load() -> None:
    server = new_postgres()
    try:
        async with opened(server.database()) as store:
            async with asyncio.timeout(4 * WAIT_S):
                await _kill_under_load(server, store)
    finally:
        server.close()


async def _kill_under_load(server: Postgres, store: Store) -> None:
    records = RecordStore(store)
    num_opened = 0
    ended: list[tuple[str, str]] = []
    wrong: list[Exception] = []
    going = True

    async def client(number: int) -> None:
        nonlocal num_opened
        turn = 0
        while going:
            turn += 1
            name = f"s{number}-{turn}"
            error = await open_one(records, name)
            if error is None:
                error = await said(records.record_program, "ann", name, "p")
            if error is not None:
                if not isinstance(error, SandboxDatabaseError):
                    wrong.append(error)
                await asyncio.sleep(0.01)
                continue
            num_opened += 1
            assert await said(records.record_program_end, "ann", name, "p", END) is None
            ended.append((name, "p"))

    async def until(enough: Callable[[], bool]) -> None:
        while not enough():
            assert not wrong, wrong
            await asyncio.sleep(0.01)

    clients = [asyncio.create_task(client(number)) for number in range(20)]
    for _ in range(3):
        so_far = len(ended)
        await until(lambda: len(ended) >= so_far + 50)  # noqa: B023
        await asyncio.to_thread(server.kill)
        await until(lambda: bool(store.unavailable_reason))
        assert isinstance(await open_one(records, "probe"), SandboxDatabaseError)
        with pytest.raises(SandboxDatabaseError):
            await asyncio.to_thread(records.load_live_sandboxes)
        await asyncio.to_thread(server.start)
    so_far = len(ended)
    await until(lambda: len(ended) >= so_far + 50)
    going = False
    await asyncio.gather(*clients)
    await until(lambda: not store.num_waiting)
    found = await asyncio.to_thread(store.read, sqlalchemy.select(executions))
    states = {(row.sandbox, row.name): row.state for row in found}
    assert all(states[each] == "ended" for each in ended)
    assert len(found) == num_opened == len(ended)
    assert not [row for row in found if row.state == "running"]


async def test_sandbox_service_database_a_commit_whose_answer_was_lost_is_not_taken_for_another_s(
    database: str, monkeypatch
) -> None:
    """The transaction is committed, and the connection breaks before the answer: tried again, it finds its own row."""
    execute, times = writer._execute, 0

    def broken(connection: Any, writes: Any) -> None:
        nonlocal times
        execute(connection, writes)
        times += 1
        if times == 1:
            connection.commit()
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("the server closed the connection"))

    async with opened(database) as store:
        monkeypatch.setattr(writer, "_execute", broken)
        assert await open_one(RecordStore(store), "once") is None
        monkeypatch.setattr(writer, "_BACKOFF_S", ())
        times = 0
        refused = await open_one(RecordStore(store), "twice")
        assert isinstance(refused, SandboxDatabaseError)
        while store.unavailable_reason or store.num_waiting:
            await asyncio.sleep(0.01)
        assert {row.name for row in RecordStore(store).load_live_sandboxes()} == {"once"}
        assert await open_one(RecordStore(store), "twice") is None


async def test_sandbox_service_database_a_store_that_closes_during_an_outage_ends(
    new_database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BACKOFF_S", ())
    monkeypatch.setattr(writer, "_CLOSE_TIMEOUT_S", 0.0)
    before = set(threading.enumerate())
    async with opened(new_database("sqlite")) as store:
        store._writer.connect = lambda: (_ for _ in ()).throw(OSError("away"))
        store._writer._disconnect()
        RecordStore(store).record_running("ann", "s")
        assert isinstance(await open_one(RecordStore(store), "s"), SandboxDatabaseError)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "sandbox-store"]


async def test_sandbox_service_database_a_backup_that_is_taken_from_a_running_service_is_one_to_start_from(
    database: str, request
) -> None:
    """The commands of docs/operations/sandbox-service.md."""
    async with opened(database) as store:
        assert await open_one(RecordStore(store), "kept") is None
        copy = f"{store.engine.url.database}.copy"
        if store.engine.dialect.name == "sqlite":
            with contextlib.closing(sqlite3.connect(store.engine.url.database)) as here:
                here.backup(sqlite3.connect(copy))
        else:
            server: Postgres = request.getfixturevalue("postgres")
            plain = database.replace("+psycopg", "")
            server.run("pg_dump", "--format=custom", f"--file={copy}", plain)
        assert await open_one(RecordStore(store), "later") is None
    if database.startswith("sqlite"):
        path = Path(database.removeprefix("sqlite:///"))
        path.write_bytes(Path(copy).read_bytes())
        for rest in ("-wal", "-shm"):
            path.with_name(path.name + rest).unlink(missing_ok=True)
    else:
        server.run("pg_restore", "--clean", "--if-exists", f"--dbname={plain}", copy)
    async with opened(database) as store:
        assert [row.name for row in RecordStore(store).load_live_sandboxes()] == ["kept"]
