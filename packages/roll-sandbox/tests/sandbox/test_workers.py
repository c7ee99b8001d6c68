"""Workers' names, silence, absence and return, with a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from roll_sandbox import SandboxAccessError, SandboxRequestError, SandboxSpec, UnknownSandboxError

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from roll_sandbox.pools import PoolReport
from roll_sandbox.service.dispatcher import ClientConnection
from roll_sandbox.service.metrics import format_metrics
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.tokens import Identity
from roll_sandbox.wire import Message, WorkerReport, report_to_json, spec_to_json

ANN = Identity(owner="ann", token="1", scopes=frozenset({"worker"}))
BEN = Identity(owner="ben", token="2", scopes=frozenset({"worker"}))

TRAITS = {"home": "/home/user", "isolated": True, "mount_space": True, "image": None}


class Wire:
    """Stands for a WebSocket of the server's."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.closed = True

    def ops(self) -> list[str]:
        return [message["op"] for message in self.said]


def greeting(name: str = "worker-a", process: str = "1", holds: dict[str, Any] | None = None) -> Message:
    said = {"op": "join", "name": name, "process": process, "holds": holds or {}, "capacity": 4, "memory_bytes": None}
    return {**said, "leaving": False, "report": report_to_json(WorkerReport(cores=2))}


async def opened(directory: Path) -> Service:
    service = Service(Settings(database=f"sqlite:///{directory}/sandboxes.db", runtime=None))
    await service.start()
    return service


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = await opened(tmp_path)
    yield service
    await service.close()


async def running(service: Service, wire: Wire) -> tuple[ClientConnection, list[Message]]:
    """A sandbox with a program, on the worker behind `wire`, and what its client hears."""
    heard: list[Message] = []
    line = ClientConnection(ANN, heard.append)
    create = {"op": "create", "sandbox": "sandbox-1", "spec": spec_to_json(SandboxSpec())}
    service.dispatcher.on_client_message(line, create)
    await until(lambda: "create" in wire.ops())
    link = service.dispatcher.workers["worker-a"]
    service.dispatcher.on_worker_message({"op": "created", "sandbox": "ann/sandbox-1", "traits": {}}, link)
    service.dispatcher.on_client_message(
        line, {"op": "run", "sandbox": "sandbox-1", "id": "program-1", "request": {}, "stdin": b""}
    )
    await until(lambda: "run" in wire.ops())
    heard.clear()
    return line, heard


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0.005)


async def test_sandbox_worker_silence_makes_a_worker_away_and_only_then_begins_the_time_until_it_is_lost(
    service: Service,
) -> None:
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    _, heard = await running(service, wire)
    began = link.last_message_at
    service.housekeeper.run_round(began + 9.9)
    assert link.is_connected
    service.housekeeper.run_round(began + 10.1)
    assert not link.is_connected and wire.closed and link.state == "away"
    service.housekeeper.run_round(began + 70.0)
    assert heard == []
    service.housekeeper.run_round(began + 70.2)
    await until(lambda: heard)
    assert [(message["op"], message["error"]) for message in heard] == [("gone", "lost")]
    back = Wire()  # and what it brings back is to be dropped
    service.workers.join(ANN, greeting(holds={"ann/sandbox-1": {"traits": TRAITS, "programs": ["program-1"]}}), back)
    assert back.said[1:] == [{"op": "stop", "sandbox": "ann/sandbox-1"}]


async def test_sandbox_worker_a_worker_that_is_back_in_time_goes_on_and_its_clients_send_again(
    service: Service,
) -> None:
    wire, back = Wire(), Wire()
    link = service.workers.join(ANN, greeting(), wire)
    line, heard = await running(service, wire)
    service.housekeeper.run_round(link.last_message_at + 11)
    service.dispatcher.on_client_message(
        line, {"op": "input", "sandbox": "sandbox-1", "id": "program-1", "n": 1, "data": b"x"}
    )
    holds = {"ann/sandbox-1": {"traits": TRAITS, "programs": ["program-1"]}}
    service.workers.join(ANN, greeting(holds=holds), back)
    assert back.ops() == ["welcome", "input"]
    assert heard[-1] == {"op": "again", "sandbox": "sandbox-1"}
    service.workers.on_message(link, {"op": "gone", "sandbox": "ann/sandbox-1"}, wire)  # of the line before
    assert "ann/sandbox-1" in service.dispatcher.entries


