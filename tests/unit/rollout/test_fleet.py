"""Engines that die, die again while they are brought up, hang, or let go slowly; under virtual time."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds.engines import Fault, TickingEngine, TickingEngines

from roll.errors import EngineDiedError, NoEngineError, WeightSyncError
from roll.rollout import LLMProxy
from roll.rollout.engine_connection import EngineConnection
from roll.rollout.fleet import EngineFleet
from roll.rollout.routing import Router
from roll.simulation.clock import run
from roll.types import GenerationRequest, SamplingParams

NUM_TOKENS = 8


def request(name: str) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=5)
    return GenerationRequest(request_id=name, token_ids=np.array([1, 2], np.int32), sampling=sampling)


def engine(name: str, *, tick_s: float = 1.0, **settings: Any) -> TickingEngine:
    return TickingEngine(name, tick_s=tick_s, capacity=4, length=lambda r: NUM_TOKENS, **settings)


async def ready(engine: Any) -> None:
    return None


def group(*engines: TickingEngine, faults: Sequence[Fault] = ()) -> TickingEngines:
    """`faults` are those of the fresh engines, in turn."""
    left = iter(faults)
    return TickingEngines(engines, random.Random(0), lambda engine_id: next(left, None))


async def release(proxy: LLMProxy) -> None:
    """Release the devices of all engines."""
    await proxy.transitions.release([engine.engine_id for engine in proxy.engines])


async def serve(proxy: LLMProxy) -> None:
    """Return the devices of all engines, and sync all engines."""
    names = [engine.engine_id for engine in proxy.engines]
    await proxy.transitions.reacquire(names)
    await proxy.transitions.serve(names, names)


def within(work: Coroutine[Any, Any, Any], limit_s: float = 10_000.0) -> Any:
    return run(work, limit_s=limit_s)


def failing(*errors: Exception | None) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Fails to prepare a fresh engine with each of these in turn, then succeeds."""
    left = list(errors)

    async def prepare(fresh: Any) -> None:
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    return prepare


DIED = EngineDiedError("a", "no machine")


@pytest.mark.parametrize("call", ["start", "prepare"])
def test_engine_fleet_an_engine_that_dies_again_while_it_is_brought_up_is_brought_up_again(call: str) -> None:
    async def main() -> tuple[int, float]:
        own = engine("a")
        faults = [Fault(call="start", hangs=False)] * 3 if call == "start" else []
        engines = group(own, faults=faults)
        prepare = failing(DIED, DIED, DIED) if call == "prepare" else ready
        proxy = LLMProxy(engines, prepare)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        own.die()
        generation = await task
        return proxy.num_replaced, float(len(generation.token_ids))

    assert within(main()) == (1, NUM_TOKENS)


def test_engine_fleet_an_engine_that_dies_asleep_is_replaced_when_the_others_wake() -> None:
    async def main() -> tuple[list[str], list[int]]:
        first, other = engine("a"), engine("b")
        engines = group(first, other)
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        await release(proxy)
        assert first.asleep and other.asleep
        first.die()
        proxy.replace(first)  # type: ignore[arg-type]
        await asyncio.sleep(100)
        counts = [len(engines.all)]
        await serve(proxy)
        await proxy.wait_for_replacements()
        assert not other.asleep
        return [e.engine_id for e in engines.all], [*counts, proxy.num_replaced]

    assert within(main()) == (["a", "b", "a"], [2, 1])


def test_engine_fleet_an_engine_that_is_being_started_serves_before_all_sleep() -> None:
    async def main() -> tuple[float, bool]:
        now = asyncio.get_running_loop().time
        own = engine("a")
        engines = group(own)

        async def prepare(fresh: Any) -> None:
            await asyncio.sleep(50)

        proxy = LLMProxy(engines, prepare)  # type: ignore[arg-type]
        own.die()
        proxy.replace(own)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await release(proxy)
        return now(), engines.engines[0].asleep and engines.engines[0] is not own

    ended, fresh_sleeps = within(main())
    assert ended >= 50 and fresh_sleeps


