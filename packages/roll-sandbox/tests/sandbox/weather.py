"""A whole service in virtual time, where every call is slow, fails or is cancelled at random: one seed, one schedule.

    clients (`connect`) ── pipe ── Service ── pipe ── Joined, Worker, SandboxManager ── agents that are played
    routes (`Inside`) ────────────────┘ └ SQLite, whose writer is played: late, away, commits that fail or whose answer
                                          is lost
    weather: lines break or fall silent, workers drain or die, servers are stopped and started, clocks jump

Production code runs, but for WebSockets, agents and the writer's thread. Every program has a nonce, which an agent
counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy
from aiohttp import WSMessage, WSMsgType
from sandbox.virtual_time import VirtualTimeLoop
from starlette.websockets import WebSocketDisconnect

from roll_sandbox import PythonCode, SandboxError, SandboxManager, SandboxSpec, SandboxUnavailableError
from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.connection import AgentJob
from roll_sandbox.counters import Counters
from roll_sandbox.errors import RollSandboxError
from roll_sandbox.remote import RemoteRuntime
from roll_sandbox.service.local_clients import LocalClients
from roll_sandbox.service.quotas import Quota
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.store import store
from roll_sandbox.service.store.writer import DatabaseWriter, QueuedWrite
from roll_sandbox.service.tokens import Identity
from roll_sandbox.worker import Worker
from roll_sandbox.worker.connection import WorkerConnection

__all__ = ["Found", "weather"]

HANGS_S = 300.0
SETTLES_S = 300.0
AWAY_TIMEOUT_S = 30.0
STORM_S = 60.0
ANN = Identity(token="1", owner="ann", scopes=frozenset({"admin"}))


@dataclass
class Found:
    """What came of one seed."""

    runs: Counter[str] = field(default_factory=Counter)
    """How often an agent ran each nonce to its end."""
    begun: Counter[str] = field(default_factory=Counter)
    successes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class _Loop(VirtualTimeLoop):
    """Threads take time too."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = super().run_in_executor(executor, func, *args)
        late = self.create_future()

        def tell() -> None:
            if not late.done():
                if done.exception() is None:
                    late.set_result(done.result())
                else:
                    late.set_exception(done.exception())

        done.exception()
        self.call_later(self.random.choice((0.0, 0.001, 0.05)), tell)
        return late


# --- what is played


class _End:
    """One end of a pipe: what aiohttp's and Starlette's WebSockets have in common here."""

    def __init__(self, pipe: _Pipe) -> None:
        self.pipe = pipe
        self.came: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: _End
        self.scope = {"identity": ANN}
        self.client = None
        self.last = 0.0

    async def send_bytes(self, data: bytes) -> None:
        if self.pipe.broken:
            raise ConnectionResetError("the line is broken")
        await self.pipe.rest()
        loop = asyncio.get_running_loop()
        self.last = max(self.last + 1e-6, loop.time() + self.pipe.draw.choice((0.0, 0.001, 0.02, 0.2)))
        loop.call_at(self.last, self.pipe.arrive, self.other, data)

    async def receive_bytes(self, timeout: float | None = None) -> bytes:
        async with asyncio.timeout(timeout):
            data = await self.came.get()
        if data is None:
            self.came.put_nowait(None)
            raise WebSocketDisconnect(1006)
        return data

    async def accept(self) -> None:
        await self.pipe.rest()
        if self.pipe.broken:
            raise RuntimeError("the line is broken")

    async def close(self, *_: Any) -> None:
        self.pipe.break_()

    def __aiter__(self) -> _End:
        return self

    async def __anext__(self) -> WSMessage:
        try:
            return WSMessage(WSMsgType.BINARY, await self.receive_bytes(), None)
        except WebSocketDisconnect:
            raise StopAsyncIteration from None


class _Pipe:
    """A connection that is slow, breaks at either end at its own time, or loses what is said without a sign."""

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.draw
        self.broken = self.silent = False
        self.near, self.far = _End(self), _End(self)
        self.near.other, self.far.other = self.far, self.near
        world.pipes[self] = None

    async def rest(self) -> None:
        if self.draw.random() < 0.2:
            await asyncio.sleep(self.draw.choice((0.0, 0.01)))

    def arrive(self, end: _End, data: bytes) -> None:
        if not self.broken and not self.silent:
            end.came.put_nowait(data)

    def break_(self) -> None:
        if not self.broken:
            self.broken = True
            self.world.pipes.pop(self, None)
            for end in (self.near, self.far):
                asyncio.get_running_loop().call_later(self.draw.choice((0.0, 0.3)), end.came.put_nowait, None)


