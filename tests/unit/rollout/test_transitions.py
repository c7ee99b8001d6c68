"""Engines that join, leave, sleep and wake while the others go on; under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from worlds.engines import Fault, TickingEngine, TickingEngines

from roll.errors import ConfigError, EngineDiedError, InfraError, NoEngineError, UnsupportedError, WeightSyncError
from roll.rollout import LLMProxy
from roll.simulation.clock import run
from roll.types import Generation, GenerationRequest, SamplingParams

NUM_TOKENS = 8


def request(name: str) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=5)
    return GenerationRequest(request_id=name, token_ids=np.array([1, 2], np.int32), sampling=sampling)


class World:
    """A proxy over engines of one token per second, and what happens to them, in order."""

    def __init__(self, *names: str, capacity: int = 4) -> None:
        self.heard: list[str] = []
        self.fails = False
        """Whether no weights can be had."""
        self.capacity = capacity
        self.group = TickingEngines([self.engine(name) for name in names], random.Random(0))
        self.proxy = LLMProxy(self.group, self.prepare)
        self.move = self.proxy.transitions

    def engine(self, name: str, fault: Fault | None = None) -> TickingEngine:
        return TickingEngine(name, tick_s=1.0, capacity=self.capacity, length=lambda r: NUM_TOKENS, fault=fault)

    async def prepare(self, engine: Any) -> None:
        if self.fails:
            raise WeightSyncError("the trainer sends nothing")
        self.heard.append(f"{engine.engine_id} gets weights")
        engine.unsynced = False

    async def release(self, *names: str) -> None:
        """Release the devices of these engines, or of all."""
        self.released = list(names) or [engine.engine_id for engine in self.group.engines]
        await self.move.release(self.released)

    async def serve(self, *synced: str) -> None:
        """Return the devices, after a weight sync of some engines."""
        await self.move.reacquire(self.released)
        self.sync(synced)
        await self.move.serve(self.released, synced)

    def sync(self, names: Collection[str]) -> None:
        """Sync the weights to the engines with these names."""
        for engine in self.group.list_awake():
            if engine.engine_id in names:
                engine.unsynced = False  # type: ignore[attr-defined]

    def ask(self, number: int) -> list[asyncio.Task[Generation]]:
        def started(engine_id: str) -> None:
            self.heard.append(engine_id)

        return [asyncio.create_task(self.proxy.generate(request(f"r{n}"), on_start=started)) for n in range(number)]

    @property
    def violations(self) -> list[str]:
        return [text for engine in self.group.all for text in engine.violations]


def within(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run(work(), limit_s=10_000.0)


def test_rollout_transition_engine_group_without_a_retired_engine_goes_on_with_its_requests() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(4)
        await asyncio.sleep(3.5)
        await world.move.retire("a")
        assert [engine.engine_id for engine in world.group.engines] == ["b"]
        assert not world.violations  # it had no requests when it ended
        answers = await asyncio.gather(*asked)
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * 4
        assert {answer.engine_id for answer in answers} == {"b"}
        assert world.proxy.num_continued == 2 and world.proxy.num_reissued == 0
        assert world.heard == ["a", "b", "a", "b", "b", "b"]
        world.heard.clear()
        await asyncio.gather(*world.ask(2))
        assert world.heard == ["b", "b"]

    within(main)


def test_rollout_transition_engine_group_lets_a_retired_engine_finish_where_it_drains() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await asyncio.sleep(0.5)
        await world.move.retire("a", "drain")
        assert world.proxy.num_continued == 0
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"a", "b"}

    within(main)


def test_rollout_transition_engine_group_that_lost_its_last_engine_waits_for_one_that_is_added() -> None:
    async def main() -> None:
        world = World("a")
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.move.retire("a")
        await asyncio.sleep(100)
        assert world.proxy.num_waiting == 2 and not world.group.engines
        world.heard.clear()
        await world.move.add("b", lambda: world.engine("b"))
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        assert world.heard == ["b gets weights", "b", "b"]  # weights come first

    within(main)


def test_rollout_transition_engine_group_is_as_before_where_an_added_engine_does_not_start() -> None:
    async def main() -> None:
        world = World("a")
        with pytest.raises(EngineDiedError):
            await world.move.add("b", lambda: world.engine("b", Fault(call="start", hangs=False)))
        assert [engine.engine_id for engine in world.group.engines] == ["a"]
        await world.move.add("b", lambda: world.engine("b"))
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a", "b"]

    within(main)


def test_rollout_transition_engine_added_while_others_are_released_serves_at_once() -> None:
    async def main() -> None:
        world = World("a")
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.release()
        await world.move.add("b", lambda: world.engine("b"))
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        await world.serve("a")
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a", "b"]
        assert world.proxy.num_serving_engines == 2


@pytest.mark.parametrize("synced", [True, False])
def test_rollout_transition_released_engine_leaves_its_requests_to_others_and_serves_with_weights(synced: bool) -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(4)
        await asyncio.sleep(3.5)
        await world.release("a")
        assert world.group.engines[0].asleep and world.proxy.num_serving_engines == 1
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        world.heard.clear()
        await world.move.reacquire(["a"])
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a", "b"]  # a weight sync includes it
        asked = world.ask(1)
        await asked[0]
        assert world.heard == ["b"]
        await world.serve(*["a"] * synced)
        world.heard.clear() if synced else world.heard.remove("b")
        await asyncio.gather(*world.ask(2))
        assert world.heard == [*["a gets weights"] * (not synced), "a", "b"]

    within(main)


def test_rollout_transition_released_engine_that_cannot_sleep_is_paused() -> None:
    async def main() -> None:
        world = World("a", "b")

        async def sleep() -> None:
            raise UnsupportedError("not here")

        world.group.engines[0].sleep = sleep  # type: ignore[method-assign]
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.release("a")
        connection = world.proxy._fleet.get_connection("a")
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        await world.proxy.suspend("keep")
        await world.proxy.resume()
        assert connection.is_paused and len(world.group.list_awake()) == 1  # a weight sync skips it
        await world.move.reacquire(["a"])
        assert len(world.group.list_awake()) == 2
        assert not connection.is_paused  # a weight sync may pause no engine, for example of a run that only evaluates
        await world.proxy.suspend("keep")
        assert connection.is_paused
        world.sync("ab")
        await world.proxy.resume()
        assert not connection.is_paused  # vLLM answers the probe of the weight sync only if it is not paused
        assert {answer.engine_id for answer in await asyncio.gather(*world.ask(2))} == {"b"}
        await world.serve("a")
        assert not connection.is_paused
        assert {answer.engine_id for answer in await asyncio.gather(*world.ask(2))} == {"a", "b"}

    within(main)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_rollout_transition_released_engine_that_hangs_is_closed_so_that_trainers_get_its_memory(when: str) -> None:
    async def main() -> None:
        world = World("a", "b")
        first, _ = world.group.engines
        if when == "before":
            first.hang()  # type: ignore[attr-defined]
        else:
            first.fault = Fault(call="sleep", hangs=True)  # type: ignore[attr-defined]
        await world.release()
        assert not any(engine.holds_memory for engine in world.group.all)
        assert [engine.engine_id for engine in world.group.all] == ["a", "b"]  # nothing was started meanwhile
        await world.serve("b")
        await world.proxy.wait_for_replacements()
        assert [engine.engine_id for engine in world.group.all] == ["a", "b", "a"]
        assert {answer.engine_id for answer in await asyncio.gather(*world.ask(2))} == {"a", "b"}

    within(main)


@pytest.mark.parametrize("until_batch", [True, False])
def test_rollout_transition_requests_do_not_wait_for_engines_that_return_after_them(until_batch: bool) -> None:
    async def main() -> None:
        world = World("a", "b")
        replace = world.group.replace

        async def fail(engine_id: str) -> Any:
            raise EngineDiedError(engine_id, "no machine")

        await world.move.release(["b"], until_batch=until_batch)
        world.group.replace = fail  # type: ignore[method-assign]
        first = world.group.engines[0]
        first.die()  # type: ignore[attr-defined]
        world.proxy.replace(first)
        asked = world.ask(1)
        await world.proxy.wait_for_replacements()
        await asyncio.sleep(1.0)
        assert asked[0].done() == until_batch
        if until_batch:
            for request in [*asked, *world.ask(1)]:
                with pytest.raises(NoEngineError, match="a failed 6 consecutive times"):
                    await request
            asked = []
        world.group.replace = replace  # type: ignore[method-assign]
        world.released = ["b"]
        await world.serve("b")
        answers = [*await asyncio.gather(*asked), *await asyncio.gather(*world.ask(1))]
        assert {answer.engine_id for answer in answers} == {"b"}

    within(main)


def test_rollout_transition_release_waits_until_a_canceled_start_has_freed_its_memory() -> None:
    async def main() -> None:
        world = World("a", "b")
        freed: list[float] = []

        async def replace(engine_id: str) -> Any:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(7.0)  # until its processes have ended
                freed.append(asyncio.get_running_loop().time())

        world.group.replace = replace  # type: ignore[method-assign]
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        await asyncio.sleep(1.0)
        await world.release()
        assert freed == [pytest.approx(1.0 + 120.0 + 7.0)] == [asyncio.get_running_loop().time()]

    within(main)


def test_rollout_transition_released_engine_that_was_suspended_with_requests_leaves_them_to_others() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.move.suspend("a", "keep")
        await world.release("a")
        assert not world.violations and world.group.engines[0].asleep
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        await world.serve("a")
        assert world.proxy.num_serving_engines == 1
        await world.move.wake("a")
        assert world.proxy.num_serving_engines == 2

    within(main)


def test_rollout_transition_release_whose_caller_is_gone_continues_and_can_be_repeated() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await given_up(world.release("a"), 0)
        await world.release("a")
        assert world.group.engines[0].asleep
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        await world.serve("a")
        assert world.proxy.num_serving_engines == 2

    within(main)


def test_rollout_transition_engine_group_of_which_one_sleeps_serves_with_the_others() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.move.sleep("a")
        first = world.group.engines[0]
        assert first.asleep and [engine.engine_id for engine in world.group.list_awake()] == ["b"]
        assert not world.violations
        assert {answer.engine_id for answer in await asyncio.gather(*asked)} == {"b"}
        world.heard.clear()
        await world.move.wake("a")
        await asyncio.gather(*world.ask(2))
        assert world.heard == ["a gets weights", "a", "b"]
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a", "b"]

    within(main)


def test_rollout_transition_engine_group_replaces_one_that_died_asleep_when_it_is_woken() -> None:
    async def main() -> None:
        world = World("a", "b")
        await world.move.sleep("a")
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        await asyncio.sleep(100)
        assert len(world.group.all) == 2  # its device is others'
        await world.move.wake("a")
        await world.proxy.wait_for_replacements()
        assert len(world.group.all) == 3
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a", "b"]
        await world.move.sleep("b")
        assert world.group._sleeping_engines == [world.group.engines[1]]  # nothing is kept of the one that died
        assert not world.violations

    within(main)


@pytest.mark.parametrize("is_away", [False, True])
def test_rollout_transition_engine_group_retires_an_engine_that_is_being_replaced(is_away: bool) -> None:
    async def main() -> None:
        world = World("a", "b")
        if is_away:
            await world.move.suspend("a", "keep")
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        await asyncio.sleep(0)
        await world.move.retire("a")
        await world.move.suspend("b", "keep")
        await world.move.wake("b")  # lets what waits be started
        await asyncio.sleep(100)
        assert [engine.engine_id for engine in world.group.engines] == ["b"]
        await asyncio.gather(*world.ask(2))
        assert "a" not in world.heard

    within(main)


def test_rollout_transition_engine_group_of_which_one_is_suspended_keeps_its_requests_there() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await asyncio.sleep(2.5)
        await world.move.suspend("a", "keep")
        world.heard.clear()
        await asyncio.gather(*world.ask(0), asked[1])
        assert not asked[0].done() and len(world.group.list_awake()) == 2  # weights still reach it
        more = [asyncio.create_task(world.proxy.generate(request("more"), on_start=world.heard.append))]
        await asyncio.sleep(1)
        assert world.heard == ["b"]
        await world.move.wake("a")
        answer = await asked[0]
        assert (answer.engine_id, len(answer.token_ids)) == ("a", NUM_TOKENS)
        await asyncio.gather(*more)

    within(main)


def test_rollout_transition_engine_group_whose_engine_cannot_sleep_lets_it_serve_again() -> None:
    async def main() -> None:
        world = World("a")

        async def sleep() -> None:
            raise UnsupportedError("not here")

        world.group.engines[0].sleep = sleep  # type: ignore[method-assign]
        with pytest.raises(UnsupportedError):
            await world.move.sleep("a")
        assert [engine.engine_id for engine in world.group.list_awake()] == ["a"]
        assert (await world.ask(1)[0]).engine_id == "a"

    within(main)


def test_rollout_transition_engine_group_of_engines_that_were_all_given_up_says_so_after_another_left() -> None:
    async def main() -> None:
        world = World("a", "b")
        world.group._fault = lambda engine_id: Fault(call="start", hangs=False)
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        await world.proxy.wait_for_replacements()
        await asyncio.gather(*world.ask(1))
        await world.move.retire("b")
        with pytest.raises(NoEngineError, match="no inference engine is left: a failed 6 consecutive times"):
            await world.ask(1)[0]
        world.group._fault = lambda engine_id: None
        await world.move.add("c", lambda: world.engine("c"))
        assert (await world.ask(1)[0]).engine_id == "c"

    within(main)


def test_rollout_transition_requests_do_not_wait_for_an_engine_that_sleeps() -> None:
    async def main() -> None:
        world = World("a", "b")
        await world.move.sleep("b")
        world.group._fault = lambda engine_id: Fault(call="start", hangs=False)
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        with pytest.raises(NoEngineError, match="no inference engine is left: a failed 6 consecutive times"):
            await world.ask(1)[0]
        await world.move.wake("b")
        assert (await world.ask(1)[0]).engine_id == "b"

    within(main)


def test_rollout_transition_engine_that_sleeps_is_not_put_to_sleep_again() -> None:
    async def main() -> None:
        world = World("a", "b")
        first = world.group.engines[0]
        await world.group.sleep(first)  # as engines that start asleep
        first.sleep = world.ask  # type: ignore[method-assign]  # may not be called
        await world.move.sleep("a")
        assert {(await each).engine_id for each in world.ask(2)} == {"b"}
        await world.move.wake("a")
        assert world.heard[-1] == "a gets weights"

    within(main)


def test_rollout_transition_engine_that_hangs_and_is_put_to_sleep_frees_its_devices() -> None:
    async def main() -> None:
        world = World("a", "b")
        first = world.group.engines[0]
        first.fault = Fault(call="sleep", hangs=True)
        await world.move.sleep("a")
        assert not first.holds_memory
        assert {(await each).engine_id for each in world.ask(2)} == {"b"}

    within(main)


async def given_up(step: Coroutine[Any, Any, None], after_s: float) -> None:
    """Cancel the caller of a step in its midst."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await step


