"""Random schedules in which engines of two widths use the same devices in turns: all invariants hold."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from worlds.training import Settings, World, play, random_settings

from roll.config.scheduling import SchedulingConfig
from roll.rollout import Batch
from roll.rollout.engine_widths import EngineWidths
from roll.rollout.width_rule import WidthState
from roll.simulation.clock import run

WIDTHS = {"e0": 1, "e1": 1, "e2": 2}
NUM_SCHEDULES = 120
PARTS = 2


class RandomWidths(EngineWidths):
    """A switch that chooses a random width after every batch."""

    chance: random.Random

    def on_batch(self, batch: Batch) -> None:
        super().on_batch(batch)
        kind = "long" if batch.kind == "last" else batch.kind
        self._states[kind] = WidthState(width=self.chance.choice([1, 2]))


class WidthsWorld(World):
    """A world whose engines of two widths use the same devices."""

    widths: RandomWidths

    def __post_init__(self) -> None:
        super().__post_init__()
        by_width = {width: [name for name, own in WIDTHS.items() if own == width] for width in (1, 2)}
        self.widths = RandomWidths(self.proxy, by_width, num_requests=4)
        self.widths.chance = random.Random(f"widths/{self.settings.seed}")
        self.controller.round_listener = self.widths
        is_used_by_trainer = self.engines.is_used_by_trainer
        self.engines.is_used_by_trainer = lambda name: is_used_by_trainer(name) or self.is_used_by_other_width(name)

    def is_used_by_other_width(self, engine_id: str) -> bool:
        return any(each.holds_memory and WIDTHS[each.engine_id] != WIDTHS[engine_id] for each in self.engines.all)

    async def _run_steps(self) -> None:
        await self.widths.start()
        await super()._run_steps()


def build_settings(seed: int) -> Settings:
    """A random schedule without other moves of engines, and with a sharing rule that permits several widths."""
    drawn = random_settings(seed)
    changes: dict[str, Any] = {"num_engines": 3, "num_moves": 0, "num_node_changes": 0}
    if drawn.sharing != "disaggregated":
        changes |= {"sharing": "colocated", "num_shared": 3, "streams": False}
    return replace(drawn, **changes)


@pytest.mark.parametrize("part", range(PARTS))
def test_width_schedule_every_invariant_holds_in_random_schedules(part: int) -> None:
    worlds = [play(build_settings(seed), WidthsWorld) for seed in range(part, NUM_SCHEDULES, PARTS)]
    assert sum(world.widths.num_switches for world in worlds) > NUM_SCHEDULES / PARTS  # type: ignore[attr-defined]


def test_width_schedule_a_step_that_is_canceled_in_a_switch_and_asked_for_again_keeps_its_domains() -> None:
    async def main() -> list[str]:
        world = World(Settings(seed=0, scheduling=SchedulingConfig(domain_quotas=True), batch_size=1))
        switch = asyncio.Event()

        class Listener(RandomWidths):
            def __init__(self) -> None:
                """Have no engines."""

            async def before_round(self, kind: str) -> None:
                await switch.wait()

            def on_batch(self, batch: Batch) -> None:
                """Choose nothing."""

        world.controller.round_listener = Listener()
        await world.policy.sync()
        for _ in range(3):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await world.controller.next_batch()
        switch.set()
        batch = await world.controller.next_batch()
        await world.policy.close()
        return [group.draw.prompt.domain for group in batch.groups]

    assert run(main()) == ["a"]
