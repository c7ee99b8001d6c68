"""What the service, a worker and a client make of messages, one at a time, without a sandbox."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_sandbox import Mount, SandboxDatabaseError, SandboxLostError, SandboxRequestError, SandboxSpec
from roll_sandbox.types import Chunk

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from sandbox.test_workers import ANN, Wire, greeting, opened, running, until

from roll_sandbox.remote.connection import ServiceConnection
from roll_sandbox.service.dispatcher import ClientConnection
from roll_sandbox.service.service import Service
from roll_sandbox.service.workers import LOCAL_NAME
from roll_sandbox.wire import Message, spec_to_json
from roll_sandbox.worker import Worker
from roll_sandbox.worker import executions as worker_executions
from roll_sandbox.worker.executions import ProgramRunner
from roll_sandbox.worker.outputs import OutputBudget

SPEC = spec_to_json(SandboxSpec())
CREATE = {"op": "create", "sandbox": "sandbox-1", "spec": SPEC}
TRAITS = {"home": "/home", "isolated": True, "mount_space": True}
RUN = {"op": "run", "sandbox": "sandbox-1", "id": "program-1", "request": {"argv": ["true"]}, "stdin": b""}


@pytest.fixture
def service(tmp_path: Any) -> Any:
    return lambda: opened(tmp_path)


async def test_sandbox_service_router_what_nobody_claims_is_stopped_once_and_counted_once(service: Any) -> None:
    server: Service = await service()
    wire = Wire()
    link = server.workers.join(ANN, greeting(), wire)
    line, _ = await running(server, wire)
    server.dispatcher.disconnect(line)
    link.last_message_at = math.inf
    for seconds in (30, 61, 62, 63):
        server.housekeeper.run_round(time.monotonic() + seconds)
    assert wire.ops().count("stop") == 1 and server.dispatcher.counts["orphans"] == 1
    await server.close()


async def test_sandbox_service_router_what_was_made_without_a_line_of_its_own_lives_on_alone(service: Any) -> None:
    server: Service = await service()
    wire = Wire()
    link = server.workers.join(ANN, greeting(), wire)
    line = ClientConnection(ANN, lambda message: None, holds_leases=False)
    server.dispatcher.on_client_message(line, CREATE)
    await until(lambda: "create" in wire.ops())
    server.dispatcher.disconnect(line)
    link.last_message_at = math.inf
    server.housekeeper.run_round(time.monotonic() + 600)
    assert "stop" not in wire.ops()
    server.housekeeper.run_round(server.dispatcher.entries["ann/sandbox-1"].ends_at)
    assert wire.said[-1] == {"op": "stop", "sandbox": "ann/sandbox-1", "expired": True}
    await server.close()


@pytest.mark.parametrize("leases", [True, False])
async def test_sandbox_service_router_after_a_restart_only_what_had_a_line_of_its_own_is_stopped_alone(
    service: Any, leases: bool
) -> None:
    server: Service = await service()
    wire = Wire()
    server.workers.join(ANN, greeting(), wire)
    server.dispatcher.on_client_message(ClientConnection(ANN, lambda message: None, holds_leases=leases), CREATE)
    await until(lambda: "create" in wire.ops())
    await server.close()
    later: Service = await service()
    holds = {"ann/sandbox-1": {"traits": TRAITS, "programs": []}}
    link = later.workers.join(ANN, greeting(holds=holds), back := Wire())
    link.last_message_at = math.inf
    later.housekeeper.run_round(time.monotonic() + 61)
    assert ("stop" in back.ops()) == leases
    await later.close()


async def test_sandbox_service_router_a_server_that_was_held_up_itself_calls_no_worker_silent(service: Any) -> None:
    server: Service = await service()
    link = server.workers.join(ANN, greeting(), Wire())
    server.housekeeper.run_round(link.last_message_at + 9.0)
    server.housekeeper.run_round(link.last_message_at + 19.0)
    assert link.is_connected, "what it said meanwhile was not read yet"
    server.housekeeper.run_round(link.last_message_at + 19.5)
    assert not link.is_connected
    await server.close()


async def test_sandbox_service_router_a_client_that_is_back_in_time_keeps_its_sandbox(service: Any) -> None:
    server: Service = await service()
    wire = Wire()
    server.workers.join(ANN, greeting(), wire)
    line, heard = await running(server, wire)
    server.dispatcher.disconnect(line)
    again = ClientConnection(ANN, heard.append)
    server.dispatcher.on_client_message(again, {"op": "attach", "sandbox": "sandbox-1"})
    server.dispatcher.on_client_message(again, RUN)
    assert wire.said[-1]["again"] is True, "a worker that does not know it must not start it"
    server.housekeeper.run_round(time.monotonic() + 61)
    assert "stop" not in wire.ops()
    await server.close()


async def test_sandbox_service_router_sandboxes_of_the_servers_own_machine_are_lost_with_it_others_may_come_back(
    service: Any,
) -> None:
    server: Service = await service()
    written: list[Any] = []
    for name, worker in (("sandbox-1", LOCAL_NAME), ("sandbox-2", "worker-a")):
        server.dispatcher.records.record_sandbox("ann", name, worker, SPEC, time.time() + 600, written.append)
        server.dispatcher.records.record_running("ann", name)
    server.dispatcher.records.record_program("ann", "sandbox-2", "program-1", written.append)
    await until(lambda: len(written) == 3)
    await server.close()
    server = await service()
    assert list(server.dispatcher.entries) == ["ann/sandbox-2"]
    link = server.dispatcher.entries["ann/sandbox-2"].worker
    await until(lambda: server.dispatcher.records.load_sandbox("ann", "sandbox-1").why == "lost")  # type: ignore[union-attr]
    taken = server.dispatcher.quotas.get_usage("ann")
    await server.close()
    assert (taken["sandboxes"], taken["programs"], link.num_sandboxes) == (1, 1, 1)


async def test_sandbox_service_router_a_sandbox_that_goes_takes_its_programs_out_of_the_count_and_calls_them_lost(
    service: Any,
) -> None:
    server: Service = await service()
    wire = Wire()
    link = server.workers.join(ANN, greeting(), wire)
    _, heard = await running(server, wire)
    server.dispatcher.on_worker_message(
        {"op": "gone", "sandbox": "ann/sandbox-1", "error": "lost", "message": ""}, link
    )
    await until(lambda: heard)
    assert set(server.dispatcher.quotas.get_usage("ann").values()) == {0} and (
        link.num_sandboxes,
        link.reserved_memory_bytes,
    ) == (0, 0)
    assert server.dispatcher.records.load_program("ann", "sandbox-1", "program-1").state == "lost"  # type: ignore[union-attr]
    await server.close()


async def test_sandbox_service_router_a_sandbox_that_is_stopped_while_it_is_written_down_is_stopped(
    service: Any,
) -> None:
    server: Service = await service()
    wire = Wire()
    server.workers.join(ANN, greeting(), wire)
    line = ClientConnection(ANN, lambda message: None)
    server.dispatcher.on_client_message(line, CREATE)
    server.dispatcher.on_client_message(line, {"op": "stop", "sandbox": "sandbox-1"})
    await until(lambda: "create" in wire.ops())
    assert wire.ops()[-1] == "stop"
    await server.close()


async def test_sandbox_service_router_what_is_stopped_while_it_starts_never_runs() -> None:
    said: list[Message] = []

    class Manager:
        cancelled = False

        async def create(self, spec: SandboxSpec) -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    manager = Manager()
    worker = Worker(manager, send=said.append)  # type: ignore[arg-type]
    worker.receive({**CREATE, "sandbox": "ann/sandbox-1"})
    await asyncio.sleep(0)
    worker.receive({"op": "stop", "sandbox": "ann/sandbox-1"})
    async with asyncio.timeout(10):
        await until(lambda: said)
    assert manager.cancelled and said[0]["op"] == "gone" and worker.is_empty


async def test_sandbox_service_router_the_first_reason_for_which_a_sandbox_is_ended_is_told() -> None:
    said: list[Message] = []
    closing: list[Any] = []

    class Manager:
        async def create(self, spec: SandboxSpec) -> Any:
            return SimpleNamespace(traits=TRAITS, on_close=closing.append, destroy=lambda: None)

    worker = Worker(Manager(), send=said.append)  # type: ignore[arg-type]
    worker.receive({**CREATE, "sandbox": "ann/sandbox-1"})
    await until(lambda: said)
    for expired in (True, False):
        worker.receive({"op": "stop", "sandbox": "ann/sandbox-1", "expired": expired})
    closing[0]()
    assert (said[-1]["op"], said[-1]["error"]) == ("gone", "expired")


async def test_sandbox_service_router_a_program_that_a_worker_does_not_know_any_more_is_lost_not_started() -> None:
    said: list[Message] = []
    executions = ProgramRunner("ann/sandbox-1", None, said.append, OutputBudget())  # type: ignore[arg-type]
    executions.receive({**RUN, "again": True})
    assert [(each["op"], each["error"]) for each in said] == [("error", "lost")]


async def attached() -> tuple[ServiceConnection, list[Message], Any]:
    """A client's line, what it sends, and its sandbox."""
    sent: list[Message] = []
    line = ServiceConnection(sent.append)
    opening = asyncio.create_task(line.attach("sandbox-1", SandboxSpec()))
    await asyncio.sleep(0)
    line.receive({"op": "created", "sandbox": "sandbox-1", "traits": TRAITS})
    return line, sent, await opening


