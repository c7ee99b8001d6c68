"""Where parts of the service meet at a bad moment: each found by random time (`weather.py`) or beside it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

import sqlalchemy
from sandbox.conftest import missing
from sandbox.test_workers import ANN, Wire, greeting, opened, running, until

from roll_sandbox import (
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxSpec,
    SandboxUnavailableError,
    UnknownSandboxError,
)
from roll_sandbox.bubblewrap import BubblewrapRuntime
from roll_sandbox.remote import RemoteRuntime
from roll_sandbox.remote.connection import ServiceConnection
from roll_sandbox.service.dispatcher import ClientConnection
from roll_sandbox.service.local_clients import LocalClients
from roll_sandbox.service.quotas import Quota
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.store.tables import workers
from roll_sandbox.service.store.writer import QueuedWrite, _execute_single
from roll_sandbox.spawner import SandboxProcess
from roll_sandbox.wire import Message, encode, error_to_json, spec_to_json
from roll_sandbox.worker import Worker
from roll_sandbox.worker.connection import WorkerConnection

CREATE = {"op": "create", "sandbox": "sandbox-1", "spec": spec_to_json(SandboxSpec())}
_PROCESSES = PythonCode(
    source="import os; print([open(f'/proc/{p}/comm').read() for p in os.listdir('/proc') if p.isdigit()])"
)
TRAITS = {"home": "/home", "isolated": True, "mount_space": True, "image": None}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, which take a while to make."""
    path = tmp_path_factory.mktemp("empty") / "sandboxes.db"
    Service(Settings(database=f"sqlite:///{path}", runtime=None)).store.close()
    return path


@pytest_asyncio.fixture
async def service(tmp_path: Path, empty: Path) -> AsyncIterator[Service]:
    shutil.copy(empty, tmp_path)
    service = await opened(tmp_path)
    yield service
    await service.close()


def asks(service: Service) -> tuple[ClientConnection, list[Message]]:
    heard: list[Message] = []
    return ClientConnection(ANN, heard.append), heard


# --- the switchboard


async def test_sandbox_agent_whoever_uses_a_sandbox_before_it_is_written_down_does_not_end_it_behind_its_owner(
    service: Service,
) -> None:
    wire = Wire()
    service.workers.join(ANN, greeting(), wire)
    line, _ = asks(service)
    service.dispatcher.on_client_message(line, CREATE)
    service.dispatcher.on_client_message(asks(service)[0], {"op": "attach", "sandbox": "sandbox-1"})
    service.dispatcher.on_client_message(line, {"op": "stop", "sandbox": "sandbox-1"})
    await until(lambda: "stop" in wire.ops())
    assert wire.ops() == ["welcome", "create", "attach", "stop"]


async def test_sandbox_agent_a_name_that_is_refused_is_refused_to_all_who_asked_and_counts_nothing(
    service: Service,
) -> None:
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    await running(service, wire)
    service.dispatcher.on_worker_message({"op": "gone", "sandbox": "ann/sandbox-1"}, link)
    (one, told), (other, also_told) = asks(service), asks(service)
    service.dispatcher.on_client_message(one, CREATE)
    service.dispatcher.on_client_message(other, CREATE)
    service.dispatcher.on_client_message(
        one, {"op": "run", "sandbox": "sandbox-1", "id": "program-2", "request": {}, "stdin": b""}
    )
    await until(lambda: told and also_told)
    assert told[0]["op"] == also_told[0]["op"] == "failed" and "already used" in told[0]["message"]
    assert not any(service.quotas.get_usage("ann").values())


async def test_sandbox_agent_a_sandbox_that_was_lost_while_it_started_is_stopped_once_it_has(service: Service) -> None:
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    service.workers.on_message(link, {"op": "created", "sandbox": "ann/sandbox-9", "traits": TRAITS}, wire)
    assert wire.said[-1] == {"op": "stop", "sandbox": "ann/sandbox-9"}


async def test_sandbox_agent_what_was_to_stop_while_its_worker_started_it_and_was_away_is_stopped(
    service: Service,
) -> None:
    wire, back = Wire(), Wire()
    service.workers.join(ANN, greeting(), wire)
    line, _ = asks(service)
    service.dispatcher.on_client_message(line, CREATE)
    await until(lambda: "create" in wire.ops())
    service.dispatcher.on_client_message(
        line, {"op": "stop", "sandbox": "sandbox-1"}
    )  # into a line that is broken already
    service.workers.join(ANN, greeting(), back)
    assert back.ops() == ["welcome", "create", "stop"]