def test_rollout_transition_engine_group_suspends_an_engine_that_is_being_replaced_also_where_the_caller_is_gone() -> (
    None
):
    async def main() -> None:
        world = World("a")
        world.group.engines[0].die()
        world.proxy.replace(world.group.engines[0])
        await asyncio.sleep(0)
        await given_up(world.move.suspend("a", "keep"), 0.01)
        await asyncio.sleep(10)
        assert world.proxy.num_serving_engines == 0  # else requests go to it and back for ever, without a pause
        asked = world.ask(1)
        await world.move.wake("a")
        assert (await asked[0]).engine_id == "a"

    within(main)


def test_rollout_transition_engine_group_steps_of_one_engine_follow_each_other_also_where_a_caller_is_gone() -> None:
    async def main() -> None:
        world = World("a", "b")
        asked = world.ask(2)
        await asyncio.sleep(0.5)
        await given_up(world.move.sleep("a", "drain"), 1.0)
        await world.move.wake("a")  # after it fell asleep
        assert world.heard == ["a", "b", "a gets weights"] and world.group.engines[0].unsynced is False
        await asyncio.gather(*asked)
        await given_up(world.move.retire("a", "drain"), 0)
        with pytest.raises(ConfigError, match="engine 'a' does not exist"):
            await world.move.wake("a")
        assert [engine.engine_id for engine in world.group.engines] == ["b"]

    within(main)