async def test_sandbox_service_router_output_that_is_missing_is_asked_for_and_none_counts_twice() -> None:
    line, sent, sandbox = await attached()
    job = sandbox._connection.submit("run", {}, b"", 100)
    about = {"sandbox": "sandbox-1", "id": sent[-1]["id"]}
    chunk = {"op": "out", **about, "stream": "stdout"}
    for number, data in ((0, b"a"), (0, b"a"), (2, b"c")):
        line.receive({**chunk, "n": number, "data": data})
    assert sent[-1]["have"] == 1, "the second piece did not reach"
    line.receive({"op": "end", **about, "pieces": 2, "end": {"code": 0}})
    assert not job.end.done()
    line.receive({**chunk, "n": 1, "data": b"b"})
    line.receive({"op": "end", **about, "pieces": 2, "end": {"code": 0}})
    assert job.end.done() and b"".join(each.data for each in job.chunks) == b"ab"


async def test_sandbox_service_router_a_program_with_more_input_than_is_kept_is_lost_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roll_sandbox.remote.resend_buffer._MAX_KEPT_BYTES", 3)
    line, sent, sandbox = await attached()
    job = sandbox._connection.submit("run", {}, b"", 100)
    for data in (b"ab", b"cd"):
        sandbox._connection.send("input", sent[1]["id"], data)
    line.resend()
    assert isinstance(job.end.exception(), SandboxLostError)


