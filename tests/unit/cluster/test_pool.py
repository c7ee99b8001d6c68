"""The local pool: what hangs is ended, what dies is replaced, nothing is left behind."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from roll.cluster.pool import LocalWorkerPool
from roll.errors import DataError, WorkerDiedError
from roll.protocols import WorkerPool
from roll.rewards.math import score_math


@pytest.fixture
async def pool() -> AsyncIterator[LocalWorkerPool]:
    pool = LocalWorkerPool(2)
    yield pool
    await pool.close()


async def test_worker_pool_it_is_a_worker_pool_and_runs_functions_in_other_processes(pool: LocalWorkerPool) -> None:
    assert isinstance(pool, WorkerPool)
    assert await pool.submit(operator.add, 2, 3, time_limit_s=20) == 5
    assert await pool.submit(os.getpid, time_limit_s=20) != os.getpid()
    assert pool.health() == {"workers": 2, "busy": 0, "restarts": 0, "timeouts": 0}


async def test_worker_pool_a_worker_stays_warm_between_calls(pool: LocalWorkerPool) -> None:
    pids = {await pool.submit(os.getpid, time_limit_s=20) for _ in range(5)}
    assert len(pids) == 1


async def test_worker_pool_workers_import_neither_torch_nor_transformers(pool: LocalWorkerPool) -> None:
    assert await pool.submit(score_math, "It is 7.", "7", "auto", time_limit_s=20) == (True, "correct")
    loaded = await pool.submit(eval, "sorted(__import__('sys').modules)", time_limit_s=20)
    assert "roll.rewards.math" in loaded and "math_verify" in loaded
    assert not {"torch", "transformers", "datasets", "ray", "vllm"} & set(loaded)


async def test_worker_pool_an_exception_of_the_function_comes_back_with_its_place(pool: LocalWorkerPool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        await pool.submit(eval, "1/0", time_limit_s=20)
    assert caught.value.__notes__ == ["<string>:1"]
    assert pool.health()["restarts"] == 0
    with pytest.raises(DataError, match="no brackets"):
        await pool.submit(exec, "from roll.errors import DataError\nraise DataError('no brackets')", time_limit_s=20)


async def test_worker_pool_a_function_that_asks_its_process_to_end_fails_like_any_other(pool: LocalWorkerPool) -> None:
    with pytest.raises(RuntimeError, match=r"called sys\.exit: 4") as caught:
        await pool.submit(exec, "import sys; sys.exit(4)", time_limit_s=20)
    assert caught.value.__notes__ == ["<string>:1"]
    assert pool.health()["restarts"] == 0


async def test_worker_pool_an_exception_that_cannot_travel_is_described(pool: LocalWorkerPool) -> None:
    program = "class Odd(Exception):\n def __init__(self, a, b): super().__init__(a)\nraise Odd('broken', 1)"
    with pytest.raises(RuntimeError, match="Odd: broken"):
        await pool.submit(exec, program, {}, time_limit_s=20)
    with pytest.raises(Exception, match="pickle"):
        await pool.submit(eval, "lambda: 1", time_limit_s=20)
    assert await pool.submit(operator.add, 1, 1, time_limit_s=20) == 2


async def test_worker_pool_a_timeout_that_the_function_raises_is_not_the_pools(pool: LocalWorkerPool) -> None:
    with pytest.raises(RuntimeError, match="exec raised TimeoutError: the judge's server"):
        await pool.submit(exec, 'raise TimeoutError("the judge\'s server")', time_limit_s=20)
    assert pool.health()["timeouts"] == 0


async def test_worker_pool_a_hanging_call_is_ended_and_holds_no_other_back(pool: LocalWorkerPool) -> None:
    await asyncio.gather(*(pool.submit(time.sleep, 0.2, time_limit_s=20) for _ in range(2)))  # both started
    hanging = asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=2.0))
    others = [await pool.submit(operator.mul, i, i, time_limit_s=20) for i in range(20)]
    assert others == [i * i for i in range(20)] and not hanging.done()
    with pytest.raises(TimeoutError, match="sleep exceeded the time limit of 2 s"):
        await hanging
    assert pool.health() == {"workers": 2, "busy": 0, "restarts": 1, "timeouts": 1}
    assert await asyncio.gather(*(pool.submit(operator.add, i, 1, time_limit_s=20) for i in range(9))) == [
        *range(1, 10)
    ]


async def test_worker_pool_code_that_cannot_be_interrupted_is_ended(pool: LocalWorkerPool) -> None:
    """A catastrophic pattern holds the interpreter's lock; only SIGKILL ends it."""
    with pytest.raises(TimeoutError):
        await pool.submit(exec, "import re; re.search('(a+)+$', 'a' * 60 + 'b')", {}, time_limit_s=0.5)
    assert await pool.submit(operator.add, 1, 1, time_limit_s=20) == 2


