"""The simulated engine keeps the protocol's promises: aborts, pauses, weights, deaths."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from unit.simulation.engine_helpers import STEADY, drive, request, settings, timed, update_to

from roll.errors import EngineDiedError, UserError, WeightSyncError
from roll.protocols import InferenceEngine
from roll.simulation.batch import BatchLimits
from roll.simulation.engine import SimulatedEngine

ONE_SLOT = BatchLimits(max_num_seqs=1, max_batched_tokens=64, kv_capacity=1000)
now = lambda: asyncio.get_running_loop().time()  # noqa: E731


def test_simulation_engine_it_is_an_inference_engine() -> None:
    async def scenario(engine: SimulatedEngine) -> bool:
        return isinstance(engine, InferenceEngine)

    assert drive(scenario)


def test_simulation_engine_an_answer_has_the_tokens_that_were_foretold_and_is_cut_off_at_the_limit() -> None:
    async def scenario(engine: SimulatedEngine):
        return await asyncio.gather(
            engine.generate(request("whole", wanted=7, limit=7)), engine.generate(request("cut", wanted=8, limit=7))
        )

    whole, cut = drive(scenario)
    assert (len(whole.token_ids), whole.finish_reason) == (7, "stop")
    assert (len(cut.token_ids), cut.finish_reason) == (7, "length")
    assert whole.token_ids.dtype == whole.policy_versions.dtype == np.int32
    assert whole.logprobs.shape == whole.policy_versions.shape == (7,)


def test_simulation_engine_an_abort_returns_the_tokens_of_finished_steps_and_frees_the_slot_at_the_boundary() -> None:
    async def scenario(engine: SimulatedEngine):
        first = asyncio.create_task(timed(engine, request("first", wanted=100)))
        second = asyncio.create_task(timed(engine, request("second", wanted=2), at=0.001))
        await asyncio.sleep(0.035)  # three steps of 10 ms are done, the fourth is half done
        await engine.abort(["first", "unknown"])
        return await first, await second

    (aborted_at, aborted), (done_at, done) = drive(scenario, settings(limits=ONE_SLOT))
    assert (aborted_at, len(aborted.token_ids), aborted.finish_reason) == (0.035, 3, "abort")
    assert done_at == pytest.approx(0.04 + 0.02)
    assert done.finish_reason == "stop"


def test_simulation_engine_a_cancelled_caller_frees_its_slot() -> None:
    async def scenario(engine: SimulatedEngine) -> float:
        first = asyncio.create_task(engine.generate(request("first", wanted=900)))
        second = asyncio.create_task(timed(engine, request("second", wanted=1)))
        await asyncio.sleep(0.015)
        first.cancel()
        return (await second)[0]

    assert drive(scenario, settings(limits=ONE_SLOT)) == pytest.approx(0.02 + 0.01)


def test_simulation_engine_pause_keep_freezes_and_continues_where_it_was() -> None:
    async def scenario(engine: SimulatedEngine):
        answer = asyncio.create_task(timed(engine, request("a", wanted=10)))
        await asyncio.sleep(0.044)
        await engine.pause("keep")
        rested = now()
        await asyncio.sleep(5)
        assert engine.load().num_running == 1
        await engine.resume()
        return rested, await answer

    rested, (done_at, _) = drive(scenario)
    assert rested == pytest.approx(0.05)
    assert done_at == pytest.approx(5.05 + 0.05)


def test_simulation_engine_pause_abort_ends_all_and_later_requests_wait() -> None:
    async def scenario(engine: SimulatedEngine):
        old = [asyncio.create_task(timed(engine, request(f"old{i}", wanted=50))) for i in range(3)]
        await asyncio.sleep(0.105)
        await engine.pause("abort")
        new = asyncio.create_task(timed(engine, request("new", wanted=1)))
        await asyncio.sleep(3)
        await engine.resume()
        return [await task for task in old], await new

    old, (new_at, _) = drive(scenario)
    assert [(time, len(g.token_ids), g.finish_reason) for time, g in old] == [(0.105, 10, "abort")] * 3
    assert new_at == pytest.approx(0.11 + 3 + 0.01)


def test_simulation_engine_pause_drain_finishes_what_came_before_and_holds_what_comes_after() -> None:
    async def scenario(engine: SimulatedEngine):
        before = asyncio.create_task(timed(engine, request("before", wanted=20)))
        after = asyncio.create_task(timed(engine, request("after", wanted=1), at=0.1))
        await asyncio.sleep(0.05)
        await engine.pause("drain")
        drained = now()
        await asyncio.sleep(1)
        await engine.resume()
        return drained, (await before)[0], (await after)[0]

    assert drive(scenario) == pytest.approx((0.2, 0.2, 1.2 + 0.01))


@pytest.mark.parametrize("recompute", [True, False])
def test_simulation_engine_new_weights_come_between_two_steps_and_every_token_knows_its_version(
    recompute: bool,
) -> None:
    async def scenario(engine: SimulatedEngine):
        answer = asyncio.create_task(timed(engine, request("a", wanted=6)))
        await asyncio.sleep(0.025)
        receipt = await engine.update_weights(update_to(4))
        assert (receipt.policy_version, now()) == (4, pytest.approx(1.03))
        return await answer

    time, generation = drive(scenario, settings(update_s=1.0, recompute=recompute))
    assert generation.policy_versions.tolist() == [0, 0, 0, 4, 4, 4]
    assert time == pytest.approx(1.03 + 0.03)  # prefilling again gives a token, as decoding would


def test_simulation_engine_recomputing_costs_a_prefill() -> None:
    async def scenario(engine: SimulatedEngine):
        answer = asyncio.create_task(engine.generate(request("a", prompt=100, wanted=40)))
        await asyncio.sleep(0.2)
        await engine.update_weights(update_to(1))
        await answer
        return engine.totals.num_prefilled, engine.totals.num_generated

    assert drive(scenario, settings(recompute=False)) == (100, 40)
    assert drive(scenario, settings(recompute=True)) == (100 + 100 + 20, 40)


def test_simulation_engine_death_reaches_every_waiting_request_and_every_later_one() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        answers = [asyncio.create_task(engine.generate(request(f"r{i}", wanted=50))) for i in range(3)]
        await asyncio.sleep(0.1)
        engine.die("the power failed")
        for answer in answers:
            with pytest.raises(EngineDiedError, match="'engine-0' died: the power failed"):
                await answer
        for call in (engine.generate(request("late")), engine.abort(["r0"]), engine.pause("keep"), engine.resume()):
            with pytest.raises(EngineDiedError):
                await call

    drive(scenario)


def test_simulation_engine_death_during_a_sync_and_a_pause_reaches_their_callers() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        answer = asyncio.create_task(engine.generate(request("a", wanted=50)))
        await asyncio.sleep(0.011)
        sync = asyncio.create_task(engine.update_weights(update_to(1)))
        await asyncio.sleep(0.5)
        engine.die("gone")
        for waiting in (sync, answer):
            with pytest.raises(EngineDiedError):
                await waiting

    drive(scenario, settings(update_s=1.0))


def test_simulation_engine_a_stall_delays_the_next_step_by_its_length() -> None:
    async def scenario(engine: SimulatedEngine) -> float:
        answer = asyncio.create_task(timed(engine, request("a", wanted=10)))
        await asyncio.sleep(0.045)
        engine.stall(2.0)  # the step under way ends at 0.05, the next begins at 2.045
        return (await answer)[0]

    assert drive(scenario) == pytest.approx(2.045 + 0.05)


def test_simulation_engine_load_tells_of_the_moment() -> None:
    async def scenario(engine: SimulatedEngine):
        tasks = [asyncio.create_task(engine.generate(request(f"r{i}", prompt=90, wanted=50))) for i in range(2)]
        await asyncio.sleep(0.105)
        load = engine.load()
        await asyncio.gather(*tasks)
        return load, engine.load()

    limits = BatchLimits(max_num_seqs=1, max_batched_tokens=200, kv_capacity=1000)
    busy, idle = drive(scenario, settings(limits=limits))
    assert (busy.num_running, busy.num_waiting, busy.capacity) == (1, 1, 1)
    assert busy.kv_used == pytest.approx((90 + 10) / 1000)
    assert (idle.num_running, idle.num_waiting, idle.kv_used) == (0, 0, 0.0)


def test_simulation_engine_what_can_never_fit_and_an_id_in_use_are_refused() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        with pytest.raises(UserError, match=r"requires 1,001 tokens of KV cache, but engine engine-0 has 1,000:"):
            await engine.generate(request("big", prompt=900, wanted=101))
        task = asyncio.create_task(engine.generate(request("same")))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="id same is already in use"):
            await engine.generate(request("same"))
        await task

    drive(scenario, settings(limits=ONE_SLOT))


def test_simulation_engine_an_engine_that_woke_up_serves_only_after_a_sync() -> None:
    async def scenario(engine: SimulatedEngine) -> str:
        await engine.sleep()
        await engine.wake()
        with pytest.raises(WeightSyncError, match="woke up"):
            await engine.generate(request("a"))
        await engine.update_weights(update_to(2))
        return (await engine.generate(request("a"))).finish_reason

    assert drive(scenario, settings(STEADY)) == "stop"