class _Writer(DatabaseWriter):
    """Its thread's work, in the loop, in its own time."""

    world: World

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._waiting, self._due = loop, [], False

    def put(self, write: QueuedWrite) -> None:
        self._waiting.append(write)
        self._soon()

    def _soon(self) -> None:
        if not self._due and self._loop is not None:
            self._due = True
            delay_s = self.world.draw.choice((0.0, 0.001, 0.01, 0.3, 2.0 if self.world.slow else 0.0))
            self._loop.call_later(delay_s, self._write)

    def _write(self) -> None:
        self._due = False
        if self._loop is None:
            return
        came, self._waiting = self._waiting, []
        self._last_attempt = min(self._last_attempt, time.monotonic() - 1.0)
        self._write_batch(came)
        if self.unavailable_reason and self._loop is not None:
            self._due = True
            self._loop.call_later(0.25, self._write)

    def close(self) -> None:
        self._write_batch(self._waiting)
        self._waiting, self._loop = [], None
        super().close()


class _Agent:
    """What `connection.Connection` asks for, played."""

    def __init__(self, world: World, runtime: _Runtime) -> None:
        self.world, self.runtime = world, runtime
        self.is_lost = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs: dict[int, tuple[AgentJob, asyncio.Task[None] | None]] = {}
        runtime.agents.add(self)

    def _job(self, channel: int, output_bytes: int) -> AgentJob:
        job = AgentJob(self, channel, output_bytes)
        if self.is_lost:
            job.finish(None, "the sandbox has ended")
        return job

    def configure(self, settings: dict[str, Any]) -> AgentJob:
        job = self._job(0, 0)
        asyncio.get_running_loop().call_later(self.world.pause_s(), job.finish, {})
        return job

    def submit(self, name: str, request: dict[str, Any], stdin: bytes, output_bytes: int) -> AgentJob:
        channel = len(self.jobs) + 1
        job = self._job(channel, output_bytes)
        if not self.is_lost:
            self.jobs[channel] = job, asyncio.create_task(self._run(name, job, request))
        return job

    def again(self, channel: int, name: str, request: dict[str, Any], output_bytes: int) -> AgentJob:
        return self.submit(name, {"argv": [request["command"]]}, b"", output_bytes)

    async def _run(self, name: str, job: AgentJob, request: dict[str, Any]) -> None:
        argv = request.get("argv") or []
        nonce = argv[0] if argv and argv[0].startswith("nonce") else None
        try:
            self.world.found.begun[nonce] += nonce is not None
            await asyncio.sleep(self.world.pause_s())
            for _ in range(self.world.draw.randrange(4) if nonce else 0):
                job.add(ord("o"), b".")
                await asyncio.sleep(self.world.pause_s())
            if nonce:
                job.add(ord("o"), nonce.encode())
                self.world.found.runs[nonce] += 1
            job.finish({"code": 0})
        except asyncio.CancelledError:
            job.finish({"code": 255, "signal": 9})

    def send(self, op: str, channel: int, *_: Any) -> None:
        job, task = self.jobs.get(channel, (None, None))
        if op == "kill" and task is not None:
            task.cancel()
        elif op == "bound" and job is not None:
            asyncio.get_running_loop().call_later(0.001, job.resolve_limit_requests, 0.0)

    def close(self) -> None:
        pass

    def destroy(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for job, task in self.jobs.values():
                task.cancel()
                job.finish(None, "the sandbox ended unexpectedly")
            asyncio.get_running_loop().call_later(self.world.pause_s(), self._gone)

    def _gone(self) -> None:
        self.runtime.agents.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)


