"""The closed form equals a simulation of every token, and its parts equal numbers computed by hand."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.simulation.engine_helpers import COSTS, drive, request, timed, update_to
from unit.simulation.engine_helpers import settings as engine_settings
from unit.simulation.reference_engine import Arrival, Hold, Outcome, Reference

from roll.simulation.batch import BatchLimits, ContinuousBatch
from roll.simulation.costs import EngineCosts
from roll.simulation.engine import EngineSettings, SimulatedEngine
from roll.simulation.requests import SimulatedRequest


async def play(engine: SimulatedEngine, arrivals: list[Arrival], holds: list[Hold]) -> dict[str, Outcome]:
    """The script of `Reference`, through the engine's own interface."""
    loop = asyncio.get_running_loop()
    outcomes: dict[str, Outcome] = {}

    async def one(arrival: Arrival) -> None:
        asked = request(arrival.name, prompt=arrival.prompt, wanted=arrival.wanted, priority=arrival.priority)
        time, generation = await timed(engine, asked, arrival.time)
        outcomes[arrival.name] = Outcome(time, generation.policy_versions.tolist(), generation.finish_reason == "abort")

    async def abort(arrival: Arrival) -> None:
        if arrival.abort_at is not None:
            await asyncio.sleep(arrival.abort_at)
            await engine.abort([arrival.name])

    async def control() -> None:
        version = 0
        for hold in holds:
            await asyncio.sleep(max(0.0, hold.time - loop.time()))
            await engine.pause("keep")
            await asyncio.sleep(hold.duration)
            if hold.new_weights:
                version += 1
                await engine.update_weights(update_to(version))
            await engine.resume()

    await asyncio.gather(*map(one, arrivals), *map(abort, arrivals), control())
    return outcomes


def compare(setup: EngineSettings, arrivals: list[Arrival], holds: list[Hold]) -> Reference:
    expected = Reference(setup.costs, setup.limits, arrivals, holds)
    found = drive(lambda engine: play(engine, arrivals, holds), setup)
    assert found.keys() == expected.outcomes.keys()
    for name, outcome in expected.outcomes.items():
        assert found[name].versions == outcome.versions, name
        assert found[name].aborted == outcome.aborted, name
        assert found[name].time == pytest.approx(outcome.time, rel=1e-9, abs=1e-12), name
    return expected


