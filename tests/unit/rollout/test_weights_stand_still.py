"""A fresh engine gets weights only while they stand still: not while an update runs, nor after one that broke off."""

from __future__ import annotations

import asyncio

import pytest
from worlds.training import World, random_settings

from roll.simulation import clock


@pytest.mark.parametrize("how", ["ended", "failed", "cancelled", "cancelled before it began"])
def test_a_fresh_engine_waits_for_an_update_and_after_a_broken_one_for_the_next_push(how: str) -> None:
    async def main() -> list[str]:
        world = World(random_settings(0))
        weights, told = world.weights, []
        await weights.push(0)

        async def update() -> None:
            async with weights.changing():
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