def test_engine_fleet_a_start_that_takes_too_long_is_postponed_until_the_others_wake() -> None:
    async def main() -> tuple[list[float], bool, bool, str]:
        now = asyncio.get_running_loop().time
        first, other = engine("a"), engine("b")
        engines = group(first, other)
        starts: list[float] = []
        replace = engines.replace

        async def replace_slowly(engine_id: str) -> Any:
            starts.append(now())
            await asyncio.sleep(200)
            return await replace(engine_id)

        engines.replace = replace_slowly  # type: ignore[method-assign]
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        first.die()
        proxy.replace(first)  # type: ignore[arg-type]
        await asyncio.sleep(10)
        await release(proxy)
        slept = now()
        await asyncio.sleep(90)
        await serve(proxy)
        generation = await proxy.generate(request("r"))
        await release(proxy)  # the second start may take twice as long
        return [slept, *starts], other.asleep, engines.engines[0].asleep, generation.engine_id

    times, other_sleeps, fresh_sleeps, served = within(main())
    assert times == [pytest.approx(10 + 120), 0, pytest.approx(10 + 120 + 90)]
    assert other_sleeps and fresh_sleeps and served == "b"


def test_engine_fleet_an_engine_that_fails_again_and_again_leaves_its_work_to_the_others() -> None:
    async def main() -> tuple[list[str], int]:
        first, other = engine("a"), engine("b")
        proxy = LLMProxy(group(first, other), failing(*[DIED] * 10))  # type: ignore[arg-type]
        first.die()
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(6)]
        found = [generation.engine_id for generation in await asyncio.gather(*tasks)]
        await proxy.wait_for_replacements()
        found.append((await proxy.generate(request("later"))).engine_id)
        return found, proxy.num_replaced

    assert within(main()) == (["b"] * 7, 0)


def test_engine_fleet_where_no_engine_is_left_everyone_who_waits_hears_why() -> None:
    async def main() -> None:
        own = engine("a")
        proxy = LLMProxy(group(own), failing(*[DIED] * 10))  # type: ignore[arg-type]
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(6)]
        await asyncio.sleep(0.5)
        own.die()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [NoEngineError] * 6
        with pytest.raises(NoEngineError, match=r"a failed 6 consecutive times; the last error: .*no machine"):
            await proxy.generate(request("later"))

    within(main())


def test_engine_fleet_an_engine_that_was_given_up_is_tried_again_when_a_weight_sync_misses_it() -> None:
    async def main() -> int:
        own = engine("a")
        proxy = LLMProxy(group(own), failing(*[DIED] * 5))  # type: ignore[arg-type]
        own.die()
        with pytest.raises(NoEngineError):
            await proxy.generate(request("r"))
        proxy.start_replacing(["a"])
        return len((await proxy.generate(request("again"))).token_ids)

    assert within(main()) == NUM_TOKENS


def test_engine_fleet_pauses_between_attempts_double_and_one_that_was_given_up_is_tried_only_once_more() -> None:
    async def main() -> list[float]:
        now = asyncio.get_running_loop().time
        own = engine("a")
        engines, failed, begun = group(own), [0.0], list[float]()
        bring_up = engines.replace

        async def noted(engine_id: str) -> TickingEngine:
            begun.append(now())
            return await bring_up(engine_id)

        async def prepare(fresh: Any) -> None:
            failed.append(now())
            raise DIED

        engines.replace = noted  # type: ignore[method-assign]
        proxy = LLMProxy(engines, prepare)  # type: ignore[arg-type]
        own.die()
        for name in ("r", "again"):
            with pytest.raises(NoEngineError):
                await proxy.generate(request(name))
            if name == "r":
                proxy.start_replacing(["a"])
        return [after - before for before, after in zip(failed, begun, strict=False)]

    # it died, and five attempts failed, which makes six; restored, it has one more, after the pause of five failures
    assert [round(pause) for pause in within(main())] == [0, 1, 2, 4, 8, 8]


