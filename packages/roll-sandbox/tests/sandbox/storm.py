"""A service, two workers and a database that are killed again and again under load, and what must hold nevertheless.

    clients (asyncio, `connect`) ──► server ──► worker a, worker b        each started again as soon as it has ended
                                       └ database

Every program has a nonce. It writes it to a file of its sandbox, waits, and prints it. So a success whose nonce is not
in the file was never run, or in another sandbox; a nonce that is there twice was run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sandbox.conftest import _ROLL_SANDBOX, LIMITS, roll_sandbox
from sandbox.databases import Postgres

from roll_sandbox import (
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxQuotaError,
    SandboxSpec,
    SandboxUnavailableError,
    UnknownSandboxError,
    connect,
)

__all__ = ["Storm", "Tally"]

HANGS_S = 90.0
RECOVERS_S = 60.0
REAPED_S = 75.0
"""What a line that broke left behind is stopped after 60 s."""
QUOTA = 24
GAP_S, LEAST_GAP_S, MOST_GAP_S = 0.25, 0.05, 0.6
PROGRAMS_OF_ONE = 8
"""Programs in a kept sandbox, until it is checked and closed."""
TARGETS = (("server",), ("a",), ("b",), ("a", "b"), ("server", "a"), ("database",), ("server", "database"))
WEIGHTS = (5, 4, 4, 2, 1, 5, 1)
PROGRAM = """
import os, sys, time
nonce, rest_s = sys.argv[1:]
for path in ('runs', '/tmp/' + nonce, '/dev/shm/' + nonce):
    with open(path, 'a') as file:
        file.write(nonce + chr(10))
time.sleep(float(rest_s))
print(nonce)
"""
_RAW = "Traceback"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Tally:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    programs: int = 0
    successes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    """Successes that were found in their sandbox's file."""
    unknown: int = 0
    """Programs whose sandbox died before its file was read."""
    wrong: list[str] = field(default_factory=list)
    """Doubled, or a success that was not run, or a raw exception, or a hang."""
    slowest_s: float = 0.0
    """From a kill until every client has succeeded again."""
    starts: Counter[str] = field(default_factory=Counter)
    reaped_s: float = 0.0
    """From the clients' end until the service has no sandbox."""

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {number}" for name, number in self.kills.most_common())
        errors = ", ".join(f"{name} {number}" for name, number in self.errors.most_common()) or "none"
        return (
            f"{self.kills.total()} kills ({kills}); {self.programs} programs, {self.successes} successes, "
            f"{self.programs - self.successes} told lost or unavailable (errors: {errors}); {self.checked} successes "
            f"found once in their sandbox, {self.unknown} programs in sandboxes that died; slowest recovery "
            f"{self.slowest_s:.1f} s"
        )


