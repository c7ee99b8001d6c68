"""Workers that hang before they read a call: a call larger than the pipe's buffer must not wait for them forever."""

from __future__ import annotations

import asyncio
import operator
import os
import signal

import pytest

from roll.cluster import pool_coroutines, pool_process
from roll.cluster.pool import LocalWorkerPool
from roll.errors import WorkerDiedError

LARGE = b"x" * 2**20
"""An argument that fits neither into the pipe nor into asyncio's buffer."""


async def echo(data: bytes) -> bytes:
    """Return the argument."""
    return data


async def test_worker_pool_a_worker_that_hangs_before_it_reads_an_image_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = LocalWorkerPool(1)
    try:
        os.kill(await pool.submit(os.getpid, time_limit_s=20), signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(pool_process, "START_TIMEOUT_S", 0.1)
            async with asyncio.timeout(20):
                with pytest.raises(WorkerDiedError, match=r"was not ready within 0\.1 s"):
                    await pool.submit(len, LARGE, time_limit_s=20)
        assert await pool.submit(len, LARGE, time_limit_s=20) == len(LARGE)
        assert pool.health()["restarts"] == 1
    finally:
        await pool.close()


async def test_worker_pool_a_coroutine_worker_that_hangs_before_it_reads_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = LocalWorkerPool(1)
    try:
        assert await pool.submit(echo, b"1", time_limit_s=20) == b"1"
        process = pool._coroutines._workers[0]._process._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(pool_coroutines, "START_TIMEOUT_S", 0.1)
            async with asyncio.timeout(20):
                with pytest.raises(WorkerDiedError, match="was not ready within"):
                    await pool.submit(echo, LARGE, time_limit_s=20)
        assert await pool.submit(echo, LARGE, time_limit_s=20) == LARGE
    finally:
        await pool.close()


async def test_worker_pool_calls_that_wait_for_a_worker_are_not_pickled_yet() -> None:
    """Hundreds of calls with videos may wait; each pickled call would be a second copy."""
    pickled: list[int] = []

    class Argument:
        def __reduce__(self) -> tuple[object, tuple[int, int]]:
            pickled.append(1)
            return operator.add, (1, 1)

    pool = LocalWorkerPool(1)
    try:
        calls = [asyncio.create_task(pool.submit(operator.pos, Argument(), time_limit_s=20)) for _ in range(4)]
        await asyncio.sleep(0)
        assert len(pickled) == 1
        assert await asyncio.gather(*calls) == [2] * 4
    finally:
        await pool.close()
