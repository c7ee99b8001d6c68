"""A run that starts says what it waits for."""

from __future__ import annotations

import asyncio

from roll.pipelines.start_notes import StartProgress


async def test_start_notes_what_is_still_starting_is_said_whenever_that_changes() -> None:
    said: list[str] = []
    now = 0.0
    notes = StartProgress(said.append, clock=lambda: now)
    gates = {name: asyncio.Event() for name in ("engines (vllm)", "trainer")}
    tasks = [asyncio.create_task(notes.await_start(name, gate.wait())) for name, gate in gates.items()]
    await asyncio.sleep(0)
    now = 3.0
    gates["trainer"].set()
    await tasks[1]
    gates["engines (vllm)"].set()
    await tasks[0]
    assert said == [
        "starting engines (vllm)",
        "starting engines (vllm), trainer",
        "starting engines (vllm) (trainer: 3 s)",
    ]


async def test_start_notes_a_start_that_is_cancelled_says_nothing_more() -> None:
    said: list[str] = []
    notes = StartProgress(said.append)
    tasks = [asyncio.create_task(notes.await_start(name, asyncio.Event().wait())) for name in ("engines", "trainer")]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert said == ["starting engines", "starting engines, trainer"]