async def test_sandbox_agent_a_sandbox_of_an_earlier_server_is_there_when_its_worker_says_so(
    service: Service, tmp_path: Path
) -> None:
    wire, back = Wire(), Wire()
    service.workers.join(ANN, greeting(), wire)
    await running(service, wire)
    await service.close()
    service = await opened(tmp_path)
    line, told = asks(service)
    service.dispatcher.on_client_message(line, CREATE)
    assert told == []
    service.workers.join(ANN, greeting(holds={"ann/sandbox-1": {"traits": TRAITS, "programs": []}}), back)
    assert told[0] == {"op": "created", "sandbox": "sandbox-1", "traits": TRAITS}
    await service.close()


async def test_sandbox_agent_a_clock_that_is_set_anew_ends_no_lifetime_and_keeps_none(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire()
    service.workers.join(ANN, greeting(), wire)
    line, _ = await running(service, wire)
    service.dispatcher.on_client_message(line, {"op": "extend", "sandbox": "sandbox-1", "lifetime_s": 100.0})
    now, wall = time.monotonic(), time.time()
    for jump_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: wall + jump_s)
        assert service.dispatcher.find_sandbox("ann", "sandbox-1").expires == pytest.approx(wall + jump_s + 100, abs=5)
        service.housekeeper.run_round(now + 1.0)
        assert wire.ops()[-1] != "stop"
    service.housekeeper.run_round(now + 101.0)
    assert wire.said[-1] == {"op": "stop", "sandbox": "ann/sandbox-1", "expired": True}
    with pytest.raises(UnknownSandboxError, match="cannot be extended"):
        service.dispatcher.extend(service.dispatcher.find_sandbox("ann", "sandbox-1"), 10.0)


async def test_sandbox_agent_housekeeping_goes_on_after_it_has_failed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_sandbox.service.housekeeper._INTERVAL_S", 0.0)
    calls: list[None] = []

    def flush() -> None:
        calls.append(None)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(service.audit, "flush", flush)
    watching = asyncio.create_task(service.housekeeper.run())
    await until(lambda: len(calls) > 2)
    watching.cancel()


async def test_sandbox_agent_a_line_that_breaks_before_it_is_accepted_is_not_counted(service: Service) -> None:
    class Gone:
        def __init__(self) -> None:
            self.scope = {"identity": ANN}

        async def accept(self) -> None:
            raise RuntimeError("it has gone")

    with pytest.raises(RuntimeError):
        await service.serve_client(Gone())  # type: ignore[arg-type]
    assert service._num_connections == {"ann": 0}


# --- what is written


def test_sandbox_agent_a_row_whose_commit_was_not_answered_is_found_also_where_its_parameters_have_other_names(
    tmp_path: Path,
) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/x.db")
    workers.create(engine)
    names = ("name", "owner", "seen", "draining")
    statement = sqlalchemy.insert(workers).values({name: sqlalchemy.bindparam(f"b_{name}") for name in names})
    values = {"b_name": "worker-a", "b_owner": "ann", "b_seen": 1.0, "b_draining": 0}
    with engine.connect() as connection:
        assert _execute_single(connection, QueuedWrite(statement, values)) is None
        assert _execute_single(connection, QueuedWrite(statement, values)) is None
        refused = _execute_single(connection, QueuedWrite(statement, {**values, "b_owner": "ben"}))
        assert "already used" in str(refused)
        refused = _execute_single(connection, QueuedWrite(statement, {**values, "b_name": "b", "b_draining": 2**70}))
        assert "too large" in str(refused)  # the driver's word, not SQLAlchemy's: the writer's thread goes on


# --- names that several ask for


