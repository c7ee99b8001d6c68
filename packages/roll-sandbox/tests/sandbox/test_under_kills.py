"""Sixty-four sandboxes at once, programs that hoard, dodge and stop, and kills: nothing is copied, nothing held.

And the same of a service, whose server and workers are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

import psutil
import pytest
from sandbox.conftest import WAYS, agents, missing, started
from sandbox.hostile import HOSTILE
from sandbox.storm import Storm
from sandbox.test_hostile import CARRY, FIND

from roll_sandbox import Outcome, PythonCode, SandboxError, SandboxManager
from roll_sandbox.bubblewrap import BubblewrapRuntime

pytestmark = pytest.mark.asyncio

NAMES = (
    "file locks",
    "file locks of processes that ended",
    "queues of input and output",
    "CPU time of children that no process waits for",
    "CPU time without a timer",
    "socket pairs of other families",
    "cached pages of files",
    "stopped process",
    "sleep that ignores signals",
    "killing everything",
)
AT_ONCE = 64
KILLS = 12


def _held() -> dict[str, int]:
    """What of the host sandboxes could hold on to."""
    return {
        "queues": int(Path("/proc/sys/fs/aio-nr").read_text()),
        "locks": sum("POSIX" in line for line in Path("/proc/locks").read_text().splitlines()),
    }


async def _attack(manager: SandboxManager, name: str) -> str:
    hostile = next(each for each in HOSTILE if each.name == name)
    began = time.monotonic()
    try:
        result = await manager.execute(hostile.program)
    except SandboxError:
        return "killed"
    assert b"BREACH" not in result.stdout, (name, result)
    # A program that had no turn in its wall time has not come to what else would have ended it.
    assert result.outcome in hostile.outcomes | {Outcome.WALL_TIME}, (name, result)
    if hostile.program.wall_s is not None:  # with room for the others' turns: 64 sandboxes share the cores
        assert result.wall_s < hostile.program.wall_s + 5, (name, result)
        assert time.monotonic() - began < hostile.program.wall_s + 60, (name, result)
    if result.outcome is Outcome.CPU_TIME:
        assert result.cpu_s < hostile.program.cpu_s + 0.5, (name, result)
    return "contained"


async def _copy(manager: SandboxManager) -> str:
    """What one program leaves, whoever comes next does not find."""
    try:
        assert (await manager.execute(PythonCode(source=CARRY))).ok
        found = await manager.execute(PythonCode(source=FIND))
    except SandboxError:
        return "killed"
    assert found.stdout == b"0 0 0\n", found
    return "contained"


async def _kill(manager: SandboxManager, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(KILLS):
        await asyncio.sleep(draw.uniform(0.05, 0.2))
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            draw.choice(agents(manager)).kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_sandbox_kill_sixty_four_sandboxes_under_kills_hold_and_copy_nothing(way: str) -> None:
    before = _held()
    runtime = BubblewrapRuntime(zygote=way == "zygote")
    settings = {"warm": 8, "max_sandboxes": AT_ONCE, "instance": runtime}
    async for manager in started("bubblewrap", **settings):
        killer = asyncio.create_task(_kill(manager, seed=7))
        tasks = [_attack(manager, NAMES[n % len(NAMES)]) for n in range(AT_ONCE)]
        ends = await asyncio.gather(*tasks, *(_copy(manager) for _ in range(AT_ONCE // 4)))
        await killer
        assert ends.count("contained") >= AT_ONCE, ends
        assert ends.count("killed") <= 2 * KILLS
        for _ in range(AT_ONCE):  # an idle one may have been killed and not be missed yet
            with contextlib.suppress(SandboxError):
                result = await manager.execute(PythonCode(source="print(1)"))
                break
        assert result.stdout == b"1\n"
        spawner = psutil.Process(runtime._spawner._process.pid)
        left = spawner.children(recursive=True)
    assert psutil.wait_procs(left, timeout=20)[1] == []
    after = _held()
    assert all(after[name] <= before[name] + 8 for name in before), (before, after)
    if os.geteuid() == 0:
        assert not list(Path("/sys/fs/cgroup").glob(f"*/**/roll-sandbox-{spawner.pid}"))


async def test_sandbox_kill_a_service_whose_parts_are_killed_doubles_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
    if reason := missing("service"):
        pytest.skip(reason)
    tally = await Storm(tmp_path, seed=5).run(kills=5)
    assert tally.wrong == [] and tally.kills.total() == 5, tally