class _Runtime:
    name, fresh_programs = "played", True

    def __init__(self, world: World) -> None:
        self.world = world
        self.agents: set[_Agent] = set()

    async def start(self) -> None:
        pass

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def launch(self, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(self.world.pause_s())
        if self.world.chance(0.05):
            raise SandboxError("it did not start")
        if self.world.chance(0.02):
            raise OSError(24, "Too many open files")
        agent = _Agent(self.world, self)
        settings = {"home": "/home", "isolated": True, "mount_space": True}
        return Sandbox(spec, settings, agent, destroy=agent.destroy, ended=agent.ended, counters=Counters())

    async def close(self) -> None:
        for agent in list(self.agents):
            agent.destroy()
        while self.agents:
            await asyncio.sleep(0.1)


# --- what runs


class World:
    """See the module."""

    def __init__(self, loop: _Loop, database: Path, hostile: bool) -> None:
        self.loop, self.draw, self.database, self.stormy = loop, loop.random, database, hostile
        self.found = Found()
        self.pipes: dict[_Pipe, None] = {}
        self.slow = self.away = False
        self.clock_s = 1.7e9
        self.service: Service | None = None
        self.inside: LocalClients | None = None
        self.serving: set[asyncio.Task[None]] = set()
        self.numbers = 0

    def chance(self, probability: float) -> bool:
        return self.stormy and self.draw.random() < probability

    def pause_s(self) -> float:
        return self.draw.choice((0.0, 0.0, 0.001, 0.02, 0.3, 3.0 if self.chance(0.1) else 0.0))

    async def start_service(self) -> None:
        quota = Quota(sandboxes=8, cpu_s=60.0, programs=64)
        settings = Settings(database=f"sqlite:///{self.database}", runtime=None, quota=quota, away_s=AWAY_TIMEOUT_S)
        service = Service(settings)
        sqlalchemy.event.listen(service.store.engine, "before_cursor_execute", self._execute)
        sqlalchemy.event.listen(service.store.engine, "commit", self._commit)
        service.tokens.is_valid = lambda _: True  # type: ignore[method-assign]
        await service.start()
        self.inside = LocalClients(service.dispatcher)
        self.service = service

    def _execute(self, *_: Any) -> None:
        if self.away:
            raise sqlalchemy.exc.OperationalError("", {}, Exception("database or disk is full"))

    def _commit(self, connection: Any) -> None:
        if self.chance(0.02):
            if self.draw.random() < 0.5:
                connection.connection.dbapi_connection.execute("COMMIT")
            raise sqlalchemy.exc.OperationalError("", {}, Exception("disk I/O error"))

    async def stop_service(self) -> None:
        service, self.service = self.service, None
        for pipe in list(self.pipes):
            pipe.break_()
        for task in list(self.serving):
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        for owned in self.inside._by_owner.values():
            owned._service.fail_all(SandboxError("the server ends"))
        await service.close()

    async def dial(self, place: str) -> _End:
        await asyncio.sleep(self.pause_s())
        service = self.service
        if service is None or self.chance(0.1):
            raise SandboxUnavailableError("nobody is there")
        pipe = _Pipe(self)

        async def serve() -> None:
            with contextlib.suppress(RuntimeError):
                await (service.serve_client if place == "line" else service.serve_worker)(pipe.far)
            pipe.break_()

        task = asyncio.create_task(serve())
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        return pipe.near

    async def worker(self, name: str) -> None:
        """One that is started again whenever it dies, until it is cancelled."""
        while True:
            runtime = _Runtime(self)
            manager = SandboxManager(runtime, warm=1, max_sandboxes=6)
            dies = asyncio.create_task(self._until_it_dies())
            try:
                try:
                    await manager.start()
                except (SandboxError, OSError):
                    continue
                worker = Worker(manager)
                joined = WorkerConnection(worker, "http://played", "token", name=name, capacity=6)
                joined._connect = lambda _: self.dial("worker")  # type: ignore[method-assign]
                serving = asyncio.create_task(joined.serve())
                try:
                    await asyncio.wait([serving, dies], return_when=asyncio.FIRST_COMPLETED)
                    if serving.done() and not joined._has_left:
                        self.found.wrong.append(f"a worker ended: {serving.exception()!r}")
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
                    await worker.close()
            finally:
                dies.cancel()
                await manager.close()
                if runtime.agents:
                    self.found.wrong.append(f"{len(runtime.agents)} sandboxes are left")

    async def _until_it_dies(self) -> None:
        while not self.chance(0.05):
            await asyncio.sleep(2.0)

    # --- clients

    async def careful(self, call: Awaitable[Any], what: str, *, cancel: bool = True) -> Any:
        """Its result; `None` where it failed as it may, or was cancelled."""
        task = asyncio.ensure_future(call)
        if cancel and self.chance(0.15):
            self.loop.call_later(self.draw.choice((0.0, 0.0, 0.001, 0.01, 0.1, 1.0)), task.cancel)
        try:
            await asyncio.wait([task], timeout=HANGS_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            self.found.wrong.append(f"{what}: nothing was heard for {HANGS_S:g} s: {task}")
        elif task.cancelled():
            self.found.errors["cancelled"] += 1
        elif isinstance(error := task.exception(), (RollSandboxError, ValueError)):
            self.found.errors[type(error).__name__] += 1
            if not str(error):
                self.found.wrong.append(f"{what}: an error without words: {error!r}")
        elif error is not None:
            self.found.wrong.append(f"{what}: no typed error: {error!r}")
        else:
            return task.result()
        return None

    def program(self) -> PythonCode:
        self.numbers += 1
        return PythonCode(source="", argv=(f"nonce{self.numbers}",))

    def check(self, program: PythonCode, result: Any) -> None:
        nonce = program.argv[0]
        if result is not None and result.exit_code == 0:
            self.found.successes += 1
            if self.found.runs[nonce] != 1 or not result.stdout.endswith(nonce.encode()):
                self.found.wrong.append(f"a success that ran {self.found.runs[nonce]} times: {result}")

    async def client(self) -> None:
        """Over a line of its own."""
        runtime = RemoteRuntime(
            "http://played", "token", reconnect_timeout_s=20.0, lifetime_s=self.draw.choice((None, 5.0))
        )
        runtime._connect = lambda: self.dial("line")  # type: ignore[method-assign]
        manager = SandboxManager(runtime, warm=self.draw.choice((0, 0, 1)))
        while True:
            with contextlib.suppress(SandboxUnavailableError, RollSandboxError):
                await manager.start()
                break
            await asyncio.sleep(0.5)
        until = self.loop.time() + STORM_S
        while self.loop.time() < until:
            program = self.program()
            self.check(program, await self.careful(manager.execute(program), "execute"))
            sandbox = await self.careful(manager.create(), "create")
            if sandbox is None:
                await asyncio.sleep(0.05)
            for _ in range(self.draw.randrange(5) if sandbox is not None else 0):
                what = self.draw.choice(("run", "run", "both", "files", "extend", "usage", "session", "rest"))
                await self.use(sandbox, what)
            if sandbox is not None and not self.chance(0.2):
                await self.careful(sandbox.close(), "close")
        await self.careful(manager.close(), "the end", cancel=False)

    async def use(self, sandbox: Any, what: str) -> None:
        program = self.program()
        if what == "run":
            self.check(program, await self.careful(sandbox.execute(program), what))
        elif what == "both":
            programs = [program, self.program()]
            ends = await asyncio.gather(*(self.careful(sandbox.execute(each), what) for each in programs))
            for each, end in zip(programs, ends, strict=True):
                self.check(each, end)
        elif what == "files":
            await self.careful(sandbox.write_file("x", b"y"), "write")
            taken = await self.careful(sandbox.snapshot(), "snapshot")
            if taken is not None:
                await self.careful(sandbox.restore(taken), "restore")
        elif what == "extend":
            with contextlib.suppress(RollSandboxError):
                said = sandbox.extend(self.draw.choice((10.0, 1e9)))
                if said is not None:
                    await self.careful(said, "extend")
        elif what == "usage":
            await self.careful(sandbox.usage(), what)
        elif what == "session":
            session = await self.careful(sandbox.session(), what)
            if session is not None:
                await self.careful(session.run(program.argv[0]), "command")
                await self.careful(session.close(), "close session")
        else:
            await asyncio.sleep(self.draw.choice((0.1, 1.0, 7.0)))

    async def asker(self, number: int) -> None:
        """Through routes: names that several ask for, make, use, extend and stop at once."""
        until = self.loop.time() + STORM_S
        while self.loop.time() < until:
            if self.inside is None or self.service is None:
                await asyncio.sleep(0.5)
                continue
            turn = asyncio.create_task(self._asked(self.inside.get(ANN)))
            self.serving.add(turn)  # a server that stops cancels what it is asked
            turn.add_done_callback(self.serving.discard)
            await asyncio.wait([turn])
            if not turn.cancelled():
                turn.result()
            await asyncio.sleep(self.draw.choice((0.0, 0.2, 1.0)))

    async def _asked(self, owned: Any) -> None:
        name = f"sandbox-{int(self.loop.time() / 10)}"
        made = await self.careful(owned.create(SandboxSpec(), 40.0, name=name), "create by name")
        if made is not None:
            program = self.program()
            key = f"program-{self.draw.randrange(3)}"
            await self.careful(self._run_as(owned, made[0], program, key), "run by name")
            if self.chance(0.5):
                with contextlib.suppress(RollSandboxError):
                    owned.dispatcher.extend(await owned.get_entry(name), self.draw.choice((0.5, 20.0)))
        else:
            found = await self.careful(owned.get_sandbox(name), "find")
            if found is not None and self.chance(0.3):
                await self.careful(found.close(), "stop by name")

    async def _run_as(self, owned: Any, sandbox: Any, program: PythonCode, key: str) -> None:
        result = await owned.begin(sandbox, program, alone=False, key=key).wait()
        if result.exit_code == 0:
            nonce = result.stdout.lstrip(b".").decode()
            if self.found.runs[nonce] != 1:
                self.found.wrong.append(f"a success by name that ran {self.found.runs[nonce]} times: {result}")

    # --- weather

    async def storm(self) -> None:
        until = self.loop.time() + STORM_S
        while self.stormy and self.loop.time() < until:
            await asyncio.sleep(self.draw.expovariate(0.7))
            what = self.draw.choice(("break", "break", "silence", "slow", "away", "drain", "clock", "restart", "rest"))
            if what in ("break", "silence") and self.pipes:
                pipe = self.draw.choice(list(self.pipes))
                if what == "break":
                    pipe.break_()
                else:
                    pipe.silent = True
                    self.loop.call_later(self.draw.choice((1.0, 6.0, 40.0)), pipe.break_)
            elif what == "slow":
                self.slow = not self.slow
            elif what == "away":
                self.away = True
                await asyncio.sleep(self.draw.choice((0.1, 1.0, 5.0)))
                self.away = False
            elif what == "drain" and self.service is not None:
                with contextlib.suppress(RollSandboxError):
                    self.service.workers.drain("worker-a", draining=self.draw.random() < 0.5)
            elif what == "clock":
                self.clock_s += self.draw.choice((-3600.0, 3600.0))
            elif what == "restart" and self.draw.random() < 0.4:
                await self.stop_service()
                await asyncio.sleep(self.draw.choice((0.0, 1.0, 10.0)))
                await self.start_service()

    async def live(self) -> None:
        await self.start_service()
        workers = [asyncio.create_task(self.worker(name)) for name in ("worker-a", "worker-b")]
        clients = [asyncio.create_task(self.client()) for _ in range(3)]
        clients += [asyncio.create_task(self.asker(number)) for number in range(2)]
        await asyncio.gather(self.storm(), *clients)
        self.stormy = self.slow = self.away = False
        await self.settled()
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await self.stop_service()
        await asyncio.sleep(5.0)
        mine = asyncio.current_task()
        for task in asyncio.all_tasks() - {mine}:
            self.found.wrong.append(f"a task is left: {task}")
        for nonce, times in self.found.begun.items():
            if nonce and times > 1:
                self.found.wrong.append(f"{nonce} began {times} times")

    async def settled(self) -> None:
        """What nobody claims goes; what counts, counts nothing; what is written says so."""
        service = self.service
        assert service is not None
        until = self.loop.time() + SETTLES_S
        while service.dispatcher.entries and self.loop.time() < until:
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        for entry in service.dispatcher.entries.values():
            self.found.wrong.append(f"is there for ever: {entry.name} {entry.state} stopping={entry.is_stopping}")
        if any(service.quotas.get_usage("ann").values()):
            self.found.wrong.append(f"still counted: {service.quotas.get_usage('ann')}")
        for link in service.dispatcher.workers.values():
            if link.num_sandboxes or link.reserved_memory_bytes:
                self.found.wrong.append(f"{link.name} is said to hold {link.num_sandboxes}")
        rows = [*service.store.read(sqlalchemy.text("SELECT name, state FROM sandboxes WHERE ended IS NULL"))]
        rows += service.store.read(sqlalchemy.text("SELECT name, state FROM executions WHERE state = 'running'"))
        if rows:
            self.found.wrong.append(f"still written down: {rows}")


@contextlib.contextmanager
def _clock(world: World) -> Iterator[None]:
    """The loop's, and a wall's that jumps."""
    with (
        mock.patch("time.monotonic", world.loop.time),
        mock.patch("time.time", lambda: world.clock_s + world.loop.time()),
        mock.patch("time.sleep", lambda _: None),
        mock.patch("uuid.uuid4", lambda: uuid.UUID(int=world.draw.getrandbits(128))),
        mock.patch("secrets.token_hex", lambda size: world.draw.randbytes(size).hex()),
        mock.patch.object(store, "DatabaseWriter", type("Played", (_Writer,), {"world": world})),
    ):
        yield


def weather(seed: int, database: Path, *, hostile: bool = True) -> Found:
    """Live through one seed.

    Args:
        database: a file of SQLite with its tables, which is changed.
    """
    loop = _Loop(seed=seed, shuffle=True, limit_s=5000.0)
    world = World(loop, database, hostile)
    loop.set_exception_handler(lambda _, context: world.found.wrong.append(f"nobody caught: {context}"))
    with _clock(world), asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(world.live())
    return world.found