def test_rollout_transition_engine_group_moves_no_single_engine_while_trainers_have_the_memory() -> None:
    async def main() -> None:
        world = World("a", "b", "c")
        await world.move.sleep("a")
        await world.move.suspend("b", "keep")
        await world.release()
        assert [engine.asleep for engine in world.group.engines] == [True] * 3
        steps = [asyncio.create_task(step) for step in (world.move.wake("a"), world.move.wake("b"))]
        await asyncio.sleep(100)
        assert [engine.asleep for engine in world.group.engines] == [True] * 3
        await world.serve("c")  # `a` sleeps during the weight sync, and `b` dies in it
        await asyncio.gather(*steps)
        assert [engine.asleep for engine in world.group.engines] == [False] * 3
        assert sorted(world.heard) == ["a gets weights", "b gets weights"]

    within(main)


def test_rollout_transition_engine_group_whose_woken_engine_got_no_weights_sleeps_and_wakes_it_with_the_others() -> (
    None
):
    async def main() -> None:
        world = World("a", "b")
        await world.move.sleep("a")
        world.fails = True
        with pytest.raises(WeightSyncError):
            await world.move.wake("a")
        world.fails = False
        await world.release()
        assert world.group.engines[0].asleep  # it was awake, without weights
        await world.serve("b")
        await world.move.wake("a")
        assert world.heard == ["a gets weights"] and world.proxy.num_serving_engines == 2

    within(main)


