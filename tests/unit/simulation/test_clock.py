"""Virtual time keeps asyncio's semantics, in no real time, and says why when nothing can happen any more."""

from __future__ import annotations

import asyncio
import time

import pytest

from roll.simulation.clock import DeadlockError, TimeLimitError, VirtualTimeLoop, run


def test_simulation_clock_a_day_passes_at_once_and_to_the_second() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main()) == 86_400.0
    assert time.perf_counter() - began < 5


def test_simulation_clock_timers_fire_in_the_order_of_their_moments_and_equal_ones_in_the_order_of_setting() -> None:
    fired: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(2.0, fired.append, f"two-{number}")
        loop.call_at(1.0, fired.append, "one")
        loop.call_later(3.0, fired.append, "three")
        await asyncio.sleep(4)

    run(main())
    assert fired == ["one", *(f"two-{n}" for n in range(50)), "three"]


def test_simulation_clock_a_cancelled_timer_does_not_fire_and_does_not_move_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            loop.call_at(50.0, pytest.fail).cancel()
        await asyncio.sleep(1)
        assert len(loop._timers) < 500  # cleared away, not kept until their moment
        return loop.time()

    assert run(main()) == 1.0


def test_simulation_clock_a_timeout_interrupts_at_its_moment() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(100)
        first = loop.time()
        async with asyncio.timeout(7):
            await asyncio.sleep(6)
        return first, loop.time()

    assert run(main()) == (7.0, 13.0)


def test_simulation_clock_cancellation_reaches_a_sleeping_task() -> None:
    seen: list[float] = []

    async def sleeper() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            seen.append(asyncio.get_running_loop().time())
            raise

    async def main() -> None:
        task = asyncio.create_task(sleeper())
        await asyncio.sleep(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(main())
    assert seen == [3.0]


def test_simulation_clock_wait_and_queues_work_as_on_asyncios_own_loop() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, queue, got = asyncio.get_running_loop(), asyncio.Queue[str](1), []

        async def produce() -> None:
            for name in "abc":
                await asyncio.sleep(2)
                await queue.put(name)

        async def consume() -> None:
            for _ in "abc":
                name = await queue.get()
                got.append((name, loop.time()))
                await asyncio.sleep(5)

        await asyncio.gather(produce(), consume())
        return got

    assert run(main()) == [("a", 2.0), ("b", 7.0), ("c", 12.0)]


def test_simulation_clock_settled_callbacks_run_after_everything_else_of_their_moment() -> None:
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.call_when_idle(order.append, "settled")
        for turn in range(3):
            order.append(f"turn {turn}")
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        order.append("a second later")

    run(main())
    assert order == ["turn 0", "turn 1", "turn 2", "settled", "a second later"]


def test_simulation_clock_a_deadlock_names_who_waits_and_where() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(waits_for_nobody(), name="the-lonely-one")
        await asyncio.sleep(5)
        await task

    with pytest.raises(DeadlockError, match=r"at 5 s") as caught:
        run(main(), seed=11)
    text = str(caught.value)
    assert "the-lonely-one" in text
    assert "waits_for_nobody" in text
    assert "2 tasks wait" in text
    assert any("seed 11" in note for note in caught.value.__notes__)


def test_simulation_clock_a_program_beside_an_endless_ticker_reaches_its_limit() -> None:
    async def ticks() -> None:
        while True:
            await asyncio.sleep(1)

    async def main() -> None:
        ticker = asyncio.create_task(ticks(), name="ticker")
        await asyncio.Event().wait()
        await ticker

    with pytest.raises(TimeLimitError, match=r"(?s)limit of 100 s.*ticker"):
        run(main(), limit_s=100)


def test_simulation_clock_time_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.simulation.clock.MAX_CALLBACKS_PER_INSTANT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(TimeLimitError, match="virtual time is stuck"):
        run(main())


def test_simulation_clock_threads_are_replaced_by_calls() -> None:
    async def main() -> tuple[int, float]:
        value = await asyncio.to_thread(lambda: 7)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return value, asyncio.get_running_loop().time()

    assert run(main()) == (7, 0.0)


def orders(seed: int, *, shuffle: bool) -> list[int]:
    order: list[int] = []

    async def worker(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            order.append(number)

    async def main() -> None:
        await asyncio.gather(*map(worker, range(6)))

    run(main(), seed=seed, shuffle=shuffle)
    return order


def test_simulation_clock_the_same_seed_gives_the_same_schedule_and_shuffled_seeds_differ() -> None:
    assert orders(1, shuffle=False) == orders(2, shuffle=False) == [0, 1, 2, 3, 4, 5] * 3
    assert orders(1, shuffle=True) == orders(1, shuffle=True)
    assert len({tuple(orders(seed, shuffle=True)) for seed in range(8)}) == 8


def test_simulation_clock_a_timer_that_was_due_long_ago_fires_now() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        fired = loop.create_future()
        loop.call_at(1.0, fired.set_result, None)
        await fired
        return loop.time()

    assert run(main()) == 5.0


def test_simulation_clock_a_timer_at_no_moment_is_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_at(float("nan"), print)

    with pytest.raises(ValueError, match="nan"):
        run(main())
