"""A fresh engine gets weights only while they stand still: not while an update runs, nor after one that broke off."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.engines import TickingEngine
from worlds.training import World, random_settings

from roll.config.scheduling import SchedulingConfig
from roll.errors import WeightSyncError
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout import SamplingPlan
from roll.simulation import clock
from roll.types import GenerationRequest, SamplingParams, WeightReceipt, WeightUpdate

QUIET: dict[str, Any] = {
    "deaths": 0,
    "frailty": 0.0,
    "sharing": "disaggregated",
    "num_shared": 0,
    "slow_syncs": 0.0,
    "damage": 0.0,
}


@pytest.mark.parametrize("how", ["ended", "failed", "cancelled", "cancelled before it began"])
def test_rollout_weight_sync_a_fresh_engine_waits_for_an_update_and_after_a_broken_one_for_the_next_push(
    how: str,
) -> None:
    async def main() -> list[str]:
        world = World(replace(random_settings(0), **QUIET))
        weights, told = world.weights, []
        await weights.push(0)

        async def update() -> None:
            async with weights.begin_update():
                told.append("begins")
                await asyncio.sleep(5)
                if how == "failed":
                    raise ValueError("boom")

        async def bring_up() -> None:
            await weights.push_to(world.engines.engines[0])
            told.append("brought up")

        if how == "cancelled before it began":
            async with weights._lock:  # a sync is under way
                task = asyncio.create_task(update())
                await asyncio.sleep(1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        else:
            task = asyncio.create_task(update())
            await asyncio.sleep(1)
        fresh = asyncio.create_task(bring_up())
        await asyncio.sleep(1)
        if how == "cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        told.append("is over")
        await asyncio.sleep(100)
        told.append("pushed")
        await weights.push(1)
        await fresh
        await world.engines.close()
        return told

    found: list[list[str]] = []

    async def run() -> None:
        found.append(await main())

    clock.run(run(), seed=0)
    assert found == [
        {
            "ended": ["begins", "is over", "brought up", "pushed"],
            "failed": ["begins", "is over", "pushed", "brought up"],
            "cancelled": ["begins", "is over", "pushed", "brought up"],
            "cancelled before it began": ["is over", "brought up", "pushed"],
        }[how]
    ]


def live_policy(world: World) -> ServedPolicy:
    run: Any = SimpleNamespace(
        spans=SimpleNamespace(phase=lambda name: nullcontext()), state=SimpleNamespace(policy_version=0)
    )
    generation: Any = SimpleNamespace(proxy=world.proxy, scheduler=world.scheduler, widths=None)
    plan = SamplingPlan(purpose="eval", group_size=2, sampling=SamplingParams(max_new_tokens=12))
    return ServedPolicy(run=run, generation=generation, controller=world.controller, weights=world.weights, plan=plan)


class LateEngine(TickingEngine):
    """Can take weights for longer than anybody waits; then it has neither the old nor the new ones."""

    is_late = False

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.asked: list[str] = []

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self.is_late:
            self.asked.clear()
            await asyncio.sleep(1e6)
        return await super().update_weights(update)

    async def resume(self) -> None:
        self.asked.append("resume")
        if self.is_late:
            raise WeightSyncError("e0 has no usable weights")
        await super().resume()

    async def generate(self, request: GenerationRequest) -> Any:
        self.asked.append(f"generate {request.request_id}")
        return await super().generate(request)


class LateWorld(World):
    engine_type = LateEngine


def test_rollout_weight_sync_an_engine_that_is_late_is_not_used_again_when_the_others_go_on() -> None:
    found: list[Any] = []

    async def main() -> None:
        scheduling = SchedulingConfig(async_ratio=1.0)
        quiet = {**QUIET, "num_engines": 2, "transport": "shared_memory"}
        world = LateWorld(replace(random_settings(0), scheduling=scheduling, **quiet))
        world.weights._timeout_s = 5.0
        late, _ = world.engines.engines
        live = live_policy(world)
        await live.sync()
        late.is_late = True  # type: ignore[attr-defined]
        sampling = SamplingParams(max_new_tokens=12)
        tokens = np.array([1, 2], np.int32)
        requests = [GenerationRequest(request_id=f"r{n}", token_ids=tokens, sampling=sampling) for n in range(4)]
        answers = [asyncio.create_task(world.proxy.generate(request)) for request in requests]
        await asyncio.sleep(0.1)
        live.run.state.policy_version = 1
        report = await live.sync()
        found.append((list(report.dead_engines), report.engines, {a.engine_id for a in await asyncio.gather(*answers)}))
        found.append(late.asked)  # type: ignore[attr-defined]
        await world.proxy.wait_for_replacements()
        found.append([engine.version for engine in world.engines.engines])
        await world.proxy.close()
        await world.engines.close()

    clock.run(main(), seed=0)
    assert found == [(["e0"], ("e1",), {"e1"}), [], [1, 1]]


def quiet_world() -> tuple[World, ServedPolicy]:
    """One engine, in an asynchronous run, where nothing goes wrong by itself."""
    chosen = {**QUIET, "num_engines": 1, "reward_hangs": 0.0, "lags": (0.0,)}
    world = World(replace(random_settings(0), scheduling=SchedulingConfig(async_ratio=1.0), **chosen))
    return world, live_policy(world)


def evaluating(world: World, live: ServedPolicy) -> asyncio.Task[Any]:
    live.evaluation = asyncio.create_task(world.scheduler.collect(world._draw(4, "a"), live.plan))  # type: ignore[assignment]
    return live.evaluation  # type: ignore[return-value]


def test_rollout_weight_sync_gives_up_an_evaluation_whose_engines_all_died_while_the_weights_changed() -> None:
    async def main() -> None:
        world, live = quiet_world()
        await live.sync()
        evaluation = evaluating(world, live)
        await asyncio.sleep(0.1)
        async with live.enter_training():
            world.engines.engines[0].die()  # a fresh one must wait for weights that stand still
            await asyncio.sleep(20.0)
            live.run.state.policy_version = 1
            await live.push()
        assert evaluation.cancelled() and live.evaluation is None
        await world.proxy.wait_for_replacements()
        groups = await world.scheduler.collect(world._draw(1, "a"), live.plan)
        assert [int(rollout.policy_versions[0]) for rollout in groups[0].rollouts] == [1, 1]
        await world.engines.close()

    clock.run(main(), seed=0, limit_s=10_000.0)


def test_rollout_weight_sync_live_policy_that_is_closed_twice_lets_its_evaluation_end() -> None:
    async def main() -> None:
        world, live = quiet_world()
        await live.sync()
        evaluating(world, live)
        await asyncio.sleep(6.0)
        assert len(world.scheduler.lifecycle) > 0
        await live.close()
        await live.close()
        assert len(world.scheduler.lifecycle) == 0 and not world.engines.engines[0].live
        await world.engines.close()

    clock.run(main(), seed=0, limit_s=10_000.0)
