"""Coroutine functions for the worker pool; what they share lives in the process that runs them."""

from __future__ import annotations

import asyncio
import os
import time

__all__ = [
    "boom",
    "cancels_itself",
    "die",
    "forever",
    "late_by_itself",
    "leaves",
    "most_at_once",
    "process",
    "reward",
    "stubborn",
    "stuck",
    "stuck_below",
    "together",
]

_here: list[asyncio.Event] = []


async def together(count: int) -> int:
    """Return once so many calls wait at the same time."""
    _here.append(asyncio.Event())
    if len(_here) == count:
        for event in _here:
            event.set()
    await _here[-1].wait()
    return len(_here)


async def reward(text: str, answer: str, metadata: dict, count: int) -> float:
    return await together(count)


_running: list[str] = []
_met = asyncio.Event()


async def most_at_once(text: str, answer: str, metadata: dict, count: int) -> int:
    """How many calls ran when this one began, itself included; none ends before so many have run at the same time."""
    _running.append(text)
    running = len(_running)
    if running >= count:
        _met.set()
    await _met.wait()
    _running.pop()
    return running


async def process() -> int:
    return os.getpid()


async def forever() -> None:
    await asyncio.Event().wait()


async def stuck() -> None:
    """Keep its loop from turning, as code that forgets to await does."""
    time.sleep(1000)


async def stuck_below() -> None:
    """The same, in a task of its own."""
    await asyncio.gather(stuck(), process())


async def stubborn() -> None:
    """Wait, whoever cancels it."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def cancels_itself() -> None:
    raise asyncio.CancelledError("by a library")


async def leaves() -> None:
    raise SystemExit(3)


async def boom() -> None:
    raise ValueError("boom")


async def late_by_itself() -> None:
    raise TimeoutError("its own")


async def die() -> None:
    os._exit(3)
