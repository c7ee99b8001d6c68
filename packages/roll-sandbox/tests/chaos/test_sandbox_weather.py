"""A hundred schedules of a service in virtual time, where every call is slow, fails or is cancelled at random.

A minute on a machine of its own: none of them is spent waiting. `PYTHONHASHSEED=0` makes a seed that failed come again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from sandbox.weather import weather

from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SEEDS = 100


def test_sandbox_chaos_a_service_in_any_weather_doubles_loses_and_leaves_nothing_and_keeps_nobody_waiting(
    tmp_path: Path,
) -> None:
    empty = tmp_path / "empty.db"
    Service(Settings(database=f"sqlite:///{empty}", runtime=None)).store.close()
    wrong, successes = {}, 0
    for seed in range(SEEDS):
        database = tmp_path / f"{seed}.db"
        shutil.copy(empty, database)
        found = weather(seed, database)
        successes += found.successes
        if found.wrong:
            wrong[seed] = found.wrong
        database.unlink()
    assert wrong == {}
    assert successes > 10 * SEEDS
