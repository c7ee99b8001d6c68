"""Engines that start asleep, because they use the devices of others in turns."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from roll.cluster.engines import ManagedEngineGroup
from roll.errors import UnsupportedError


class Recorder:
    """An engine that records its calls, which take a while."""

    def __init__(self, engine_id: str, calls: list[str], can_sleep: bool = True) -> None:
        self.engine_id, self.calls, self.can_sleep = engine_id, calls, can_sleep

    async def start(self) -> None:
        self.calls.append(f"{self.engine_id} starts")
        await asyncio.sleep(0)

    async def sleep(self) -> None:
        if not self.can_sleep:
            raise UnsupportedError(f"engine {self.engine_id} cannot sleep")
        self.calls.append(f"{self.engine_id} sleeps")

    async def close(self) -> None:
        self.calls.append(f"{self.engine_id} closes")


def build(calls: list[str], names: str, **settings: Any) -> dict[str, Any]:
    return {name: partial(Recorder, name, calls, **settings) for name in names}


@pytest.mark.parametrize("concurrently", [False, True])
async def test_engine_starts_engines_sleep_before_those_with_the_same_devices_start(concurrently: bool) -> None:
    calls: list[str] = []
    group = await ManagedEngineGroup.start(build(calls, "abcd"), concurrently=concurrently, asleep=[["b", "c"], ["d"]])
    expected = ["b starts", "c starts", "b sleeps", "c sleeps", "d starts", "d sleeps", "a starts"]
    assert calls == expected
    assert [engine.engine_id for engine in group.list_awake()] == ["a"]
    assert [engine.engine_id for engine in group.engines] == ["a", "b", "c", "d"]


async def test_engine_starts_an_engine_that_cannot_sleep_ends_the_start() -> None:
    calls: list[str] = []
    with pytest.raises(UnsupportedError, match="engine b cannot sleep"):
        await ManagedEngineGroup.start(build(calls, "ab", can_sleep=False), asleep=[["b"]])
    assert calls == ["b starts", "a closes", "b closes"]