async def test_sandbox_worker_a_program_that_never_came_to_its_worker_is_lost_not_run_later(service: Service) -> None:
    wire, back = Wire(), Wire()
    service.workers.join(ANN, greeting(), wire)
    _, heard = await running(service, wire)
    service.workers.join(ANN, greeting(holds={"ann/sandbox-1": {"traits": TRAITS, "programs": []}}), back)
    await until(lambda: any(message["op"] == "error" for message in heard))
    assert back.ops() == ["welcome"]


async def test_sandbox_worker_what_was_to_stop_while_a_worker_was_away_is_stopped(service: Service) -> None:
    wire, back = Wire(), Wire()
    service.workers.join(ANN, greeting(), wire)
    line, _ = await running(service, wire)
    service.dispatcher.on_client_message(
        line, {"op": "stop", "sandbox": "sandbox-1"}
    )  # into a line that is broken already
    service.workers.join(ANN, greeting(holds={"ann/sandbox-1": {"traits": TRAITS, "programs": ["program-1"]}}), back)
    assert {"op": "stop", "sandbox": "ann/sandbox-1"} in back.said


async def test_sandbox_worker_a_name_is_one_owners_and_one_process_at_a_time(service: Service) -> None:
    link = service.workers.join(ANN, greeting(), Wire())
    with pytest.raises(SandboxAccessError, match="belongs to another owner"):
        service.workers.join(BEN, greeting(), Wire())
    with pytest.raises(SandboxRequestError, match="another worker is connected as 'worker-a'"):
        service.workers.join(ANN, greeting(process="2"), Wire())
    link.mark_disconnected(0.0)
    assert service.workers.join(ANN, greeting(process="2"), Wire()) is link
    with pytest.raises(SandboxRequestError, match="capacity"):
        service.workers.join(ANN, {**greeting(), "capacity": 0}, Wire())


async def test_sandbox_worker_a_worker_speaks_of_its_own_sandboxes_only(service: Service) -> None:
    wire, other = Wire(), Wire()
    service.workers.join(ANN, greeting(), wire)
    await running(service, wire)
    link = service.workers.join(BEN, greeting("worker-b"), other)
    service.workers.on_message(link, {"op": "gone", "sandbox": "ann/sandbox-1", "error": "lost"}, other)
    assert "ann/sandbox-1" in service.dispatcher.entries


async def test_sandbox_worker_draining_outlives_the_server(tmp_path: Path) -> None:
    service = await opened(tmp_path)
    link = service.workers.join(ANN, greeting(), Wire())
    assert service.workers.drain("worker-a", draining=True) is link and link.state == "draining"
    await service.close()
    service = await opened(tmp_path)
    assert service.workers.join(ANN, greeting(process="2"), Wire()).state == "draining"
    assert service.workers.drain("worker-a", draining=False).state == "ready"
    with pytest.raises(UnknownSandboxError, match="unknown worker 'worker-b'"):
        service.workers.drain("worker-b", draining=True)
    await service.close()


async def test_sandbox_worker_beats_bring_figures_and_a_goodbye_ends_at_once(service: Service) -> None:
    wire = Wire()
    link = service.workers.join(ANN, greeting(), wire)
    pool = PoolReport(pool='host-"1"', idle=2, target=3, hits=40, misses=5)
    beat = {"op": "beat", "leaving": True, "report": report_to_json(WorkerReport(cores=4, busy=0.5, pools=(pool,)))}
    service.workers.on_message(link, beat, wire)
    assert wire.ops()[-1] == "beat" and link.state == "draining"
    text = format_metrics(service.dispatcher)
    assert 'roll_sandbox_worker_load{worker="worker-a"} 0.5' in text
    label = r'{worker="worker-a",pool="host-\"1\""}'
    for name, value in (("idle", 2), ("target", 3), ("hits_total", 40), ("misses_total", 5)):
        assert f"roll_sandbox_pool_{name}{label} {value}\n" in text
    with pytest.raises(SandboxRequestError, match=r"report.cores"):
        service.workers.on_message(link, {**beat, "report": {"cores": "many"}}, wire)
    service.workers.on_message(link, {"op": "leave"}, wire)
    assert "worker-a" not in service.dispatcher.workers and wire.closed