def test_rollout_transition_engine_group_that_is_closed_ends_the_steps_open_phases() -> None:
    async def main() -> None:
        world = World("a")
        await world.release()
        sleeping = asyncio.create_task(world.move.sleep("a"))
        await asyncio.sleep(1)
        await world.proxy.close()
        with pytest.raises(InfraError, match="the engines were closed"):
            await sleeping
        with pytest.raises(InfraError, match="the engines were closed"):
            await world.move.retire("a")
        assert len(world.group.all) == 1

    within(main)


def test_rollout_transition_engine_group_keeps_an_engine_that_has_the_name_of_one_that_was_retired() -> None:
    async def main() -> None:
        world = World("a", "b")
        old = world.proxy._fleet.get_connection("a")
        await world.move.retire("a")
        await world.move.add("a", lambda: world.engine("a"))
        old.mark_lost(EngineDiedError("a", "a last call to it"))
        await asyncio.sleep(100)
        assert len(world.group.all) == 3 and world.proxy.num_serving_engines == 2

    within(main)


@pytest.mark.parametrize("seed", range(40))
def test_rollout_transition_engine_group_that_changes_at_random_answers_every_request_once(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        world = World("a", "b", "c", capacity=2)
        away: dict[str, str] = {}
        left: set[str] = set()
        asked: list[asyncio.Task[Generation]] = []

        async def take(step: Coroutine[Any, Any, None]) -> None:
            """With an odd seed, some callers give up."""
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.choice([0, 2, None]) if seed % 2 else None):
                    await step

        async def change(number: int) -> None:
            await asyncio.sleep(chance.uniform(0, 3))
            here = [e.engine_id for e in world.group.engines if e.engine_id not in away.keys() | left]
            kind = chance.choice(["add", "retire", "sleep", "suspend", "back", "back", "die", "share"])
            if kind == "add":
                await take(world.move.add(f"new-{number}", lambda: world.engine(f"new-{number}")))
            elif kind == "back" and away:
                name = chance.choice(sorted(away))
                await take(world.move.wake(name))
                del away[name]
            elif kind == "share":
                shared = chance.sample(here, chance.randint(0, len(here)))
                await take(world.move.release(shared))
                await world.move.release(shared)
                await asyncio.sleep(chance.uniform(0, 10))
                await world.move.reacquire(shared)
                world.sync(synced := chance.sample(shared, chance.randint(0, len(shared))))
                await world.move.serve(shared, synced)
            elif here and kind == "die":
                name = chance.choice(here)
                engine = next(e for e in world.group.engines if e.engine_id == name)
                engine.die()
                world.proxy.replace(engine)
            elif len(here) > 1 and kind == "retire":
                left.add(name := chance.choice(here))
                await take(world.move.retire(name, chance.choice(["abort", "drain"])))
            elif len(here) > 1 and kind in ("sleep", "suspend"):
                name = chance.choice(here)
                away[name] = kind
                mode = "keep" if chance.random() < 0.5 else "abort"
                await take(world.move.sleep(name) if kind == "sleep" else world.move.suspend(name, mode))

        for number in range(30):
            single = world.proxy.generate(request(f"q{number}"))
            asked.append(asyncio.create_task(single))
            await change(number)
        for name in away:
            await world.move.wake(name)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [each for each in answers if isinstance(each, BaseException)]
        assert [each for each in failed if not isinstance(each, EngineDiedError)] == []  # died under it three times
        whole = [each for each in answers if isinstance(each, Generation)]
        assert len(whole) >= 25 and all(len(each.token_ids) == NUM_TOKENS for each in whole)
        await world.proxy.wait_for_replacements()
        assert not world.violations and not world.move._steps
        assert all(engine.num_requests == 0 for engine in world.proxy._router._entries.values())

    within(main)


def test_rollout_transition_engine_that_wakes_while_all_are_paused_is_paused_with_them() -> None:
    async def main() -> None:
        world = World("a", "b")
        connection = world.proxy._fleet.get_connection("a")
        await world.move.sleep("a")
        await world.proxy.suspend("keep")
        await world.move.wake("a")
        assert connection.is_paused
        await world.proxy.resume()
        assert not connection.is_paused
        assert {answer.engine_id for answer in await asyncio.gather(*world.ask(2))} == {"a", "b"}

    within(main)


def test_rollout_transition_released_engine_whose_node_left_is_not_replaced_when_it_returns() -> None:
    async def main() -> None:
        world = World("a", "b")
        await world.release("a")
        world.move.mark_lost("a", "its node left")
        await world.serve("b")
        await world.proxy.wait_for_replacements()
        assert [engine.engine_id for engine in world.group.all] == ["a", "b"]  # none was started in its place
        await world.move.retire("a")
        assert {answer.engine_id for answer in await asyncio.gather(*world.ask(2))} == {"b"}

    within(main)
