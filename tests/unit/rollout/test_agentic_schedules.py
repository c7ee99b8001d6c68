"""Random schedules of episodes with tools and of agents, where all parts fail at any moment: see `worlds.agentic`."""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest
from worlds.agentic import collected, play_out

NUM_SCHEDULES = int(os.environ.get("ROLL_SCHEDULES", "24"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_rollout_agentic_schedule_what_is_trained_was_written_and_what_was_opened_is_closed(
    part: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    complaints: list[str] = []
    opened = Counter[str]()
    for seed in range(part, NUM_SCHEDULES, PARTS):
        opened += play_out(seed, complaints).faults.opened
    assert opened["processes"] and opened["agents"]
    assert not collected(complaints)
