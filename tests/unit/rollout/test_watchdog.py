"""The watchdog names what stands still, and nothing else."""

from __future__ import annotations

import asyncio

from roll.rollout.lifecycle import LifeCycle, RolloutState
from roll.rollout.watchdog import Watchdog
from roll.simulation.clock import run

S = RolloutState


def reports_of(moves: list[tuple[float, str, RolloutState, str]], until: float, stall_s: float = 60.0) -> list[str]:
    """What is reported when these moves happen at these times, in order."""
    found: list[str] = []

    async def main() -> None:
        lifecycle = LifeCycle()
        watching = asyncio.create_task(Watchdog(lifecycle, stall_s, found.append).watch())
        for when, name, to, detail in moves:
            await asyncio.sleep(when - asyncio.get_running_loop().time())
            lifecycle.begin(name) if to is S.QUEUED else lifecycle.move(name, to, detail)
        await asyncio.sleep(until - asyncio.get_running_loop().time())
        watching.cancel()

    run(main())
    return found


def test_watchdog_stage_worker_rollouts_and_ages_are_named() -> None:
    moves = [
        (0.0, "train-0.0", S.QUEUED, ""),
        (1.0, "train-0.0", S.GENERATING, "engine-3"),
        (1.0, "train-1.0", S.QUEUED, ""),
        (2.0, "train-2.0", S.QUEUED, ""),
        (2.0, "train-2.0", S.GENERATING, "engine-1"),
        (5.0, "train-2.0", S.REWARDING, ""),
    ]
    assert reports_of(moves, until=66.0, stall_s=60.0) == [
        "no rollout has changed its state for 60 s: 1 rollouts wait for an engine: train-1.0 (64 s); "
        "1 rollouts are being generated at engine-3: train-0.0 (64 s); "
        "1 rollouts wait for their reward: train-2.0 (60 s)"
    ]


def test_watchdog_nothing_is_said_while_anything_moves() -> None:
    moves = [(float(50 * i), f"train-{i}.0", S.QUEUED, "") for i in range(10)]
    assert reports_of(moves, until=505.0) == []


def test_watchdog_reports_become_rarer_and_start_anew_after_a_move() -> None:
    moves = [(0.0, "train-0.0", S.QUEUED, ""), (500.0, "train-0.0", S.GENERATING, "e")]
    found = reports_of(moves, until=570.0)
    ages = [text.partition(":")[0].rpartition(" for ")[2] for text in found]
    assert ages == ["60 s", "120 s", "240 s", "480 s", "60 s"]


def test_watchdog_a_rollout_that_waits_for_its_group_holds_nothing_up() -> None:
    moves = [(0.0, "train-0.0", S.QUEUED, "")]
    moves += [(1.0, "train-0.0", S.GENERATING, "e"), (2.0, "train-0.0", S.REWARDING, "")]
    assert reports_of([*moves, (3.0, "train-0.0", S.ACCEPTED, "")], until=1000.0) == []


def test_watchdog_where_no_rollout_is_under_way_the_open_phase_is_named() -> None:
    found: list[str] = []

    async def main() -> None:
        began = asyncio.get_running_loop().time() + 10.0
        phases = lambda: {"sync": asyncio.get_running_loop().time() - began}  # noqa: E731
        watching = asyncio.create_task(Watchdog(LifeCycle(), 60.0, found.append, phases).watch())
        await asyncio.sleep(290)
        watching.cancel()

    run(main())
    assert found == [
        "no rollout has changed its state for 120 s: the run has been in sync for 110 s",
        "no rollout has changed its state for 180 s: the run has been in sync for 170 s",
    ]
