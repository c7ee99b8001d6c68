"""What grew is told to an open page, and what telling costs is paid back by waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.dashboard.changes import CpuLimiter, stream_changes
from roll.dashboard.runs import Run
from roll.dashboard.vocabulary import Vocabularies


async def test_dashboard_watch_changes_are_told_once_for_what_grew(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.changes._POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("roll.dashboard.changes._MIN_INTERVAL_S", 0.0)
    run, owes = Run(make_run(), "demo", Vocabularies()), False
    limiter = CpuLimiter()
    monkeypatch.setattr(limiter, "is_over_budget", lambda: owes)
    events = stream_changes(run, limiter)

    async def after(step: int) -> str:
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "kind": "train"}}\n')
        return await asyncio.wait_for(anext(events), 10)

    assert await anext(events) == "retry: 2000\n\n"
    assert await after(4) == 'event: changed\ndata: {"step": 4, "kinds": ["metrics"]}\n\n'
    assert await asyncio.wait_for(anext(events), 10) == ": nothing new\n\n"
    owes = True
    assert await after(5) == ": nothing new\n\n"
    monkeypatch.setattr("roll.dashboard.changes._MAX_INTERVAL_S", 0.0)
    assert await after(6) == 'event: changed\ndata: {"step": 6, "kinds": ["metrics"]}\n\n'
    await events.aclose()


def test_dashboard_watch_time_taken_is_owed_until_its_share_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    now, taken = 0.0, 0.0
    limiter = CpuLimiter(share=0.005, clock=lambda: now, cpu_clock=lambda: taken)  # 0.01 s a second

    def owes_after(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return limiter.is_over_budget()

    assert not owes_after(1)
    taken += 0.035
    assert [owes_after(1) for _ in range(4)] == [True, True, True, False]
    taken += 0.035
    assert owes_after(600)  # a server that was suspended earned 2 s
    assert [owes_after(1) for _ in range(2)] == [True, False]
    taken += 50.0  # the first look at a long run
    assert [owes_after(1) for _ in range(22)].count(True) == 20
