"""What a client makes of a service that breaks its line, played by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from roll_sandbox import (
    PythonCode,
    SandboxLostError,
    SandboxManager,
    SandboxUnavailableError,
    UnknownSandboxError,
    connect,
)
from roll_sandbox.wire import Message, decode, encode, error_to_json
from roll_sandbox.worker.connection import WorkerConnection
from roll_sandbox.worker.worker import Worker

HANG_UP = None
OF_REQUEST = "the id of what is answered"
NO_WORKER = {"op": "failed", **error_to_json(SandboxUnavailableError("no worker is connected"))}
UNKNOWN = {"op": "failed", **error_to_json(UnknownSandboxError("there is no such sandbox"))}
CREATED = {"op": "created", "traits": {"home": "/home", "isolated": True, "mount_space": True}}
GONE = {"op": "gone", **error_to_json(UnknownSandboxError("the sandbox was stopped"))}


class Script:
    """Answers one message after the other, whoever sends it; `HANG_UP` breaks the line."""

    def __init__(self) -> None:
        self.answers: Iterator[Message | None] = iter(())
        self.asked: list[str] = []

    async def line(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(encode({"op": "hello"}))
        async for received in socket:
            message = decode(received.data)
            self.asked.append(message["op"])
            answer = next(self.answers, GONE)
            if answer is HANG_UP:
                break
            if answer.get("id") == OF_REQUEST:
                answer = {**answer, "id": message["id"]}
            await socket.send_bytes(encode({"sandbox": message["sandbox"], **answer}))
        await socket.close()
        return socket


@pytest_asyncio.fixture
async def script() -> AsyncIterator[tuple[Script, SandboxManager]]:
    script = Script()
    app = web.Application()
    app.router.add_get("/v1/line", script.line)
    async with TestServer(app) as server, connect(str(server.make_url("/")), "token", warm=0) as sandboxes:
        yield script, sandboxes


async def test_sandbox_service_connection_a_service_that_is_back_may_wait_for_its_workers(script: Any) -> None:
    service, sandboxes = script
    service.answers = iter([NO_WORKER])
    with pytest.raises(SandboxUnavailableError, match="no worker"):
        await sandboxes.create()
    service.answers = iter([HANG_UP, NO_WORKER, CREATED])
    await asyncio.wait_for(sandboxes.create(), 30)
    assert service.asked == ["create"] * 4


async def test_sandbox_service_connection_sessions_that_are_closed_while_the_line_is_broken_are_closed_over_the_next(
    script: Any,
) -> None:
    """Before anything else is asked of the sandbox, whose processes the session may hold."""
    service, sandboxes = script
    opened = {"op": "end", "end": {"code": 0}, "pieces": 0, "id": OF_REQUEST}
    service.answers = iter([CREATED, opened, HANG_UP, CREATED])
    sandbox = await sandboxes.create()
    shell = await sandbox.session()
    await shell.close()  # the service hangs up without having done anything about it
    running = asyncio.create_task(sandbox.execute(PythonCode(source="print(1)")))
    while service.asked[-1] != "run":
        await asyncio.sleep(0.01)
    assert service.asked == ["create", "shell", "close", "attach", "close", "run"]
    running.cancel()


async def test_sandbox_service_connection_a_program_whose_sandbox_ended_while_the_line_was_broken_is_lost(
    script: Any,
) -> None:
    service, sandboxes = script
    service.answers = iter([CREATED, HANG_UP, UNKNOWN])
    sandbox = await sandboxes.create()
    with pytest.raises(
        SandboxLostError, match="while the connection to the service was down: there is no such sandbox"
    ):
        await asyncio.wait_for(sandbox.execute(PythonCode(source="print(1)")), 30)


@pytest.mark.parametrize(
    "greeting", [b"", b"\0\0\0\0", encode({"max_message_bytes": "x"}), encode({"max_message_bytes": []})]
)
async def test_sandbox_service_connection_a_greeting_that_is_none_is_named_with_the_service(greeting: bytes) -> None:
    async def line(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(greeting)
        return socket

    app = web.Application()
    app.router.add_get("/v1/line", line)
    async with TestServer(app) as server:
        with pytest.raises(
            SandboxUnavailableError,
            match=r"http://127\.0\.0\.1:\d+ is not a sandbox service: it sent no valid greeting",
        ):
            async with connect(str(server.make_url("/")), "token", warm=0):
                pass


@pytest.mark.parametrize(
    "said",
    [b"noise", encode({}), encode({"op": "welcome", "away_s": 0}), encode({"op": "run", "sandbox": [], "id": "x"})],
)
async def test_sandbox_service_connection_a_worker_dials_again_where_its_server_says_what_none_says(
    said: bytes,
) -> None:
    dialed: asyncio.Queue[str] = asyncio.Queue()

    async def line(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await dialed.put("once more")
        await socket.send_bytes(said)
        async for _ in socket:
            pass
        return socket

    app = web.Application()
    app.router.add_get("/v1/worker", line)
    async with TestServer(app) as server:
        worker = Worker(SandboxManager(warm=0))
        joined = WorkerConnection(worker, str(server.make_url("/")), "token", name="worker-a", capacity=1)
        serving = asyncio.create_task(joined.serve())
        for _ in range(2):
            await asyncio.wait({asyncio.create_task(dialed.get()), serving}, return_when=asyncio.FIRST_COMPLETED)
            assert not serving.done(), serving.exception()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