async def test_sandbox_service_router_a_stop_that_the_line_lost_is_sent_again() -> None:
    line, sent, sandbox = await attached()
    line.stop(sandbox._connection)
    sent.clear()
    line.resend()
    assert [message["op"] for message in sent] == ["attach", "stop"]


async def test_sandbox_service_router_a_worker_that_brings_what_another_has_is_told_to_stop_it(service: Any) -> None:
    server: Service = await service()
    server.workers.join(ANN, greeting(), wire := Wire())
    await running(server, wire)
    holds = {"ann/sandbox-1": {"traits": TRAITS, "programs": ["program-1"]}}
    server.workers.join(ANN, greeting("worker-b", holds=holds), other := Wire())
    assert other.said[-1] == {"op": "stop", "sandbox": "ann/sandbox-1"} and "stop" not in wire.ops()
    await server.close()


async def test_sandbox_service_router_a_program_that_is_being_written_down_is_not_lost_when_its_worker_joins_again(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Service = await service()
    server.workers.join(ANN, greeting(), wire := Wire())
    line, heard = await running(server, wire)
    written: list[Any] = []
    monkeypatch.setattr(server.dispatcher.records, "record_program", lambda *arguments: written.append(arguments[-1]))
    server.dispatcher.on_client_message(line, {**RUN, "id": "program-2"})
    holds = {"ann/sandbox-1": {"traits": TRAITS, "programs": ["program-1"]}}
    server.workers.join(ANN, greeting(holds=holds), back := Wire())
    assert server.dispatcher.quotas.get_usage("ann")["programs"] == 2
    written[0](None)
    assert back.said[-1]["id"] == "program-2" and "error" not in [message["op"] for message in heard]
    await server.close()


async def test_sandbox_service_router_a_program_that_could_not_be_written_down_may_be_asked_for_again(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Service = await service()
    server.workers.join(ANN, greeting(), wire := Wire())
    line, heard = await running(server, wire)
    with monkeypatch.context() as away:
        away.setattr(server.dispatcher.records, "record_program", lambda *said: said[-1](SandboxDatabaseError("away")))
        server.dispatcher.on_client_message(line, {**RUN, "id": "program-2"})
    assert heard[-1]["error"] == "database" and server.dispatcher.quotas.get_usage("ann")["programs"] == 1
    server.dispatcher.on_client_message(line, {**RUN, "id": "program-2"})
    await until(lambda: wire.said[-1].get("id") == "program-2")
    assert "again" not in wire.said[-1]
    await server.close()


async def test_sandbox_service_router_an_end_that_comes_after_a_program_was_called_lost_changes_nothing(
    service: Any,
) -> None:
    server: Service = await service()
    server.workers.join(ANN, greeting(), wire := Wire())
    await running(server, wire)
    written: list[Any] = []
    records, of = server.dispatcher.records, ("ann", "sandbox-1")
    records.record_sandbox_end(*of, "ended", "lost", written.append)
    records.record_program_end(*of, "program-1", {"op": "end", "end": {"code": 0}}, written.append)
    await until(lambda: len(written) == 2)
    assert records.load_program(*of, "program-1").state == "lost"  # type: ignore[union-attr]
    await server.close()


async def test_sandbox_service_router_a_programs_new_limit_is_within_its_owners(service: Any) -> None:
    server: Service = await service()
    server.workers.join(ANN, greeting(), wire := Wire())
    line, _ = await running(server, wire)
    server.dispatcher.quotas.set_overrides({"ann": {"cpu_s": 2.0}})
    bound = {"op": "bound", "sandbox": "sandbox-1", "id": "program-1", "n": 1, "wall_s": 9.0}
    for asked, given in ((5.0, 2.0), (None, 2.0), (1.0, 1.0)):
        server.dispatcher.on_client_message(line, {**bound, "cpu_s": asked})
        assert wire.said[-1]["cpu_s"] == given
    await server.close()


class Job:
    """A program that says two pieces."""

    def __init__(self) -> None:
        self.chunks = [Chunk(stream="stdout", data=data) for data in (b"a", b"b")]
        self.given: list[bytes] = []
        self.write = self.given.append

    async def stream(self) -> AsyncIterator[Chunk]:
        for chunk in self.chunks:
            yield chunk

    async def make_report(self) -> Message:
        return {"code": 0}


async def test_sandbox_service_router_a_program_is_started_once_told_from_where_it_was_heard_and_kept_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job] = []

    class World:
        def begin(self, program: Any, *, alone: bool) -> Job:
            jobs.append(Job())
            return jobs[-1]

    said: list[Message] = []
    executions = ProgramRunner("ann/sandbox-1", World(), said.append, OutputBudget())  # type: ignore[arg-type]
    executions.receive(RUN)
    for number in (1, 1, 2):
        executions.receive({"op": "input", "id": "program-1", "n": number, "data": b"x"})
    await until(lambda: said and said[-1]["op"] == "end")
    assert len(jobs) == 1 and jobs[0].given == [b"x", b"x"] and said[-1]["pieces"] == 2
    said.clear()
    executions.receive({**RUN, "have": 1})
    assert [(each["op"], each.get("n")) for each in said] == [("out", 1), ("end", None)] and len(jobs) == 1
    monkeypatch.setattr(worker_executions, "MAX_KEPT_PROGRAMS", 1)
    executions.receive({**RUN, "id": "program-2"})
    await until(lambda: said[-1]["op"] == "end" and said[-1]["id"] == "program-2")
    assert executions.list_names() == ["program-2"]


def test_sandbox_service_router_only_what_is_below_a_directory_may_be_mounted_not_beside_it(tmp_path: Path) -> None:
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "data-of-others").mkdir()
    worker = Worker(None, mounts=[str(tmp_path / "data")])  # type: ignore[arg-type]
    for name in ("data", "data/in"):
        assert worker._check_mounts(SandboxSpec(mounts=(Mount(source=str(tmp_path / name), target="/m"),)))
    for name in ("data-of-others", "data/../data-of-others"):
        with pytest.raises(SandboxRequestError, match="--mounts"):
            worker._check_mounts(SandboxSpec(mounts=(Mount(source=str(tmp_path / name), target="/m"),)))