def test_engine_fleet_weight_syncs_leave_out_an_engine_while_it_is_replaced() -> None:
    async def main() -> None:
        first, other = engine("a"), engine("b")
        engines = group(first, other, faults=[Fault(call="start", hangs=False)] * 9)
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        first.die()
        proxy.replace(first)
        assert [each.engine_id for each in engines.engines] == ["a", "b"]
        assert [each.engine_id for each in engines.list_awake()] == ["b"]
        await proxy.wait_for_replacements()  # it is given up
        assert [each.engine_id for each in engines.list_awake()] == ["a", "b"]  # which the next sync finds
        await engines.close()

        engines = group(first := engine("a"), engine("b"))
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        first.die()
        proxy.replace(first)
        await proxy.wait_for_replacements()
        assert [each.engine_id for each in engines.list_awake()] == ["a", "b"]

    within(main())


def test_engine_fleet_weight_syncs_leave_out_a_fresh_engine_that_got_no_weights_until_it_is_replaced() -> None:
    async def main() -> None:
        first = engine("a")
        engines = group(first, engine("b"))
        proxy = LLMProxy(engines, failing(DIED))  # type: ignore[arg-type]
        first.die()
        proxy.replace(first)
        await asyncio.sleep(5.1)  # the longest start; the next one begins a second after it
        fresh = engines.engines[0]
        assert fresh is not first and fresh not in engines.list_awake()
        await proxy.wait_for_replacements()
        assert [each.engine_id for each in engines.list_awake()] == ["a", "b"] and fresh not in engines.engines

    within(main())


def test_engine_fleet_an_engine_that_answers_between_its_deaths_is_never_given_up() -> None:
    async def main() -> int:
        engines = group(engine("a"))
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        for number in range(8):
            await proxy.generate(request(str(number)))
            engines.engines[0].die()
            proxy.start_replacing(["a"])
            await proxy.wait_for_replacements()
        return proxy.num_replaced

    assert within(main()) == 8


def test_engine_fleet_who_waits_for_all_engines_waits_for_one_that_dies_as_it_begins_to_serve() -> None:
    async def main() -> list[str]:
        changes: list[str] = []
        engines, router = group(engine("a")), Router()

        def on_change(change: str) -> None:
            changes.append(change)
            if changes.count("replaced") == 1 and change == "replaced":
                fleet.replace(engines.engines[0], "it died again")

        fleet = EngineFleet(engines, ready, router, on_change)  # type: ignore[arg-type]
        fleet.replace(engines.engines[0], "it died")
        await fleet.wait_for_replacements()
        assert [link.lost for link in fleet.serving_connections] == [None]
        return changes

    assert within(main()) == ["died", "replaced", "died", "replaced"]


def test_engine_fleet_who_finds_an_engine_dead_that_was_replaced_meanwhile_ends_no_fresh_one() -> None:
    async def main() -> list[str]:
        changes: list[str] = []
        old = engine("a")
        engines = group(old)
        fleet = EngineFleet(engines, ready, Router(), changes.append)  # type: ignore[arg-type]
        fleet.replace(old, "it got no weights")
        await fleet.wait_for_replacements()
        fleet.replace(old, "it got no weights")
        await fleet.wait_for_replacements()
        return changes

    assert within(main()) == ["died", "replaced"]


def test_engine_fleet_what_no_repetition_can_mend_ends_the_run_at_once() -> None:
    async def main() -> float:
        own, other = engine("a"), engine("b")
        proxy = LLMProxy(group(own, other), failing(WeightSyncError("tensor 'w' did not arrive")))  # type: ignore[arg-type]
        own.die()
        await asyncio.gather(proxy.generate(request("r")), proxy.generate(request("s")))
        await proxy.wait_for_replacements()
        with pytest.raises(WeightSyncError, match="tensor 'w'"):
            await proxy.generate(request("later"))
        return asyncio.get_running_loop().time()

    assert within(main()) < 60


