"""What every worker pool does, wherever its workers are."""

from __future__ import annotations

import asyncio
import operator
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from roll.cluster.pool import LocalWorkerPool
from roll.errors import DataError, WorkerDiedError
from roll.protocols import WorkerPool
from roll.rewards.math import score_math


@pytest.fixture(scope="module")
def ray_here() -> Iterator[object]:
    """A private Ray cluster of this machine."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[WorkerPool]:
    if request.param == "local":
        made: WorkerPool = LocalWorkerPool(2)
    else:
        request.getfixturevalue("ray_here")
        from roll.cluster.ray_pool import RayWorkerPool

        made = RayWorkerPool(2, [{"num_cpus": 0.01}, {"num_cpus": 0.01}])
    yield made
    await made.close()


async def test_worker_pool_it_runs_functions_in_other_processes(pool: WorkerPool) -> None:
    assert isinstance(pool, WorkerPool)
    assert await pool.submit(operator.add, 2, 3, time_limit_s=60) == 5
    assert await pool.submit(os.getpid, time_limit_s=60) != os.getpid()
    assert await pool.submit(score_math, "It is 7.", "7", "auto", time_limit_s=60) == (True, "correct")
    assert pool.health() == {"workers": 2, "busy": 0, "restarts": 0, "timeouts": 0}


async def test_worker_pool_workers_compute_at_the_same_time(pool: WorkerPool, tmp_path: Path) -> None:
    """Each ends only once the other has begun."""
    here, there = (str(tmp_path / name) for name in "ab")
    meets = "import os, time\nopen({!r}, 'w').close()\nwhile not os.path.exists({!r}): time.sleep(0.005)"
    calls = (meets.format(here, there), meets.format(there, here))
    await asyncio.gather(*(pool.submit(exec, call, {}, time_limit_s=60) for call in calls))


async def test_worker_pool_errors_of_the_function_come_back_as_they_are(pool: WorkerPool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        await pool.submit(eval, "1/0", time_limit_s=60)
    assert caught.value.__notes__ == ["<string>:1"]
    with pytest.raises(DataError, match="no brackets"):
        await pool.submit(exec, "from roll.errors import DataError\nraise DataError('no brackets')", time_limit_s=60)
    with pytest.raises(RuntimeError, match="exec raised TimeoutError: of its own"):
        await pool.submit(exec, "raise TimeoutError('of its own')", time_limit_s=60)
    assert pool.health()["restarts"] == 0


async def test_worker_pool_a_hanging_call_is_ended_and_counted(pool: WorkerPool) -> None:
    with pytest.raises(TimeoutError, match=r"sleep exceeded the time limit of 0\.3 s"):
        await pool.submit(time.sleep, 1000, time_limit_s=0.3)
    assert await asyncio.gather(*(pool.submit(operator.add, i, 1, time_limit_s=60) for i in range(9))) == [
        *range(1, 10)
    ]
    assert pool.health() == {"workers": 2, "busy": 0, "restarts": 1, "timeouts": 1}


async def test_worker_pool_a_dying_worker_is_reported_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerDiedError, match="code 3"):
        await pool.submit(exec, "import os; os._exit(3)", {}, time_limit_s=60)
    assert await pool.submit(operator.add, 1, 1, time_limit_s=60) == 2
    assert pool.health()["restarts"] == 1


async def test_worker_pool_a_cancelled_call_frees_its_worker(pool: WorkerPool) -> None:
    calls = [asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=1000)) for _ in range(2)]
    while pool.health()["busy"] < 2:
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*calls, return_exceptions=True))
    assert await asyncio.gather(*(pool.submit(operator.add, i, 1, time_limit_s=60) for i in range(4))) == [1, 2, 3, 4]


async def test_worker_pool_closing_ends_calls_and_refuses_new_ones(pool: WorkerPool) -> None:
    calls = [asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=1000)) for _ in range(4)]
    while pool.health()["busy"] < 2:
        await asyncio.sleep(0)
    await pool.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, WorkerDiedError) for result in results)
    await pool.close()
    with pytest.raises(WorkerDiedError, match="closed"):
        await pool.submit(operator.add, 1, 1, time_limit_s=60)


async def test_worker_pool_a_pool_beside_it_is_one_of_its_own(pool: WorkerPool) -> None:
    own = pool.create_sub_pool(1)
    try:
        assert await own.submit(operator.add, 1, 1, time_limit_s=60) == 2
        assert own.health()["workers"] == 1
    finally:
        await own.close()
    assert await pool.submit(operator.add, 1, 1, time_limit_s=60) == 2


@pytest.mark.ray
async def test_worker_pool_a_place_that_dies_is_started_again(ray_here: object) -> None:
    import ray

    from roll.cluster.ray_pool import RayWorkerPool

    pool = RayWorkerPool(1, [{"num_cpus": 0.01}])
    try:
        assert await pool.submit(operator.add, 1, 1, time_limit_s=60) == 2
        hanging = asyncio.create_task(pool.submit(time.sleep, 1000, time_limit_s=1000))
        await asyncio.sleep(0)
        ray.kill(pool._nodes[0].actor)
        with pytest.raises(WorkerDiedError, match="actor of the worker pool died"):
            await hanging
        assert await pool.submit(operator.add, 1, 1, time_limit_s=60) == 2
        assert pool.health()["restarts"] == 1
    finally:
        await pool.close()


async def test_worker_pool_it_keeps_objects_that_are_asked_again(pool: WorkerPool) -> None:
    made = [await pool.create_actor(list, (number,), prepare=(time.time, ())) for number in (1, 2)]
    await made[0].call("append", 3)
    assert [await kept.call("pop") for kept in made] == [3, 2]
    with pytest.raises(IndexError, match="pop from empty list"):
        await made[1].call("pop")
    await made[0].close()
    with pytest.raises(WorkerDiedError, match="the actor's process was terminated"):
        await made[0].call("pop")
