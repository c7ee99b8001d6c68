"""Roles that start at the same time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from roll.cluster.base import start_concurrently


class Role:
    """Remembers when it was closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name = name
        self._closed = closed

    async def close(self) -> None:
        self._closed.append(self.name)


def test_cluster_roles_start_at_the_same_time_and_are_closed_the_last_one_first() -> None:
    closed: list[str] = []
    second_is_there = asyncio.Event()

    async def first() -> Role:
        await second_is_there.wait()  # would wait for ever if the second started after it
        return Role("first", closed)

    async def second() -> Role:
        second_is_there.set()
        return Role("second", closed)

    async def nobody() -> None:
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            roles = await start_concurrently(stack, first(), nobody(), second())
            assert [role and role.name for role in roles] == ["first", None, "second"]
            assert closed == []

    asyncio.run(asyncio.wait_for(run(), 10))
    assert closed == ["second", "first"]


def test_cluster_what_started_is_closed_when_another_role_fails() -> None:
    closed: list[str] = []
    release = asyncio.Event()

    async def slow() -> Role:
        await release.wait()
        return Role("slow", closed)

    async def broken(message: str) -> Role:
        release.set()
        raise RuntimeError(message)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await start_concurrently(stack, broken("one"), slow(), broken("two"))

    with pytest.raises(RuntimeError, match="one"):
        asyncio.run(asyncio.wait_for(run(), 10))
    assert closed == ["slow"]


def test_cluster_what_started_is_closed_when_the_start_is_cancelled() -> None:
    closed: list[str] = []

    async def quick() -> Role:
        return Role("quick", closed)

    async def run() -> None:
        start = asyncio.current_task()

        async def slow() -> None:
            assert start is not None
            start.cancel()
            await asyncio.Event().wait()

        async with AsyncExitStack() as stack:
            await start_concurrently(stack, quick(), slow())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert closed == ["quick"]
