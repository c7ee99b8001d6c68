"""Kept programs, sessions and their bombs while the spawner, agents, inits and shells are killed at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections import Counter
from dataclasses import replace

import psutil
import pytest
from sandbox.bombs import BOMBS, processes_left
from sandbox.conftest import LIMITS, WAYS, missing

from roll_sandbox import Command, PythonCode, Sandbox, SandboxError, SandboxManager, SandboxSpec
from roll_sandbox.bubblewrap import BubblewrapRuntime

pytestmark = pytest.mark.asyncio

SPEC = SandboxSpec(limits=replace(LIMITS, max_processes=24))
HANGS_S = 60.0


class Attack:
    """Users of sandboxes, and one who kills."""

    def __init__(self, manager: SandboxManager, seed: int) -> None:
        self.manager = manager
        self.draw = random.Random(seed)
        self.marker = uuid.uuid4().hex
        self.ends: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    async def run(self, users: int, turns: int, kills: int, kill_spawner: bool) -> None:
        """Let them meet; every call ends, with a result or with a `SandboxError`."""
        using = [asyncio.create_task(self._use(turns)) for _ in range(users)]
        for _ in range(kills):
            await asyncio.sleep(self.draw.uniform(0.0, 0.15))
            self._kill(kill_spawner)
        await asyncio.wait_for(asyncio.gather(*using), 5 * HANGS_S)

    def _kill(self, kill_spawner: bool) -> None:
        """Any process below the spawner, or rarely that itself."""
        spawner = self.manager.runtime._spawner  # type: ignore[attr-defined]
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(spawner._process.pid)
            if kill_spawner and self.draw.random() < 0.15:
                self.kills["spawner"] += 1
                root.kill()
                return
            below = root.children(recursive=True)
            if below:
                process = self.draw.choice(below)
                self.kills[process.name()] += 1
                process.send_signal(self.draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT)))

    async def _use(self, turns: int) -> None:
        for _ in range(turns):
            sandbox = None
            try:
                sandbox = await asyncio.wait_for(self.manager.create(SPEC), HANGS_S)
                for _ in range(self.draw.randint(1, 3)):
                    await asyncio.wait_for(self.draw.choice((self._program, self._session))(sandbox), HANGS_S)
                self.ends["ended"] += 1
            except SandboxError:
                self.ends["SandboxError"] += 1
            if sandbox is not None:
                await asyncio.wait_for(sandbox.close(), HANGS_S)

    async def _program(self, sandbox: Sandbox) -> None:
        bomb = self.draw.choice(BOMBS)
        program = Command(argv=("bash", "-c", bomb.text), env={"MARKER": self.marker}, wall_s=0.1)
        job = await sandbox.start(program)
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.uniform(0, 0.05))
            job.kill()
        await job.wait()

    async def _session(self, sandbox: Sandbox) -> None:
        shell = await sandbox.session(env={"MARKER": self.marker})
        for _ in range(self.draw.randint(1, 2)):
            job = await shell.start(self.draw.choice(BOMBS).text, wall_s=0.1)
            if self.draw.random() < 0.3:
                await asyncio.sleep(self.draw.uniform(0, 0.05))
                break
            await job.wait()
        await shell.close()


async def _attack(way: str, seed: int, *, users: int, turns: int, kills: int, kill_spawner: bool) -> Attack:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    others = set(psutil.Process().children(recursive=True))  # of earlier tests, a database among them
    manager = SandboxManager(BubblewrapRuntime(zygote=way == "zygote"), spec=SPEC, warm=1)
    await manager.start()
    attack = Attack(manager, seed)
    try:
        await attack.run(users, turns, kills, kill_spawner)
        for _ in range(200):  # the last kill may not have been noticed yet
            with contextlib.suppress(SandboxError):
                assert (await manager.execute(PythonCode(source="print(1)"))).stdout == b"1\n"
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("no program runs any more")
    finally:
        await asyncio.wait_for(manager.close(), HANGS_S)
    left: list[str] = []
    for _ in range(100):
        left = processes_left(attack.marker, None, set())
        if not left:
            break
        await asyncio.sleep(0.02)
    assert left == [], left
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - others, timeout=10)[1] == []
    return attack


async def test_sandbox_kept_kill_kept_programs_and_sessions_under_kills_leave_nothing() -> None:
    attack = await _attack("zygote" if os.geteuid() == 0 else "bwrap", 1, users=3, turns=2, kills=12, kill_spawner=True)
    assert sum(attack.ends.values()) == 6, attack.ends


@pytest.mark.slow
@pytest.mark.parametrize("way", [getattr(way, "values", [way])[0] for way in WAYS])
@pytest.mark.parametrize("kill_spawner", [False, True])
async def test_sandbox_kept_kill_kept_programs_and_sessions_under_many_kills_leave_nothing(
    way: str, kill_spawner: bool
) -> None:
    for seed in range(int(os.environ.get("ROLL_BOMB_ROUNDS", "1"))):
        attack = await _attack(way, seed, users=4, turns=5, kills=60, kill_spawner=kill_spawner)
        assert attack.ends["ended"] and attack.ends["SandboxError"], attack.ends
