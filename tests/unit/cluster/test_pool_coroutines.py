"""Coroutine functions in the worker pool wait beside each other; one that hangs costs itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from worlds import coroutines

from roll.cluster import pool_coroutines
from roll.cluster.pool import LocalWorkerPool
from roll.errors import WorkerDiedError


@pytest.fixture
async def pool() -> AsyncIterator[LocalWorkerPool]:
    pool = LocalWorkerPool(1)
    yield pool
    await pool.close()


async def test_worker_pool_coroutine_all_calls_wait_at_the_same_time_in_one_process(pool: LocalWorkerPool) -> None:
    calls = [pool.submit(coroutines.together, 16, time_limit_s=20) for _ in range(16)]
    assert await asyncio.gather(*calls) == [16] * 16
    assert pool.health() == {"workers": 1, "busy": 0, "restarts": 0, "timeouts": 0}


async def test_worker_pool_coroutine_errors_come_back_with_their_place_and_its_own_time_out_is_an_error(
    pool: LocalWorkerPool,
) -> None:
    with pytest.raises(ValueError, match="boom") as caught:
        await pool.submit(coroutines.boom, time_limit_s=20)
    assert caught.value.__notes__[0].startswith(coroutines.__file__)
    with pytest.raises(RuntimeError, match="late_by_itself raised TimeoutError: its own"):
        await pool.submit(coroutines.late_by_itself, time_limit_s=20)


async def test_worker_pool_coroutine_a_call_over_its_time_is_cancelled_and_the_others_go_on(
    pool: LocalWorkerPool,
) -> None:
    before = await pool.submit(coroutines.process, time_limit_s=20)
    with pytest.raises(TimeoutError, match=r"forever exceeded the time limit of 0\.01 s"):
        await pool.submit(coroutines.forever, time_limit_s=0.01)
    assert await pool.submit(coroutines.process, time_limit_s=20) == before
    assert pool.health()["timeouts"] == 1


async def test_worker_pool_coroutine_a_call_that_blocks_its_loop_costs_the_process_and_no_more(
    pool: LocalWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_coroutines, "CANCEL_GRACE_S", 0.2)
    beside = asyncio.create_task(pool.submit(coroutines.forever, time_limit_s=100))
    await pool.submit(coroutines.process, time_limit_s=20)
    with pytest.raises(TimeoutError):
        await pool.submit(coroutines.stuck, time_limit_s=0.01)
    with pytest.raises(WorkerDiedError, match="another call blocked its event loop"):
        await beside
    assert await pool.submit(coroutines.process, time_limit_s=20)


@pytest.mark.parametrize("stuck", [coroutines.stuck, coroutines.stuck_below])
async def test_worker_pool_coroutine_the_call_that_blocks_the_loop_is_over_its_time_and_not_those_whose_time_ends_first(
    pool: LocalWorkerPool, monkeypatch: pytest.MonkeyPatch, stuck: Callable[[], Awaitable[None]]
) -> None:
    monkeypatch.setattr(pool_coroutines, "CANCEL_GRACE_S", 0.2)
    await pool.submit(coroutines.process, time_limit_s=20)
    innocent = [asyncio.create_task(pool.submit(coroutines.forever, time_limit_s=0.3)) for _ in range(3)]
    await asyncio.sleep(0)  # they are sent first
    guilty = asyncio.create_task(pool.submit(stuck, time_limit_s=0.5))
    ends = await asyncio.gather(*innocent, guilty, return_exceptions=True)
    assert [type(end) for end in ends] == [WorkerDiedError] * 3 + [TimeoutError]
    assert pool.health()["timeouts"] == 1


async def test_worker_pool_coroutine_a_call_that_cannot_be_cancelled_is_over_its_time_while_its_loop_turns(
    pool: LocalWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_coroutines, "CANCEL_GRACE_S", 0.2)
    await pool.submit(coroutines.process, time_limit_s=20)
    beside = asyncio.create_task(pool.submit(coroutines.forever, time_limit_s=100))
    with pytest.raises(TimeoutError):
        await pool.submit(coroutines.stubborn, time_limit_s=0.01)
    with pytest.raises(WorkerDiedError):
        await beside


async def test_worker_pool_coroutine_a_call_that_cancels_itself_has_failed_at_once(pool: LocalWorkerPool) -> None:
    with pytest.raises(RuntimeError, match="canceled itself: by a library"):
        await pool.submit(coroutines.cancels_itself, time_limit_s=1000)


async def test_worker_pool_coroutine_a_call_that_asks_its_process_to_end_costs_itself_alone(
    pool: LocalWorkerPool,
) -> None:
    before = await pool.submit(coroutines.process, time_limit_s=20)
    with pytest.raises(RuntimeError, match=r"called sys\.exit: 3"):
        await pool.submit(coroutines.leaves, time_limit_s=1000)
    assert await pool.submit(coroutines.process, time_limit_s=20) == before


async def test_worker_pool_coroutine_a_process_that_dies_is_said_and_replaced(pool: LocalWorkerPool) -> None:
    with pytest.raises(WorkerDiedError, match="ended with code 3"):
        await pool.submit(coroutines.die, time_limit_s=20)
    assert await pool.submit(coroutines.process, time_limit_s=20)
    assert pool.health()["restarts"] == 1


async def test_worker_pool_coroutine_a_caller_that_goes_away_takes_its_call_along_and_close_ends_the_rest(
    pool: LocalWorkerPool,
) -> None:
    gone = asyncio.create_task(pool.submit(coroutines.together, 2, time_limit_s=100))
    await pool.submit(coroutines.process, time_limit_s=20)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    left = asyncio.create_task(pool.submit(coroutines.forever, time_limit_s=100))
    await pool.submit(coroutines.process, time_limit_s=20)
    await pool.close()
    with pytest.raises(WorkerDiedError):
        await left
    with pytest.raises(WorkerDiedError, match="closed"):
        await pool.submit(coroutines.process, time_limit_s=20)
