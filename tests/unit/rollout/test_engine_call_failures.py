"""Engines whose calls fail although they live, as those of vLLM (out of memory) and SGLang (HTTP 500) do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from worlds.engines import TickingEngine, TickingEngines, Transfer

from roll.errors import EngineDiedError, InfraError
from roll.rollout import LLMProxy
from roll.simulation.clock import run
from roll.types import GenerationRequest, SamplingParams, TensorSpec, WeightReceipt, WeightUpdate
from roll.weights.delivery import Delivery

T = TypeVar("T")
NUM_TOKENS = 8


class FailingEngine(TickingEngine):
    """An engine whose calls named in `failures` fail as often as given there."""

    failures: dict[str, int]

    async def _served(self, name: str, effect: Callable[[], Awaitable[T]]) -> T:
        if self.__dict__.setdefault("failures", {}).get(name, 0):
            self.failures[name] -= 1
            self.is_late = name != "abort"  # so that it may be replaced
            await self._alive()
            raise InfraError(f"HTTP 500 for {name}")
        return await super()._served(name, effect)


class World:
    """A proxy over engines of one token per second."""

    def __init__(self, names: str, lag: Callable[[], float] = lambda: 0.0) -> None:
        engines = [
            FailingEngine(name, tick_s=1.0, capacity=4, length=lambda request: NUM_TOKENS, lag=lag) for name in names
        ]
        self.group = TickingEngines(engines, random.Random(0))
        self.proxy = LLMProxy(self.group, self.prepare)

    def get_engine(self, name: str) -> FailingEngine:
        engine = next(engine for engine in self.group.engines if engine.engine_id == name)
        assert isinstance(engine, FailingEngine)
        return engine

    async def prepare(self, engine: Any) -> None:
        await self.sync([engine])

    async def sync(self, engines: Collection[Any]) -> list[str]:
        """Send weights to engines, and return the ids of those that have them."""
        delivery = Delivery(policy_version=1, timeout_s=300.0)
        update = WeightUpdate(policy_version=1, manifest=(), transport="simulated", handle=None)
        await delivery.deliver(list(engines), update)
        assert not delivery.errors
        for error in delivery.dead_engines.values():
            if len(engines) == 1:
                raise error
        self.proxy.start_replacing(delivery.dead_engines)
        return list(delivery.receipts)

    def request(self, number: int) -> asyncio.Task[Any]:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=5)
        tokens = np.array([1, 2], np.int32)
        return asyncio.create_task(
            self.proxy.generate(GenerationRequest(request_id=f"r{number}", token_ids=tokens, sampling=sampling))
        )

    async def share_devices(self, names: Collection[str], training_s: float = 5.0) -> None:
        """Train on the devices of some engines, then sync the weights, and let all engines generate again."""
        await self.proxy.transitions.release(names)
        await asyncio.sleep(training_s)
        await self.proxy.transitions.reacquire(names)
        await self.proxy.suspend("keep")
        synced = await self.sync(self.group.list_awake())
        await self.proxy.resume()
        await self.proxy.transitions.serve(names, synced)


def within(work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    run(work(), limit_s=100_000.0)


@pytest.mark.parametrize("call", ["sleep", "wake", "pause", "resume", "update_weights"])
def test_failing_call_of_an_engine_that_lives_leads_to_its_replacement(call: str) -> None:
    async def main() -> None:
        world = World("ab")
        requests = [world.request(number) for number in range(4)]
        await asyncio.sleep(0.5)
        failing = world.get_engine("b")
        failing.failures = {call: 1}
        await world.share_devices(["a"] if call in ("pause", "resume") else ["b"])
        assert [len(answer.token_ids) for answer in await asyncio.gather(*requests)] == [NUM_TOKENS] * 4
        await world.proxy.wait_for_replacements()
        assert world.get_engine("b") is not failing and world.proxy.num_serving_engines == 2
        assert world.proxy.num_replaced == 1
        assert not [text for engine in world.group.all for text in engine.violations]

    within(main)


def test_failing_call_to_abort_lets_the_requests_run_to_their_end() -> None:
    async def main() -> None:
        world = World("ab")
        requests = [world.request(number) for number in range(4)]
        await asyncio.sleep(0.5)
        world.get_engine("a").failures = {"abort": 1000}
        await world.proxy.abort(["r0", "r2"])
        await world.proxy.transitions.retire("a")
        answers = await asyncio.gather(*requests)
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * 4
        assert {answer.engine_id for answer in answers} == {"a", "b"} and world.proxy.num_replaced == 0

    within(main)


@pytest.mark.parametrize("seed", range(20))
def test_failing_calls_at_random_end_no_step_and_lose_no_request(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        world = World("abcd", lambda: chance.expovariate(2.0))
        requests: list[asyncio.Task[Any]] = []
        calls = ["sleep", "wake", "pause", "resume", "abort", "update_weights"]
        for _ in range(25):
            for _ in range(chance.randint(0, 6)):
                requests.append(world.request(len(requests)))
            engine = chance.choice(world.group.engines)
            if chance.random() < 0.6:
                engine.failures = {chance.choice(calls): 1}  # type: ignore[attr-defined]
            elif chance.random() < 0.2:
                engine.die()
            await asyncio.sleep(chance.uniform(0, 10))
            await world.share_devices(chance.sample("abcd", chance.randint(0, 3)), chance.uniform(0, 20))
        answers = await asyncio.gather(*requests, return_exceptions=True)
        failures = [each for each in answers if isinstance(each, BaseException)]
        assert not [each for each in failures if not isinstance(each, EngineDiedError)]
        assert len(failures) <= 0.05 * len(answers)
        await world.proxy.wait_for_replacements()
        assert world.proxy.num_serving_engines == 4

    within(main)


async def test_failing_call_of_a_weight_sync_counts_as_the_loss_of_the_engine() -> None:
    class Failing(FailingEngine):
        async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
            raise InfraError("/pause_generation took longer than 600 s")

    engine = Failing("a", tick_s=1.0, capacity=4, length=lambda request: 1)
    delivery = Delivery(policy_version=3, timeout_s=5.0)
    await delivery.deliver([engine], WeightUpdate(policy_version=3, manifest=(), transport="simulated", handle=None))
    assert not delivery.errors
    cause = delivery.dead_engines["a"].cause
    assert cause.startswith("it could not confirm policy version 3: InfraError: /pause_generation took longer than")


@pytest.mark.parametrize(("seconds", "in_time"), [(309.0, True), (311.0, False)])
def test_failing_weight_sync_is_told_from_a_slow_one_by_the_size_of_the_weights(seconds: float, in_time: bool) -> None:
    async def main() -> None:
        engine = TickingEngine(
            "a", tick_s=1.0, capacity=4, length=lambda request: 1, transfer=lambda engine_id: Transfer(seconds=seconds)
        )
        manifest = (TensorSpec(name="w", shape=(250_000_000,), dtype="float32"),)  # 1 GB, so 10 s more
        delivery = Delivery(policy_version=3, timeout_s=300.0)
        update = WeightUpdate(policy_version=3, manifest=manifest, transport="simulated", handle=None)
        await delivery.deliver([engine], update)
        assert list(delivery.receipts) == ["a"] * in_time and list(delivery.dead_engines) == ["a"] * (not in_time)

    within(main)