# Times are odd multiples of a number that no sum of step times equals, so that no event falls on a boundary by chance.
moments = st.integers(1, 2000).map(lambda n: (2 * n + 1) * 0.000_713_377_1)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[EngineSettings, list[Arrival], list[Hold]]:
    kv = draw(st.integers(60, 400))
    limits = BatchLimits(
        max_num_seqs=draw(st.integers(1, 12)), max_batched_tokens=draw(st.integers(13, 120)), kv_capacity=kv
    )
    arrivals = []
    for number in range(draw(st.integers(1, 14))):
        prompt = draw(st.integers(1, kv // 2))
        at = draw(moments) if draw(st.booleans()) else 0.0
        arrivals.append(
            Arrival(
                name=f"r{number}",
                time=at,
                prompt=prompt,
                wanted=draw(st.integers(1, kv - prompt)),
                priority=draw(st.integers(0, 2)),
                abort_at=at + draw(moments) * 1.000_001_3 if draw(st.integers(0, 3)) == 0 else None,
            )
        )
    holds = [
        Hold(time, draw(moments) * 0.37, draw(st.booleans()))
        for time in sorted(draw(st.lists(moments.map(lambda t: t * 0.999_873), max_size=3)))
    ]
    costs = EngineCosts(
        overhead_s=0.0013,
        weights_s=draw(st.sampled_from([0.0, 0.0041])),
        token_s=draw(st.sampled_from([0.00047, 0.0021])),
        communication_s=0.000011,
        request_s=draw(st.sampled_from([0.0, 0.00009])),
        context_s=draw(st.sampled_from([0.0, 0.0000033, 0.0003])),
        pair_s=0.00000017,
    )
    return engine_settings(costs, limits), arrivals, holds


@given(scripts())
@settings(max_examples=300, deadline=None)
def test_simulation_batch_every_finish_abort_and_version_equals_the_simulation_of_every_token(script) -> None:
    compare(*script)


def test_simulation_batch_a_full_cache_preempts_and_still_equals_the_simulation_of_every_token() -> None:
    limits = BatchLimits(max_num_seqs=8, max_batched_tokens=64, kv_capacity=200)
    arrivals = [Arrival(f"r{i}", 0.0, 20, 60 + i) for i in range(8)]
    expected = compare(engine_settings(COSTS, limits), arrivals, [])
    assert expected.num_preempted > 5


def test_simulation_batch_one_request_takes_the_roofline_by_hand() -> None:
    # prefill of 10: 2 + max(4, 10 x 0.5) + 0.1 + 10^2/2 x 1e-4 ms = 7.105 ms
    # then decode steps with contexts 11, 12, 13, 14: 2 + max(4, 0.5) + 0.01 + context x 0.003 ms
    expected = 7.105 + 4 * 6.01 + 0.003 * (11 + 12 + 13 + 14)

    async def scenario(engine: SimulatedEngine) -> float:
        return (await timed(engine, request("a", prompt=10, wanted=5)))[0]

    assert drive(scenario, engine_settings(COSTS)) == pytest.approx(expected / 1000, rel=1e-12)


def test_simulation_batch_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    limits = BatchLimits(max_num_seqs=4, max_batched_tokens=100, kv_capacity=10_000)
    costs = EngineCosts(overhead_s=1.0, weights_s=0, token_s=0, communication_s=0, request_s=0, context_s=0, pair_s=0)

    async def scenario(engine: SimulatedEngine) -> list[float]:
        short = timed(engine, request("short", prompt=10, wanted=20))
        # comes during step 2 (1 … 2 s); 250 tokens in chunks of 99, 99, 52 beside the decoding one: first token at 5 s
        long = timed(engine, request("long", prompt=250, wanted=1), at=1.5)
        return [time for time, _ in await asyncio.gather(short, long)]

    assert drive(scenario, engine_settings(costs, limits)) == [20.0, 5.0]


def test_simulation_batch_lower_priority_numbers_go_first_and_equals_in_order() -> None:
    limits = BatchLimits(max_num_seqs=1, max_batched_tokens=64, kv_capacity=1000)
    arrivals = [("first", 0), ("later", 1), ("urgent", -1), ("also later", 1)]

    async def scenario(engine: SimulatedEngine) -> list[str]:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await engine.generate(request(name, wanted=3, priority=priority))
            order.append(name)

        await asyncio.gather(*(ask(*arrival) for arrival in arrivals))
        return order

    assert drive(scenario, engine_settings(limits=limits)) == ["urgent", "first", "later", "also later"]


def test_simulation_batch_work_per_request_does_not_grow_with_its_tokens() -> None:
    calls = []
    for wanted in (100, 100_000):
        batch = ContinuousBatch(COSTS, BatchLimits(max_num_seqs=8, max_batched_tokens=64, kv_capacity=10**7))
        for number in range(32):
            batch.submit(SimulatedRequest(f"r{number}", 10, wanted + number))
        now, stretches = 0.0, 0
        while (end := batch.begin(now)) is not None:
            now, stretches = end, stretches + 1
            batch.complete()
        assert batch.totals.num_generated == sum(wanted + n for n in range(32))
        calls.append(stretches)
    assert calls[0] == calls[1]


def test_simulation_batch_a_request_that_can_never_fit_is_a_mistake_of_the_caller() -> None:
    batch = ContinuousBatch(COSTS, BatchLimits(max_num_seqs=8, max_batched_tokens=64, kv_capacity=100))
    with pytest.raises(AssertionError, match="never fit"):
        batch.submit(SimulatedRequest("r", 60, 41))
