"""Nothing that a program or a session started is left one second after its end, and the next program works."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from sandbox.bombs import BOMBS, Bomb, command_lines, processes_left
from sandbox.conftest import LIMITS, WAYS, started

from roll_sandbox import Command, Outcome, PythonCode, Sandbox, SandboxManager, SandboxSpec
from roll_sandbox.bubblewrap import BubblewrapRuntime

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec(limits=replace(LIMITS, max_processes=40))
BOMB_S = 0.3
GONE_S = 1.0
ROUNDS = int(os.environ.get("ROLL_BOMB_ROUNDS", "1"))
"""Of the whole sweep: `make test SUITE=bombs` sets it."""
PLACES = ("warm", "kept", "session")


async def _namespace(sandbox: Sandbox) -> str | None:
    """The sandbox's user namespace, where this user may ask for that of every process."""
    if os.geteuid() != 0:
        return None
    said = await sandbox.execute(PythonCode(source="import os; print(os.readlink('/proc/self/ns/user'))"))
    return said.stdout.decode().strip()


async def _gone(bomb: Bomb, marker: str, namespace: str | None, known: set[bytes]) -> None:
    began = time.monotonic()
    while left := processes_left(marker, namespace, known):
        assert time.monotonic() - began < GONE_S, (bomb.name, left)
        await asyncio.sleep(0.01)


async def _warm(manager: SandboxManager, bomb: Bomb) -> None:
    marker = uuid.uuid4().hex
    await manager.execute(Command(argv=("bash", "-c", bomb.text), env={"MARKER": marker}, wall_s=BOMB_S), spec=SPEC)
    await _gone(bomb, marker, None, set())
    assert (await manager.execute(PythonCode(source="print(1)"), spec=SPEC)).stdout == b"1\n"


async def _kept(sandbox: Sandbox, bomb: Bomb, namespace: str | None, known: set[bytes]) -> None:
    marker = uuid.uuid4().hex
    program = Command(argv=("bash", "-c", bomb.text), env={"MARKER": marker}, wall_s=BOMB_S)
    await sandbox.execute(program)
    await _gone(bomb, marker, namespace, known)
    after = await sandbox.execute(Command(argv=("bash", "-c", "echo $(echo 1)")))
    assert (after.outcome, after.stdout) == (Outcome.EXITED, b"1\n"), (bomb.name, after)


async def _session(sandbox: Sandbox, bomb: Bomb, namespace: str | None, known: set[bytes]) -> None:
    marker = uuid.uuid4().hex
    shell = await sandbox.session(env={"MARKER": marker})
    await shell.run(bomb.text, wall_s=BOMB_S)
    await shell.close()
    await _gone(bomb, marker, namespace, known)
    shell = await sandbox.session()
    after = await shell.run("echo $(echo 1)")
    await shell.close()
    assert (after.outcome, after.stdout) == (Outcome.EXITED, b"1\n"), (bomb.name, after)


async def _explode(manager: SandboxManager, place: str, bombs: list[Bomb]) -> None:
    if place == "warm":
        for bomb in bombs:
            await _warm(manager, bomb)
        return
    async with await manager.create(SPEC) as sandbox:
        namespace = await _namespace(sandbox)
        known = set() if namespace is None else command_lines(namespace)
        for bomb in bombs:
            await (_kept if place == "kept" else _session)(sandbox, bomb, namespace, known)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[SandboxManager]:
    """Sandboxes as this user gets them."""
    async for manager in started("bubblewrap", warm=0):
        yield manager


@pytest.mark.parametrize("number", range(len(BOMBS)), ids=[bomb.name for bomb in BOMBS])
async def test_sandbox_fork_bomb_leave_no_process_and_the_next_program_works(
    local: SandboxManager, number: int
) -> None:
    await _explode(local, ("session", "kept")[number % 2], [BOMBS[number]])


async def test_sandbox_fork_bomb_in_a_warm_sandbox_leave_no_process(local: SandboxManager) -> None:
    await _explode(local, "warm", BOMBS[:2])


async def test_sandbox_fork_bomb_in_a_session_over_http_leave_no_process(serviced: SandboxManager) -> None:
    await _explode(serviced, "session", BOMBS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [getattr(way, "values", [way])[0] for way in WAYS])
async def test_sandbox_fork_bomb_of_every_kind_leave_no_process(way: str, place: str) -> None:
    async for manager in started("bubblewrap", warm=0, instance=BubblewrapRuntime(zygote=way == "zygote")):
        await _explode(manager, place, BOMBS * ROUNDS)


@pytest.mark.slow
async def test_sandbox_fork_bomb_of_every_kind_leave_no_process_over_http(serviced: SandboxManager) -> None:
    await _explode(serviced, "session", BOMBS * ROUNDS)