async def test_sandbox_agent_two_who_ask_for_one_name_at_once_have_one_sandbox_also_with_a_quota(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.quotas._default = Quota(cpu_s=60.0)
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    owned = LocalClients(service.dispatcher).get(ANN)
    sandbox = service.dispatcher.records.load_sandbox
    late = iter([0.0, 0.1])

    def slow(owner: str, name: str) -> Any:
        time.sleep(next(late))
        return sandbox(owner, name)

    monkeypatch.setattr(service.dispatcher.records, "load_sandbox", slow)
    both = [asyncio.create_task(owned.create(SandboxSpec(), None, name="sandbox-1")) for _ in range(2)]
    await until(lambda: "create" in wire.ops())
    service.dispatcher.on_worker_message({"op": "created", "sandbox": "ann/sandbox-1", "traits": TRAITS}, link)
    (one, _), (other, _) = await asyncio.gather(*both)
    assert one is other is (await owned.create(SandboxSpec(), None, name="sandbox-1"))[0]
    assert wire.ops().count("create") == 1


# --- a client's line


async def test_sandbox_agent_a_sandbox_that_is_lost_while_it_starts_is_an_error_for_who_waits() -> None:
    said: list[Message] = []
    line = ServiceConnection(said.append)
    creating = asyncio.create_task(line.create(SandboxSpec(), name="sandbox-1"))
    await until(lambda: said)
    line.receive({"op": "gone", "sandbox": "sandbox-1", **error_to_json(SandboxError("its worker has gone"))})
    with pytest.raises(SandboxError, match="its worker has gone"):
        await asyncio.wait_for(creating, 5)


async def test_sandbox_agent_who_gives_up_waiting_ends_what_he_began_and_not_what_was_there() -> None:
    said: list[Message] = []
    line = ServiceConnection(said.append)
    for waiting in (line.attach("sandbox-1", SandboxSpec()), line.create(SandboxSpec(), name="sandbox-2")):
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [(each["op"], each["sandbox"]) for each in said] == [
        ("attach", "sandbox-1"),
        ("create", "sandbox-2"),
        ("stop", "sandbox-2"),
    ]


async def test_sandbox_agent_a_lifetime_that_is_refused_is_said_and_the_sandbox_goes_on(service: Service) -> None:
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    sandbox, _ = await made(service, wire, link)
    await sandbox.extend(10.0)
    assert service.dispatcher.find_sandbox("ann", sandbox.name).ends_at == pytest.approx(time.monotonic() + 10, abs=5)
    with pytest.raises(SandboxQuotaError, match="allows 86400 s"):
        await sandbox.extend(1e9)
    assert not sandbox.has_ended


async def made(service: Service, wire: Wire, link: Any) -> tuple[Any, bool]:
    creating = asyncio.create_task(LocalClients(service.dispatcher).get(ANN).create(SandboxSpec(), None))
    await until(lambda: "create" in wire.ops())
    service.dispatcher.on_worker_message({"op": "created", "sandbox": wire.said[-1]["sandbox"], "traits": TRAITS}, link)
    return await creating


class Dialled:
    """A connection that says one thing and breaks."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = [data] if data else []

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if not self._data:
            await asyncio.Event().wait()
        from aiohttp import WSMessage, WSMsgType

        return WSMessage(WSMsgType.BINARY, self._data.pop(), None)

    async def send_bytes(self, _: bytes) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_sandbox_agent_a_line_that_cannot_go_on_ends_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_sandbox.remote.runtime.decode", lambda _: 1 / 0)
    runtime = RemoteRuntime("http://nowhere", "token")
    answers: list[Any] = [SandboxUnavailableError("not yet"), Dialled(b"no message")]

    async def dial() -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    runtime._connect = dial  # type: ignore[method-assign]
    with pytest.raises(SandboxUnavailableError):
        await runtime.start()
    await runtime.start()
    assert not runtime._closed  # so that it would dial again
    with pytest.raises(SandboxError, match="failed and cannot be reopened"):
        await asyncio.wait_for(runtime.launch(SandboxSpec()), 5)
    await runtime.close()


# --- a worker


class Starts:
    """A runtime whose starts fail as they are told to."""

    name, fresh_programs = "played", True

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def launch(self, _: SandboxSpec) -> Any:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "ends"),
    [(None, ("gone", "lost")), (OSError(24, "Too many open files"), ("failed", "broken")),
     (KeyError("x"), ("failed", "broken"))],
)  # fmt: skip
async def test_sandbox_agent_whatever_becomes_of_a_start_the_server_is_told(
    error: Exception | None, ends: tuple[str, str]
) -> None:
    told: list[Message] = []
    async with SandboxManager(Starts(error), warm=0) as manager:  # type: ignore[arg-type]
        worker = Worker(manager, send=told.append)
        worker.receive({"op": "create", "sandbox": "ann/sandbox-1", "spec": spec_to_json(SandboxSpec())})
        if error is None:
            worker.receive({"op": "stop", "sandbox": "ann/sandbox-1"})  # before it did anything
        await until(lambda: told)
        assert [(each["op"], each["error"]) for each in told] == [ends] and worker.is_empty
        assert manager._slots._value == 512


class Broken(Dialled):
    """A connection that breaks before anything was said."""

    async def send_bytes(self, _: bytes) -> None:
        raise ConnectionResetError("it has gone")


async def test_sandbox_agent_a_worker_outlives_a_line_that_breaks_at_once_and_says_why_it_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_sandbox.worker.connection._BACKOFF_S", (0.0,))
    taken = SandboxRequestError("another worker is connected as 'worker-a'")
    refusal = encode({**error_to_json(taken), "op": "refused"})
    dialled: list[Any] = []
    async with SandboxManager(Starts(), warm=0) as manager:  # type: ignore[arg-type]
        joined = WorkerConnection(Worker(manager), "http://nowhere", "token", name="worker-a", capacity=1)

        async def dial(_: Any) -> Any:
            dialled.append(Broken() if not dialled else Dialled(refusal))
            return dialled[-1]

        joined._connect = dial  # type: ignore[method-assign]
        serving = asyncio.create_task(joined.serve())
        await until(lambda: len(dialled) > 3)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert [record.getMessage() for record in caplog.records if "rejected" in record.message] == [
        "the sandbox service at http://nowhere rejected this worker: another worker is connected as 'worker-a' "
        "Reconnecting."
    ]


# --- sandboxes of this machine


async def test_sandbox_agent_what_starts_sandboxes_outlives_a_lack_of_descriptors_and_callers_who_have_gone() -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    async with SandboxManager("bubblewrap", warm=0) as manager:
        spawner, new = manager.runtime._spawner, asyncio.get_running_loop().create_future
        child = SandboxProcess(identity=999, socket=None, spawner=spawner, ended=new(), started=new())  # type: ignore[arg-type]
        spawner._processes[999] = child
        spawner.send(("start", 999, None, [], [], {}))  # with none of its descriptors: there was no room for them
        with pytest.raises(SandboxError, match="ulimit -n"):
            await asyncio.wait_for(child.started, 10)
        spawner.send(("forget", "image-999"))
        spawner._images["image-999"] = gone = new()
        gone.cancel()
        spawner._on_image("image-999", "/", "")
        assert (await manager.execute(PythonCode(source="print(1)"))).stdout == b"1\n"


async def test_sandbox_agent_a_runtime_that_closes_removes_its_own_files_and_not_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spawner: Any = SimpleNamespace(facts={"root": False}, check_running=lambda: None)
    runtimes = [BubblewrapRuntime() for _ in range(2)]
    for runtime in runtimes:
        await runtime._roots.acquire(spawner, SandboxSpec(), None, merged=False)
    for remaining in (1, 0):
        await runtimes.pop().close()
        assert len(list(tmp_path.iterdir())) == remaining


async def test_sandbox_agent_a_start_that_is_cancelled_at_any_moment_holds_nothing() -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    async with SandboxManager("bubblewrap", warm=0) as manager:
        for step in range(0, 40, 3):
            task = asyncio.create_task(manager.create())
            for turn in range(step):
                await asyncio.sleep(0 if turn % 5 else 0.0005)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
        await until(lambda: not manager.runtime._spawner._processes)
        assert [root.users for root in manager.runtime._roots._known.values()] in ([0], [])
        assert manager._slots._value == 512


async def test_sandbox_agent_a_shell_that_nobody_waits_for_any_more_is_ended() -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    async with SandboxManager("bubblewrap", warm=0) as manager, await manager.create() as sandbox:
        opening = asyncio.create_task(sandbox.session())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await until(lambda: not sandbox._connection._jobs)
        async with asyncio.timeout(10):
            while b"bash" in (await sandbox.execute(_PROCESSES)).stdout:
                await asyncio.sleep(0.01)


def test_sandbox_agent_a_hold_that_nobody_has_any_more_holds_nothing(tmp_path: Path) -> None:
    from roll_sandbox.images.cache import ImageLock

    released: list[bool] = []
    hold = ImageLock(-1)
    hold.release = lambda: released.append(True)  # type: ignore[method-assign]
    del hold
    assert released == [True]