async def test_worker_pool_the_time_limit_does_not_count_starting_and_importing() -> None:
    pool = LocalWorkerPool(1)
    try:  # starting and importing math-verify takes far longer than this limit
        assert await pool.submit(score_math, "7", "7", "auto", time_limit_s=0.1) == (True, "correct")
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os._exit(3)", "code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os, sys; print('out of luck', file=sys.stderr, flush=True); os._exit(4)", "code 4: out of luck"),
    ],
)
async def test_worker_pool_a_dying_worker_is_reported_and_replaced(
    pool: LocalWorkerPool, program: str, words: str
) -> None:
    with pytest.raises(WorkerDiedError, match=words):
        await pool.submit(exec, program, {}, time_limit_s=20)
    assert await pool.submit(operator.add, 1, 1, time_limit_s=20) == 2
    assert pool.health() == {"workers": 2, "busy": 0, "restarts": 1, "timeouts": 0}


async def test_worker_pool_a_worker_that_died_while_idle_costs_no_call(pool: LocalWorkerPool) -> None:
    pid = await pool.submit(os.getpid, time_limit_s=20)
    (worker,) = [w for w in pool._workers if w._process is not None and w._process.pid == pid]
    os.kill(pid, signal.SIGKILL)
    await worker._process.wait()
    assert await pool.submit(operator.add, 1, 1, time_limit_s=20) == 2
    assert pool.health()["restarts"] == 1


async def test_worker_pool_what_a_function_prints_does_not_disturb_its_result(pool: LocalWorkerPool) -> None:
    program = "import sys, os; print('x' * 100_000); os.write(1, b'raw'); sys.stderr.write('err')"
    for _ in range(3):
        assert await pool.submit(exec, program, {}, time_limit_s=20) is None


async def test_worker_pool_large_arguments_and_results_travel(pool: LocalWorkerPool) -> None:
    text = "é" * 3_000_000
    assert await pool.submit(operator.add, text, "!", time_limit_s=60) == text + "!"


async def test_worker_pool_memory_is_limited() -> None:
    pool = LocalWorkerPool(1, memory_limit_bytes=512 * 2**20)
    try:
        with pytest.raises(MemoryError):
            await pool.submit(bytearray, 2**30, time_limit_s=20)
        assert await pool.submit(operator.add, 1, 1, time_limit_s=20) == 2
    finally:
        await pool.close()


async def test_worker_pool_a_cancelled_call_frees_its_worker() -> None:
    pool = LocalWorkerPool(1)
    try:
        pid = await pool.submit(os.getpid, time_limit_s=20)
        call = asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=1000))
        while not pool.health()["busy"]:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pool.submit(os.getpid, time_limit_s=20) != pid
    finally:
        await pool.close()


async def test_worker_pool_an_idle_worker_uses_no_cpu(pool: LocalWorkerPool) -> None:
    idle = psutil.Process(await pool.submit(os.getpid, time_limit_s=20))
    first = asyncio.create_task(pool.submit(time.sleep, 0.5, time_limit_s=20))
    second = asyncio.create_task(pool.submit(time.sleep, 0.5, time_limit_s=20))
    await asyncio.gather(first, second)
    before = sum(idle.cpu_times()[:2])
    await pool.submit(time.sleep, 0.5, time_limit_s=20)
    assert sum(idle.cpu_times()[:2]) - before <= 0.03


async def test_worker_pool_closing_ends_calls_and_every_process_also_grandchildren() -> None:
    pool = LocalWorkerPool(2)
    program = "import subprocess; subprocess.Popen(['sleep', '1000']).wait()"
    calls = [asyncio.create_task(pool.submit(exec, program, {}, time_limit_s=1000)) for _ in range(5)]
    me = psutil.Process()
    others = set(me.children(recursive=True))
    while sum(child.name() == "sleep" for child in me.children(recursive=True)) < 2:
        await asyncio.sleep(0.01)
    processes = set(me.children(recursive=True)) - others
    await pool.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, WorkerDiedError) for result in results)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    await pool.close()
    with pytest.raises(WorkerDiedError, match="closed"):
        await pool.submit(operator.add, 1, 1, time_limit_s=20)


async def test_worker_pool_closing_while_a_worker_starts_leaves_nothing() -> None:
    pool = LocalWorkerPool(3)
    before = set(psutil.Process().children(recursive=True))
    calls = [asyncio.create_task(pool.submit(os.getpid, time_limit_s=20)) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    await asyncio.gather(*calls, return_exceptions=True)
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=10)
    assert not alive


def test_worker_pool_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, os, time
        from roll.cluster.pool import LocalWorkerPool

        async def main():
            pool = LocalWorkerPool(2)
            await asyncio.gather(*(pool.submit(time.sleep, 0.2, time_limit_s=20) for _ in range(2)))
            busy = asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=1000))
            await pool.submit(os.getpid, time_limit_s=20)
            print(*(worker._process.pid for worker in pool._workers), flush=True)
            await busy

        asyncio.run(main())
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
