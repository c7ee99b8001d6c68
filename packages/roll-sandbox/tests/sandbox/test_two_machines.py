"""Two workers in processes of their own, one of them behind a network that a test takes apart and mends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from sandbox.conftest import _ROLL_SANDBOX, LIMITS, missing, served

from roll_sandbox import (
    Command,
    PythonCode,
    SandboxLostError,
    SandboxManager,
    SandboxSpec,
    SandboxUnavailableError,
    connect,
)
from roll_sandbox.__main__ import run

pytestmark = pytest.mark.asyncio(loop_scope="module")

AWAY_TIMEOUT_S = 9.0
ONCE = """
open('runs', 'a').write('x')
print('began', flush=True)
print('told', input())
"""


class Network:
    """Carries bytes to the service; either direction can be cut, and what is on its way then arrives when it heals."""

    def __init__(self, url: str) -> None:
        self.host, self.port = url.removeprefix("http://").split(":")
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self.heal()
        self.tasks: set[asyncio.Task[None]] = set()

    def heal(self) -> None:
        self.up.set()
        self.down.set()

    def cut(self, *directions: str) -> None:
        for direction in directions:
            getattr(self, direction).clear()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for task in list(self.tasks):
            task.cancel()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self.host, int(self.port))
        for source, sink, way in ((reader, far_writer, self.up), (far_reader, writer, self.down)):
            task = asyncio.create_task(self._forward(source, sink, way))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                await way.wait()
                sink.write(data)
            await way.wait()
        sink.close()


@dataclass
class Machines:
    """A service, its workers, and who asks."""

    url: str
    token: str
    network: Network
    sandboxes: SandboxManager
    http: aiohttp.ClientSession
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as answer:
            return await answer.json()

    async def states(self) -> dict[str, str]:
        return {row["worker"]: row["state"] for row in await self.get("/v1/workers")}

    async def until(self, **states: str | None) -> None:
        """Workers (a, b) are in these states."""
        wanted = {f"worker-{name}": state for name, state in states.items()}
        async with asyncio.timeout(60):
            while {name: (await self.states()).get(name) for name in wanted} != wanted:
                await asyncio.sleep(0.02)

    async def where(self, name: str) -> str:
        return (await self.get(f"/v1/sandboxes/{name}"))["worker"]

    async def affinity_to(self, worker: str) -> SandboxSpec:
        """A spec whose sandboxes go to this worker."""
        for number in range(64):
            spec = SandboxSpec(limits=LIMITS, affinity=f"task-{number}")
            async with await self.sandboxes.create(spec) as probe:
                if await self.where(probe.name) == worker:
                    return spec
        raise AssertionError("all go elsewhere")

    def start(self, name: str, url: str) -> None:
        command = [*_ROLL_SANDBOX, "worker", "--join", url, "--token", self.token, "--warm", "0", "--name", name]
        self.workers[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def programs(self, name: str) -> list[psutil.Process]:
        """Sleepers in sandboxes of this worker; agents that wait for work are none."""
        found = []
        for process in psutil.Process(self.workers[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] == ["sleep"]:
                    found.append(process)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machines]:
    if reason := missing("service"):
        pytest.skip(reason)
    arguments = ("--runtime", "none", "--away", str(AWAY_TIMEOUT_S))
    with served(tmp_path_factory.mktemp("service"), *arguments) as (url, token):
        network = Network(url)
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            network.open() as far,
            aiohttp.ClientSession(headers=headers) as http,
            connect(url, token, spec=SandboxSpec(limits=LIMITS), warm=0) as sandboxes,
        ):
            machines = Machines(url, token, network, sandboxes, http)
            machines.start("worker-a", far)
            machines.start("worker-b", url)
            try:
                await machines.until(a="ready", b="ready")
                yield machines
            finally:
                for process in machines.workers.values():
                    process.kill()
                    process.wait()


async def began(sandbox: Any) -> Any:
    job = await sandbox.start(PythonCode(source=ONCE, interactive=True, wall_s=100.0))
    async for chunk in job.stream():
        assert chunk.data == b"began\n"
        return job


@pytest.mark.parametrize("directions", [("up", "down"), ("up",), ("down",)])
async def test_sandbox_service_two_machines_a_partition_that_heals_in_time_costs_nothing(
    machines: Machines, directions: tuple[str, ...]
) -> None:
    spec = await machines.affinity_to("worker-a")
    async with await machines.sandboxes.create(spec) as sandbox:
        job = await began(sandbox)
        machines.network.cut(*directions)
        job.write(b"hello\n")  # into a line that nobody knows to be broken
        await machines.until(a="away")
        assert await machines.where((await machines.sandboxes.create(spec)).name) == "worker-b"
        machines.network.heal()
        result = await asyncio.wait_for(job.wait(), 60)
        assert (result.outcome, result.stdout) == ("exited", b"began\ntold hello\n")
        assert await sandbox.read_file("runs") == b"x"
        await machines.until(a="ready")


@pytest.mark.slow
async def test_sandbox_service_two_machines_a_partition_that_lasts_ends_sandboxes_on_both_sides(
    machines: Machines,
) -> None:
    spec = await machines.affinity_to("worker-a")
    sandbox = await machines.sandboxes.create(spec)
    job = await sandbox.start(Command(argv=("sleep", "1000"), wall_s=1000.0))
    async with asyncio.timeout(60):
        while not machines.programs("worker-a"):
            await asyncio.sleep(0.02)
    machines.network.cut("up", "down")
    with pytest.raises(SandboxLostError, match="its worker 'worker-a' did not reconnect"):
        await asyncio.wait_for(job.wait(), 60)
    assert machines.programs("worker-a") == []  # the worker gave up first
    assert "worker-a" not in await machines.states()
    machines.network.heal()
    await machines.until(a="ready")
    async with await machines.sandboxes.create(spec) as again:
        assert await machines.where(again.name) == "worker-a"
        assert (await again.execute(PythonCode(source="print(1)"))).ok


async def test_sandbox_service_two_machines_draining_by_command(
    machines: Machines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLL_SANDBOX_URL", machines.url)
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", machines.token)
    command: Callable[..., Any] = lambda *words: asyncio.to_thread(run, words)  # noqa: E731
    spec = await machines.affinity_to("worker-a")
    old = await machines.sandboxes.create(spec)
    assert await command("drain", "worker-a") == 0
    assert "worker-a receives no new sandboxes; sandboxes still running: 1." in capsys.readouterr().out
    async with await machines.sandboxes.create(spec) as new:
        assert await machines.where(new.name) == "worker-b"
        assert (await old.execute(PythonCode(source="print(1)"))).stdout == b"1\n"
        waiting = asyncio.create_task(command("drain", "worker-a", "--wait"))
        await command("workers")
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker-a")]
        assert row.split()[1:3] == ["draining", "1/512"]
        await old.close()
        assert await waiting == 0
        assert "still running: 0." in capsys.readouterr().out
    assert await command("undrain", "worker-a") == 0
    async with await machines.sandboxes.create(spec) as again:
        assert await machines.where(again.name) == "worker-a"
    assert await command("drain", "worker-z") == 2
    assert "unknown worker 'worker-z'" in capsys.readouterr().err


async def test_sandbox_service_two_machines_a_worker_that_is_terminated_ends_with_its_last_sandbox(
    machines: Machines,
) -> None:
    spec = await machines.affinity_to("worker-b")
    sandbox = await machines.sandboxes.create(spec)
    job = await began(sandbox)
    machines.workers["worker-b"].send_signal(signal.SIGTERM)
    await machines.until(b="draining")
    async with await machines.sandboxes.create(spec) as other:
        assert await machines.where(other.name) == "worker-a"
    job.write(b"still\n")
    assert (await job.wait()).stdout == b"began\ntold still\n"
    await sandbox.close()
    assert await asyncio.to_thread(machines.workers["worker-b"].wait, 30) == 0
    await machines.until(b=None)
    machines.workers["worker-a"].send_signal(signal.SIGTERM)
    await machines.until(a=None)
    with pytest.raises(SandboxUnavailableError, match="no worker is connected"):
        await machines.sandboxes.create(spec)
