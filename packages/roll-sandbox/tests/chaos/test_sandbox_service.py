"""Fifty kills of a sandbox service's server, workers and database under load: nothing is doubled, nothing remains."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox import databases
from sandbox.conftest import missing
from sandbox.storm import Storm

pytestmark = [pytest.mark.asyncio, pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = 50


@pytest.mark.parametrize("kind", databases.KINDS)
async def test_sandbox_service_chaos_a_service_outlives_kills_of_all_its_parts(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
    if reason := missing("service"):
        pytest.skip(reason)
    postgres = databases.new_postgres() if kind == "postgresql" else None
    try:
        tally = await Storm(tmp_path, seed=14, postgres=postgres).run(KILLS)
    finally:
        if postgres is not None:
            postgres.close()
    print(f"{kind}: {tally}")
    assert tally.wrong == []
    assert tally.kills.total() == KILLS
    assert tally.checked > 2 * KILLS
