"""Random schedules under virtual time: engines die, rewards fail, weights change at any moment, nothing is lost."""

from __future__ import annotations

import os

import pytest
from worlds.training import play, random_settings

NUM_SCHEDULES = int(os.environ.get("ROLL_SCHEDULES", "600"))
PARTS = 12


@pytest.mark.parametrize("part", range(PARTS))
def test_every_invariant_holds_in_random_schedules(part: int) -> None:
    for seed in range(part, NUM_SCHEDULES, PARTS):
        play(random_settings(seed))
