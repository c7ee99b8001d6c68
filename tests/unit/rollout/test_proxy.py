"""Routing: the least loaded engine with room; sessions; pauses in the middle of an answer; a queue in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.engines import TickingEngine, TickingEngines

from roll.rollout import LLMProxy, Router
from roll.rollout.proxy import _join_generations
from roll.rollout.routing import RoutingPolicy
from roll.simulation.clock import run
from roll.types import EngineLoad, Generation, GenerationRequest, SamplingParams

NUM_TOKENS = 8


def request(name: str, *, priority: int = 0, max_new_tokens: int = NUM_TOKENS) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=5)
    return GenerationRequest(
        request_id=name, token_ids=np.array([1, 2], np.int32), sampling=sampling, priority=priority
    )


def engine(name: str, capacity: int = 4) -> TickingEngine:
    return TickingEngine(name, tick_s=1.0, capacity=capacity, length=lambda r: NUM_TOKENS - (len(r.token_ids) - 2))


async def ready(engine: Any) -> None:
    return None


def proxy_of(*engines: TickingEngine, prepare: Callable[[Any], Awaitable[object]] = ready, **settings: Any) -> LLMProxy:
    return LLMProxy(TickingEngines(engines, random.Random(0)), prepare, router=Router(**settings))  # type: ignore[arg-type]


def within(work: Coroutine[Any, Any, Any]) -> Any:
    return run(work, limit_s=1000.0)


def started(tasks: list[asyncio.Task[Generation]]) -> list[str]:
    return [task.result().engine_id for task in tasks]


def test_llm_proxy_requests_spread_over_engines_by_their_number() -> None:
    async def main() -> list[str]:
        proxy = proxy_of(engine("a"), engine("b"))
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(6)]
        await asyncio.gather(*tasks)
        return started(tasks)

    assert sorted(within(main())) == ["a", "a", "a", "b", "b", "b"]


def test_llm_proxy_a_request_waits_here_and_goes_where_a_place_becomes_free() -> None:
    async def main() -> tuple[int, str, float]:
        slow, fast = engine("slow", 1), engine("fast", 1)
        fast.tick_s = 0.1
        proxy = proxy_of(slow, fast)
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(3)]
        await asyncio.sleep(0.05)
        waiting = proxy.num_waiting
        last = await tasks[2]
        now = asyncio.get_running_loop().time()
        await asyncio.gather(*tasks)
        return waiting, last.engine_id, now

    waiting, where, when = within(main())
    assert (waiting, where) == (1, "fast")
    assert when == pytest.approx(1.6)


def test_llm_proxy_a_full_kv_cache_gets_no_further_request() -> None:
    async def main() -> tuple[int, int]:
        own = engine("a", 4)  # says that 8 requests fill its cache
        proxy = proxy_of(own, max_kv_used=0.25)
        tasks = []
        for i in range(8):
            tasks.append(asyncio.create_task(proxy.generate(request(str(i)))))
            await asyncio.sleep(0.01)
        found = proxy.num_running, proxy.num_waiting
        await asyncio.gather(*tasks)
        return found

    assert within(main()) == (3, 5)  # the third is let in at 2/8, the fourth not at 3/8


def test_llm_proxy_the_queue_is_in_order_of_priority_then_of_arrival() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        proxy = proxy_of(engine("a", 1))
        tasks = [
            asyncio.create_task(
                proxy.generate(request(name, priority=priority), on_start=lambda _, name=name: order.append(name))
            )
            for name, priority in [("first", 0), ("late", 5), ("next", 0), ("urgent", -1)]
        ]
        await asyncio.gather(*tasks)
        return order

    assert within(main()) == ["first", "urgent", "next", "late"]


def test_llm_proxy_a_session_returns_to_its_engine_unless_that_is_much_busier() -> None:
    async def main() -> tuple[str, str, str]:
        proxy = proxy_of(engine("a", 16), engine("b", 16))
        first = (await proxy.generate(request("0"), session="s")).engine_id
        others = [asyncio.create_task(proxy.generate(request(f"x{i}"))) for i in range(2)]
        await asyncio.sleep(0.5)
        again = await proxy.generate(request("1"), session="s")
        await asyncio.gather(*others)
        busy = [asyncio.create_task(proxy.generate(request(f"y{i}"), session="s", pinned=True)) for i in range(12)]
        await asyncio.sleep(0.5)
        away = await proxy.generate(request("2"), session="s")
        await asyncio.gather(*busy)
        return first, again.engine_id, away.engine_id

    first, again, away = within(main())
    assert again == first
    assert away != first


def test_llm_proxy_round_robin_deals_by_turns_whatever_the_load() -> None:
    async def main() -> list[str]:
        proxy = proxy_of(engine("a"), engine("b"), policy="round_robin")
        found = []
        for i in range(4):
            found.append((await proxy.generate(request(str(i)))).engine_id)
        return found

    assert within(main()) == ["a", "b", "a", "b"]


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_llm_proxy_an_answer_goes_on_under_new_weights(mode: str) -> None:
    async def main() -> tuple[Generation, int]:
        own = engine("a")
        proxy = proxy_of(own)
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(3.5)
        await proxy.suspend(mode)  # type: ignore[arg-type]
        own.version = 1
        await proxy.resume()
        return await task, proxy.num_continued

    generation, continued = within(main())
    expected = [0] * 8 if mode == "drain" else [0] * 3 + [1] * 5
    assert generation.policy_versions.tolist() == expected
    assert (len(generation.token_ids), generation.finish_reason) == (NUM_TOKENS, "stop")
    assert continued == (mode == "abort")


def test_llm_proxy_an_interrupted_answer_may_begin_anew_under_one_version() -> None:
    async def main() -> tuple[Generation, dict[str, int]]:
        own = engine("a")
        proxy = LLMProxy(TickingEngines([own], random.Random(0)), ready, restart_aborted=True)  # type: ignore[arg-type]
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(3.5)
        await proxy.suspend("abort")
        own.version = 1
        await proxy.resume()
        return await task, proxy.get_counters()

    generation, counts = within(main())
    assert generation.policy_versions.tolist() == [1] * NUM_TOKENS
    assert generation.finish_reason == "stop" and counts["restarted"] == 1


def test_llm_proxy_a_piece_without_tokens_does_not_say_which_experts_made_the_answer() -> None:
    def piece(made: int, experts: list[int]) -> Generation:
        return Generation(
            request_id="r",
            token_ids=np.zeros(made, np.int32),
            logprobs=np.zeros(made, np.float32),
            policy_versions=np.zeros(made, np.int32),
            finish_reason="abort",
            engine_id="a",
            experts=np.array(experts, np.int8).reshape(-1, 1, 1),
        )

    pieces = [piece(0, [1, -1]), piece(2, [2, 2, 2, -1]), piece(1, [3, 3, 3, 3, -1])]
    joined = _join_generations(request("r"), pieces)
    assert joined.experts is not None
    assert joined.experts.ravel().tolist() == [2, 2, 2, 3, -1]


def test_llm_proxy_an_aborted_request_returns_what_it_has() -> None:
    async def main() -> Generation:
        proxy = proxy_of(engine("a"))
        task = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        await proxy.abort(["r", "unknown"])
        return await task

    generation = within(main())
    assert (len(generation.token_ids), generation.finish_reason) == (2, "abort")


def test_llm_proxy_an_abort_of_a_request_whose_caller_is_gone_is_not_of_the_next_one_with_its_id() -> None:
    async def main() -> Generation:
        proxy = proxy_of(engine("a"))
        first = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        abort = asyncio.create_task(proxy.abort(["r"]))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, abort, return_exceptions=True)
        again = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.5)
        await proxy.suspend("abort")
        await proxy.resume()
        return await again

    assert len(within(main()).token_ids) == NUM_TOKENS


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.lists(st.booleans(), max_size=80),
    st.sampled_from(["", "s"]),
)
def test_llm_proxy_router_of_unequal_engines_leaves_no_slot_free_while_a_request_waits(
    policy: RoutingPolicy, capacities: list[int], moves: list[bool], session: str
) -> None:
    router = Router(policy, max_kv_used=1.0)
    for i, capacity in enumerate(capacities):
        router.add(engine(f"e{i}", capacity))  # type: ignore[arg-type]
    limits = {f"e{i}": capacity for i, capacity in enumerate(capacities)}
    loads = dict.fromkeys(limits, 0)
    for position, takes in enumerate(moves):
        busy = [name for name in loads if loads[name]]
        if takes:
            chosen = router.acquire_slot(session)
            assert (chosen is None) == all(loads[name] == limits[name] for name in loads)
            if chosen is not None:
                loads[chosen.engine_id] += 1
                if policy == "least_loaded" and not session:  # the fraction of its slots was the smallest
                    taken = loads[chosen.engine_id] - 1
                    others = [n for n in loads if n != chosen.engine_id]
                    assert all(taken * limits[n] <= loads[n] * limits[chosen.engine_id] for n in others)
        elif busy:
            router.release_slot(name := busy[position % len(busy)])
            loads[name] -= 1
        assert {name: router.count_requests(name) for name in loads} == loads


def test_llm_proxy_router_of_4_and_16_slots_dispatches_20_requests_by_share() -> None:
    router = Router(max_kv_used=1.0)
    for own in (engine("small", 4), engine("large", 16)):
        router.add(own)  # type: ignore[arg-type]
    order = [chosen.engine_id if (chosen := router.acquire_slot()) else "none" for _ in range(21)]
    assert order[20] == "none" and order.count("small") == 4 and order.count("large") == 16
    assert order[:5].count("small") == 1  # every fifth, as it has a fifth of the slots
    router.release_slot("large")
    chosen = router.acquire_slot()
    assert chosen is not None and chosen.engine_id == "large"


def test_llm_proxy_router_looks_beyond_the_least_loaded_where_their_caches_are_full() -> None:
    """Two engines run one request each and have no cache left; the third is busier and has room."""
    router = Router(max_kv_used=0.5)
    engines = [engine(name, 4) for name in "abc"]
    for own in engines:
        router.add(own)  # type: ignore[arg-type]
    for _ in range(6):
        assert router.acquire_slot()
    for name in "ab":
        router.release_slot(name)
    full = EngineLoad(num_running=1, num_waiting=0, kv_used=0.9, capacity=4)
    for own in engines[:2]:
        own.load = lambda: full  # type: ignore[method-assign]
    chosen = router.acquire_slot()
    assert chosen is not None and chosen.engine_id == "c"


def test_llm_proxy_router_keeps_a_session_at_an_engine_that_is_not_busier_for_its_slots() -> None:
    """7 of 16 slots are not more than 2 of 4."""
    router = Router(max_kv_used=1.0)
    for own in (engine("small", 4), engine("large", 16)):
        router.add(own)  # type: ignore[arg-type]
    while router.count_requests("large") < 7 or router.count_requests("small") < 2:
        assert router.acquire_slot()
    router.acquire_slot("s")
    where = router._sessions["s"]
    chosen = router.acquire_slot("s")
    assert chosen is not None and chosen.engine_id == where == "large"


@given(st.lists(st.sampled_from(["take", "give"]), max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_llm_proxy_the_heap_finds_the_least_loaded(moves: list[str], num_engines: int, capacity: int) -> None:
    router = Router(max_kv_used=1.0)
    engines = [engine(f"e{i}", capacity) for i in range(num_engines)]
    for own in engines:
        router.add(own)  # type: ignore[arg-type]
    loads = dict.fromkeys([own.engine_id for own in engines], 0)
    limit = capacity
    for position, move in enumerate(moves):
        if move == "take":
            chosen = router.acquire_slot()
            if min(loads.values()) >= limit:
                assert chosen is None
            else:
                assert chosen is not None
                assert loads[chosen.engine_id] == min(loads.values())
                loads[chosen.engine_id] += 1
        else:
            busy = [name for name, count in loads.items() if count]
            if busy:
                name = busy[position % len(busy)]
                router.release_slot(name)
                loads[name] -= 1
        assert {name: router.count_requests(name) for name in loads} == loads


class SlowToLetGo(TickingEngine):
    """Takes three seconds to abort a request."""

    async def _abort(self, request_ids: Collection[str]) -> None:
        await asyncio.sleep(3.0)
        await super()._abort(request_ids)


def test_llm_proxy_a_request_that_waits_for_an_orphan_of_its_id_does_not_go_out_while_it_is_suspended() -> None:
    """An engine that gets new weights refuses it, and that would end the run."""

    async def main() -> tuple[list[str], list[str], int]:
        own = SlowToLetGo("a", tick_s=1.0, capacity=4, length=lambda request: NUM_TOKENS)
        proxy = proxy_of(own)
        first = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(2.0)
        first.cancel()
        again = asyncio.create_task(proxy.generate(request("r")))
        await asyncio.sleep(1.0)
        await proxy.suspend("keep")
        own.num_offers += 1  # new weights come
        await asyncio.sleep(5.0)
        live = list(own.live)
        own.num_offers -= 1
        await proxy.resume()
        return own.violations, live, len((await again).token_ids)

    assert within(main()) == ([], [], NUM_TOKENS)