class Supervised:
    """A command that is started again whenever it has ended, as an init system does, until `end`."""

    def __init__(self, name: str, arguments: tuple[str, ...], log: Path, env: dict[str, str]) -> None:
        self._name = name
        self._arguments = arguments
        self._log = log
        self._env = env
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while not self._ending:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *_ROLL_SANDBOX, *self._arguments, stdout=log, stderr=log, env=self._env
                )
            self.starts += 1
            code = await self._process.wait()
            if code != -signal.SIGKILL and not self._ending:
                await asyncio.sleep(0.1)  # its database is away

    def kill(self) -> None:
        """At once."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.kill()

    async def end(self) -> None:
        """Ask it to end, and wait."""
        self._ending = True
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.terminate()
        await asyncio.wait_for(self._keeping, 60)


class Storm:
    """See the module.

    Args:
        directory: for the database, logs and temporary files.
        postgres: in place of a file; running.
        say: takes lines about how it goes.
    """

    def __init__(
        self, directory: Path, *, seed: int, postgres: Postgres | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.tally = Tally()
        self._draw = random.Random(seed)
        self._directory = directory
        self._postgres = postgres
        self._say = say
        self._mark = f"storm{uuid.uuid4().hex[:12]}"
        self._number = 0
        self._supervised: dict[str, Supervised] = {}
        self._database_up = asyncio.Lock()
        self._stopping = False
        self._succeeded: dict[int, float] = {}
        self._restarting: set[asyncio.Task[None]] = set()

    async def run(self, kills: int, clients: int = 4) -> Tally:
        """Kill so often, and check what must hold."""
        with _adopting() as left:
            mounts, groups = _mounts(), _groups()
            (self._directory / "tmp").mkdir()
            async with self._service() as (url, token):
                running = [asyncio.create_task(self._client(n, url, token)) for n in range(clients)]
                try:
                    await self._recovered(clients)
                    await self._kill(kills, clients)
                    self.tally.slowest_s = max(self.tally.slowest_s, await self._recovered(clients))
                    self._stopping = True
                    await asyncio.wait_for(asyncio.gather(*running), HANGS_S)
                finally:
                    for task in running:
                        task.cancel()
                    await asyncio.gather(*running, return_exceptions=True)
                self.tally.reaped_s = await self._nothing_is_there(url, token)
                await self._all_of_the_quota(url, token)
            self.tally.starts.update({name: each.starts for name, each in self._supervised.items()})
            orphans = await _gone(lambda: [each for each in left() if each.pid not in self._of_the_database()])
        assert orphans == [], orphans
        complaints = {path.name: text for path in self._directory.glob("*.log") if _RAW in (text := path.read_text())}
        assert complaints == {}
        assert _mounts() - mounts == set()
        assert _groups() - groups == set()
        assert list((self._directory / "tmp").iterdir()) == []
        assert [path for place in ("/tmp", "/dev/shm") for path in Path(place).glob(f"{self._mark}*")] == []
        return self.tally

    @contextlib.asynccontextmanager
    async def _service(self) -> AsyncIterator[tuple[str, str]]:
        directory = self._directory
        database = self._postgres.database() if self._postgres else f"sqlite:///{directory}/sandboxes.db"
        scopes = [word for scope in ("admin", "run", "read", "worker") for word in ("--scope", scope)]
        token = roll_sandbox("token", "create", "tester", *scopes, "--database", database)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        env = {**os.environ, "TMPDIR": str(directory / "tmp")}
        serve = ("serve", "--port", port, "--database", database, "--runtime", "none", "--owner-sandboxes", str(QUOTA))
        join = ("worker", "--join", url, "--token", token, "--warm", "0", "--name")
        commands = {"server": serve, "a": (*join, "worker-a"), "b": (*join, "worker-b")}
        for name, command in commands.items():
            self._supervised[name] = Supervised(name, command, directory / f"{name}.log", env)
        try:
            yield url, token
        finally:
            await asyncio.gather(*self._restarting)
            for name in ("a", "b", "server"):
                await self._supervised[name].end()

    # --- kills

    async def _kill(self, kills: int, clients: int) -> None:
        """Every other time the clients have succeeded since the one before, or else they would never."""
        for number in range(kills):
            await asyncio.sleep(min(MOST_GAP_S, max(LEAST_GAP_S, self._draw.expovariate(1 / GAP_S))))
            names = self._draw.choices(TARGETS, WEIGHTS)[0]
            if "database" in names and self._postgres is None:
                names = ("server",)
            self.tally.kills[" and ".join(names)] += 1
            for name in names:
                if name == "database":
                    self._restarting.add(asyncio.create_task(self._kill_database()))
                else:
                    self._supervised[name].kill()
            took = ""
            if number % 2:
                recovery_s = await self._recovered(clients)
                self.tally.slowest_s = max(self.tally.slowest_s, recovery_s)
                took = f": all succeed again after {recovery_s:.1f} s"
            self._say(f"kill {number + 1}, {' and '.join(names)}{took}; {self.tally}")

    async def _kill_database(self) -> None:
        assert self._postgres is not None
        async with self._database_up:
            await asyncio.to_thread(self._postgres.kill)
            await asyncio.to_thread(self._postgres.start)

    def _of_the_database(self) -> set[int]:
        """Processes of the one that runs now."""
        process = self._postgres.process if self._postgres is not None else None
        if process is None:
            return set()
        return {process.pid, *(each.pid for each in psutil.Process(process.pid).children(recursive=True))}

    async def _recovered(self, clients: int) -> float:
        """Seconds until every client has succeeded."""
        began = time.monotonic()
        while not all(self._succeeded.get(n, 0.0) > began for n in range(clients)):
            assert time.monotonic() - began < RECOVERS_S, ("clients do not succeed again", self.tally)
            assert self.tally.wrong == [], self.tally.wrong
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    # --- clients

    async def _client(self, number: int, url: str, token: str) -> None:
        draw = random.Random(f"{number} {self._draw.random()}")
        with contextlib.suppress(SandboxUnavailableError):
            while not self._stopping:
                manager = connect(url, token, spec=SandboxSpec(limits=LIMITS), warm=0)
                try:
                    await manager.start()
                except SandboxUnavailableError:  # the first server has not started yet
                    await asyncio.sleep(0.05)
                    continue
                async with manager:
                    while not self._stopping:
                        await self._turn(number, draw, manager)

    async def _turn(self, number: int, draw: random.Random, manager: SandboxManager) -> None:
        """One program alone, then some in a kept sandbox."""
        began = time.monotonic()
        if not await self._program(draw, manager.execute):
            return
        sandbox = await self._careful(manager.create())
        if sandbox is None:
            return
        told: dict[str, bool] = {}
        for _ in range(draw.randint(1, PROGRAMS_OF_ONE)):
            if not await self._program(draw, sandbox.execute, told):
                break
            self._succeeded[number] = began
            if self._stopping:
                break
        await self._check(sandbox, told)
        await self._careful(sandbox.close())

    async def _program(
        self, draw: random.Random, execute: Callable[[PythonCode], Awaitable[Any]], told: dict[str, bool] | None = None
    ) -> bool:
        self._number += 1
        nonce = f"{self._mark}-{self._number}"
        rest_s = draw.choice((0.0, 0.0, 0.05, 0.3))
        self.tally.programs += 1
        result = await self._careful(execute(PythonCode(source=PROGRAM, argv=(nonce, str(rest_s)))))
        if result is not None and not (result.ok and result.stdout == f"{nonce}\n".encode()):
            self.tally.wrong.append(f"a success that is none: {result}")
        self.tally.successes += result is not None
        if told is not None:
            told[nonce] = result is not None
        return result is not None

    async def _careful(self, call: Awaitable[Any]) -> Any:
        """Its result; `None` after an error that a client may be told."""
        try:
            async with asyncio.timeout(HANGS_S):
                return await call
        except (SandboxError, SandboxUnavailableError) as error:
            if isinstance(error, UnknownSandboxError):
                self.tally.wrong.append(f"may have run, and is said never to have been: {error}")
            self.tally.errors[type(error).__name__] += 1
            await asyncio.sleep(0.05)
        except TimeoutError:
            self.tally.wrong.append(f"nothing was heard for {HANGS_S:g} s")
        except Exception as error:
            self.tally.wrong.append(f"no typed error: {error!r}")
        return None

    async def _check(self, sandbox: Any, told: dict[str, bool]) -> None:
        """Each at most once, and successes once."""
        source = "import os; print(open('runs').read() if os.path.exists('runs') else '')"
        result = await self._careful(sandbox.execute(PythonCode(source=source)))
        if result is None:
            self.tally.unknown += len(told)
            return
        found = Counter(result.stdout.decode().split())
        for nonce, success in told.items():
            if found[nonce] > 1 or found[nonce] < success:
                self.tally.wrong.append(f"a program ran {found[nonce]} times, and its success was {success}")
            self.tally.checked += success
        if not found.keys() <= told.keys():
            self.tally.wrong.append(f"a program of another sandbox: {found.keys() - told.keys()}")

    # --- afterwards

    async def _nothing_is_there(self, url: str, token: str) -> float:
        """Seconds until the service has no sandbox."""
        began = time.monotonic()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http:
            while True:
                async with http.get(f"{url}/v1/sandboxes") as answer:
                    rows = await answer.json()
                if rows == []:
                    return time.monotonic() - began
                assert time.monotonic() - began < REAPED_S, rows
                await asyncio.sleep(0.1)

    async def _all_of_the_quota(self, url: str, token: str) -> None:
        """Whatever was lost, and however: it counts no more."""
        async with connect(url, token, spec=SandboxSpec(limits=LIMITS), warm=0) as manager:
            await asyncio.gather(*(manager.create() for _ in range(QUOTA)))
            with contextlib.suppress(SandboxQuotaError):
                await manager.create()
                raise AssertionError("more than the quota")


@contextlib.contextmanager
def _adopting() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Whoever loses its parent becomes a child of this process; what has come since."""
    prctl = ctypes.CDLL(None).prctl
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield lambda: [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


async def _gone(left: Callable[[], list[psutil.Process]]) -> list[str]:
    """Those that do not end within seconds; the ended ones are buried."""
    until = time.monotonic() + 10
    while (found := left()) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
                if process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
        await asyncio.sleep(0.05)
    return [f"{process.pid} {process.status()} {process.cmdline()}" for process in found]


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


def _groups() -> set[str]:
    """Control groups of spawners that have ended."""
    found = {str(path) for path in Path("/sys/fs/cgroup").glob("**/roll-sandbox-*")}
    return {path for path in found if not psutil.pid_exists(int(path.rpartition("-")[2]))}