def test_engine_fleet_nothing_is_brought_up_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        own, other = engine("a"), engine("b")
        engines = group(own, other, faults=[Fault(call="start", hangs=True)])
        proxy = LLMProxy(engines, ready)  # type: ignore[arg-type]
        own.die()
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(2)]
        await asyncio.sleep(6)
        await proxy.close()
        other.die()
        await asyncio.sleep(10_000)
        for task in tasks:
            task.cancel()
        return len(engines.all)

    assert within(main(), limit_s=20_000) == 3
    assert [record.message.partition(":")[0] for record in caplog.records] == ["inference engine 'a' died"]


# ---- engines that hang


def test_engine_fleet_a_hung_engine_is_replaced_and_its_requests_go_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> tuple[set[str], int, int, float]:
        hung, other = engine("a"), engine("b")
        proxy = LLMProxy(group(hung, other), ready)  # type: ignore[arg-type]
        await asyncio.gather(*(proxy.generate(request(f"warm-{i}")) for i in range(8)))
        await asyncio.sleep(12.0)  # its pace was seen
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(8)]
        await asyncio.sleep(2.5)
        hung.hang()
        found = await asyncio.gather(*tasks)
        assert {len(generation.token_ids) for generation in found} == {NUM_TOKENS}
        now = asyncio.get_running_loop().time()
        return {generation.engine_id for generation in found}, proxy.num_hung_engines, proxy.num_reissued, now

    engines, num_hung_engines, num_reissued, now = within(main())
    assert num_hung_engines == 1
    assert num_reissued == 4
    assert engines <= {"a", "b"} and now < 180  # two minutes of patience, and then the answers
    assert re.search(
        r"inference engine 'a' died: the engine hangs: no step for 1[23]\d s \(its slowest took 10 s\)", caplog.text
    )


def test_engine_fleet_an_engine_that_never_made_a_step_gets_ten_minutes() -> None:
    async def main() -> float:
        own = engine("a", fault=Fault(call="generate", hangs=True))
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        await proxy.generate(request("r"))
        return asyncio.get_running_loop().time()

    assert 600 < within(main()) < 630


def test_engine_fleet_a_slow_engine_does_not_hang() -> None:
    async def main() -> int:
        proxy = LLMProxy(group(engine("a", tick_s=200.0)), ready)  # type: ignore[arg-type]
        await asyncio.gather(*(proxy.generate(request(str(i))) for i in range(8)))
        return proxy.num_hung_engines

    assert within(main()) == 0


def test_engine_fleet_an_engine_that_does_not_count_its_steps_is_never_said_to_hang() -> None:
    async def main() -> int:
        own = engine("a", tick_s=200.0)
        load = own.load
        own.load = lambda: replace(load(), num_steps=None)  # type: ignore[method-assign]
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        await proxy.generate(request("r"))
        return proxy.num_hung_engines

    assert within(main()) == 0


def test_engine_fleet_a_paused_engine_does_not_hang() -> None:
    async def main() -> int:
        proxy = LLMProxy(group(engine("a")), ready)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        await proxy.suspend("keep")
        await asyncio.sleep(5000)
        await proxy.resume()
        await task
        return proxy.num_hung_engines

    assert within(main()) == 0


@pytest.mark.parametrize("call", ["abort", "pause", "resume"])
def test_engine_fleet_a_hanging_engine_does_not_block_the_others(call: str) -> None:
    async def main() -> tuple[int, int]:
        own = engine("a", fault=Fault(call=call, hangs=True))
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        gone = asyncio.create_task(proxy.generate(request("gone")))
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        gone.cancel()
        await asyncio.sleep(0)
        await proxy.wait_for_orphaned_requests()
        await proxy.suspend("keep")
        await proxy.resume()
        return proxy.num_hung_engines, len((await task).token_ids)

    assert within(main()) == (1, NUM_TOKENS)


# ---- engines that let go slowly


def slow(name: str = "a") -> TickingEngine:
    return engine(name, lag=lambda: 2.0)


