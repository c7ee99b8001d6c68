"""Objects in processes of their own: what becomes of one becomes of no other, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from roll.cluster.pool import LocalWorkerPool
from roll.errors import WorkerDiedError
from roll.protocols import ActorHandle, WorkerPool

MIB = 2**20


@pytest.fixture
async def pool() -> AsyncIterator[LocalWorkerPool]:
    pool = LocalWorkerPool(1, memory_limit_bytes=512 * MIB)
    yield pool
    await pool.close()


async def kept(pool: WorkerPool, *args: Any) -> ActorHandle:
    """A deque: it appends and pops in a process of its own."""
    from collections import deque

    return await pool.create_actor(deque, args, prepare=(time.time, ()))


async def pid_of(pool: WorkerPool) -> tuple[ActorHandle, int]:
    import subprocess as module

    made = await pool.create_actor(module.Popen, ["sleep", "1000"], prepare=(time.time, ()))
    return made, await made.call("__getattribute__", "pid")


async def test_worker_pool_fork_an_object_keeps_its_state_between_calls_and_shares_it_with_no_other(
    pool: LocalWorkerPool,
) -> None:
    first, second = await asyncio.gather(kept(pool, 1), kept(pool, 2))
    await first.call("append", 3)
    assert await first.call("__len__") == 2
    assert await second.call("pop") == 2
    with pytest.raises(IndexError, match="pop from an empty deque"):
        await second.call("pop")
    assert await second.call("__len__") == 0  # an error ends nothing


async def test_worker_pool_fork_one_that_cannot_be_made_says_why_and_the_next_one_can(pool: LocalWorkerPool) -> None:
    with pytest.raises(TypeError):
        await pool.create_actor(int, [], prepare=(time.time, ()))
    assert await (await kept(pool)).call("__len__") == 0
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        await pool.create_actor(int, 3, prepare=(__import__, ("nowhere",)))


async def test_worker_pool_fork_a_crash_ends_one_object_and_says_how(pool: LocalWorkerPool) -> None:
    bad = await pool.create_actor(eval, "__import__('faulthandler')", prepare=(time.time, ()))
    good = await kept(pool, 1)
    with pytest.raises(WorkerDiedError, match=r"the process \(\d+\) ended with signal SIGSEGV"):
        await bad.call("_sigsegv")
    with pytest.raises(WorkerDiedError, match="SIGSEGV"):
        await bad.call("_sigsegv")
    assert await good.call("pop") == 1


async def test_worker_pool_fork_one_that_died_between_calls_is_found_dead_by_the_next_call(
    pool: LocalWorkerPool,
) -> None:
    made = await pool.create_actor(eval, "__import__('os')", prepare=(time.time, ()))
    os.kill(await made.call("getpid"), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await made.call("getpid")
        await made.call("getpid")  # the first one may have come before its end was seen


async def test_worker_pool_fork_a_cancelled_call_ends_its_object_with_what_it_started(pool: LocalWorkerPool) -> None:
    made, child = await pid_of(pool)
    hanging = asyncio.create_task(made.call("wait"))
    other = await kept(pool, 1)
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await ended(child)
    with pytest.raises(WorkerDiedError, match="killed during a call"):
        await made.call("poll")
    assert await other.call("pop") == 1


async def test_worker_pool_fork_a_leak_meets_the_limit_of_memory_of_its_own_process(pool: LocalWorkerPool) -> None:
    leaking, good = await kept(pool, 1), await kept(pool, 1)
    for _ in range(9):
        await leaking.call("__imul__", 2)  # what it gives back is small
    with pytest.raises(MemoryError):
        await leaking.call("extend", range(10**9))
    assert await good.call("pop") == 1


async def test_worker_pool_fork_closing_one_and_closing_the_pool_leave_nothing_running() -> None:
    others = psutil.Process().children(recursive=True)
    pool = LocalWorkerPool(1)
    (first, one), (_, two) = await pid_of(pool), await pid_of(pool)
    await first.close()
    await first.close()
    await ended(one)
    assert psutil.pid_exists(two)
    own = [process for process in psutil.Process().children(recursive=True) if process not in others]
    await pool.close()
    for process in own:
        await ended(process.pid)
    await ended(two)
    with pytest.raises(WorkerDiedError, match="closed"):
        await kept(pool)


def test_worker_pool_fork_when_the_controller_is_killed_all_of_it_ends() -> None:
    script = textwrap.dedent("""
        import asyncio, subprocess, time
        from roll.cluster.pool import LocalWorkerPool
        async def main():
            made = await LocalWorkerPool(1).create_actor(subprocess.Popen, ["sleep", "1000"], prepare=(time.time, ()))
            print(await made.call("__getattribute__", "pid"), flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        child = int(controller.stdout.readline())
        processes = [child, *(p.pid for p in psutil.Process(controller.pid).children(recursive=True))]
        controller.kill()
    for process_id in processes:
        asyncio.run(ended(process_id))


async def ended(process_id: int) -> None:
    """Wait until a process is gone, or a corpse that nobody has fetched."""
    async with asyncio.timeout(20):
        while psutil.pid_exists(process_id):
            try:
                if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                    return
            except psutil.NoSuchProcess:
                return
            await asyncio.sleep(0.01)
