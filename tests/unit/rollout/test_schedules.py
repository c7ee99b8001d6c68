"""Random schedules under virtual time: engines die, rewards fail, weights change at any moment, nothing is lost."""

from __future__ import annotations

import os

import pytest
from worlds.training import Settings, World, play, random_settings

from roll.config.scheduling import SchedulingConfig
from roll.errors import WeightSyncError
from roll.simulation.clock import run

NUM_SCHEDULES = int(os.environ.get("ROLL_SCHEDULES", "300"))
"""`make explore` plays 600."""
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_rollout_schedule_every_invariant_holds_in_random_schedules(part: int) -> None:
    for seed in range(part, NUM_SCHEDULES, PARTS):
        play(random_settings(seed))


def test_rollout_schedule_a_group_that_finishes_while_a_batch_is_closed_is_not_promised_to_it() -> None:
    scheduling = SchedulingConfig(
        async_ratio=3.0, stale_policy="drop", rollout_redundancy=1.5, choose="first_finished", domain_quotas=True
    )
    settings = Settings(
        seed=1125,
        scheduling=scheduling,
        group_size=3,
        num_steps=3,
        num_engines=3,
        capacity=4,
        lags=(0.5, 4.0),
        deaths=1,
        sharing="elastic_overlap",
        num_shared=2,
        streams=True,
    )
    assert play(settings).num_certain


def test_rollout_schedule_engines_stand_still_after_a_weight_sync_that_broke_off() -> None:
    async def main() -> list[bool]:
        world = World(Settings(seed=0, scheduling=SchedulingConfig(async_ratio=1.0)))
        with pytest.raises(WeightSyncError):
            async with world.controller.pause_for_update():
                raise WeightSyncError("half of the tensors arrived")
        return [engine.paused for engine in world.engines.engines]

    assert run(main()) == [True, True]