def test_engine_fleet_whoever_ends_orphans_waits_for_the_aborts_that_others_began() -> None:
    async def main() -> None:
        own = slow()
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(3)
        task.cancel()
        await asyncio.sleep(0)
        first = asyncio.create_task(proxy.wait_for_orphaned_requests())
        await asyncio.sleep(0.5)
        await proxy.wait_for_orphaned_requests()
        assert not own.live
        assert first.done()

    within(main())


def test_engine_fleet_who_is_cancelled_while_orphans_end_loses_no_abort() -> None:
    async def main() -> None:
        own = slow()
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(3)
        task.cancel()
        first = asyncio.create_task(proxy.wait_for_orphaned_requests())
        await asyncio.sleep(0.5)
        first.cancel()
        await asyncio.sleep(0)
        await proxy.wait_for_orphaned_requests()
        assert not own.live
        assert asyncio.get_running_loop().time() < 8  # aborted, not finished

    within(main())


@pytest.mark.parametrize("first", ["pause", "resume"])
def test_engine_fleet_of_a_pause_and_a_resume_the_later_counts_although_the_caller_of_the_first_gave_up(
    first: str,
) -> None:
    """The engine is slow to heed the first one only."""

    async def main() -> bool:
        lags = iter([5.0])
        own = engine("a", lag=lambda: next(lags, 0.0))
        own.paused = first == "resume"
        link = EngineConnection(own, lambda lost: None)  # type: ignore[arg-type]
        calls = {"pause": lambda: link.pause("keep"), "resume": link.resume}
        given_up = asyncio.create_task(calls.pop(first)())
        await asyncio.sleep(1.0)
        given_up.cancel()
        await calls.popitem()[1]()
        await asyncio.sleep(60.0)
        return own.paused

    assert within(main()) == (first == "resume")


def test_engine_fleet_a_place_is_free_when_the_engine_has_let_go() -> None:
    async def main() -> tuple[int, float]:
        own = slow()
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(4)]
        await asyncio.sleep(3)
        tasks[0].cancel()
        last = asyncio.create_task(proxy.generate(request("last")))
        await asyncio.sleep(0.5)
        waiting = proxy.num_waiting
        while proxy.num_waiting:
            await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time()
        await asyncio.gather(*tasks[1:], last)
        return waiting, now

    waiting, now = within(main())
    assert waiting == 1
    assert now == pytest.approx(7, abs=0.2)  # there and back in 2 s each, from the third second on


def test_engine_fleet_what_the_engine_has_let_go_of_is_not_aborted_again() -> None:
    async def main() -> None:
        own, asked = slow(), list[str]()
        abort = own.abort

        async def noted(request_ids: Collection[str]) -> None:
            asked.extend(request_ids)
            await abort(request_ids)

        own.abort = noted  # type: ignore[method-assign]
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(proxy.generate(request(name))) for name in ("first", "second")]
        for task in tasks:
            await asyncio.sleep(3)
            asked.clear()
            task.cancel()
            await asyncio.sleep(0)
            await proxy.wait_for_orphaned_requests()
        assert set(asked) == {"second"}

    within(main())


def test_engine_fleet_an_abort_that_the_engine_did_not_heed_is_repeated() -> None:
    async def main() -> float:
        own, heard = engine("a", tick_s=100.0), list[Collection[str]]()
        abort = own.abort

        async def deaf_at_first(request_ids: Collection[str]) -> None:
            heard.append(request_ids)
            if len(heard) > 1:
                await abort(request_ids)

        own.abort = deaf_at_first  # type: ignore[method-assign]
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(150)
        task.cancel()
        await asyncio.sleep(0)
        await proxy.wait_for_orphaned_requests()
        return asyncio.get_running_loop().time()

    assert 150 < within(main()) < 155  # not when it would have ended by itself


def test_engine_fleet_a_request_of_the_same_name_waits_until_its_orphan_is_gone() -> None:
    async def main() -> int:
        own = slow()
        proxy = LLMProxy(group(own), ready)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(3)
        task.cancel()
        await asyncio.sleep(0)
        generation = await proxy.generate(request("r"))
        assert not own.violations
        return len(generation.token_ids)

    assert within(main()) == NUM_TOKENS
