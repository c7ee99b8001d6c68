"""Tools that are opened at once, die, and do not close: each is let go of, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from worlds.failing import Chance, FailingPool, failing_servers

from roll.envs.hosted_tools import ToolBuilder
from roll.envs.hosting import EnvHosts
from roll.envs.process_host import PoolHost
from roll.envs.tools import ToolEnv
from roll.envs.tools.mcp import McpTools
from roll.errors import InfraError
from roll.simulation.clock import run
from roll.types import EnvironmentSettings

TRUSTED = {"runtime": "subprocess", "trust_programs": True}


@pytest.fixture
def chance() -> Iterator[Chance]:
    """Nothing fails, but what a test says."""
    chance = Chance(0, 0.0)
    with failing_servers(lambda: chance):
        yield chance


class Source:
    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem, self.closed = problem, False

    async def open(self) -> Sequence[Any]:
        return ()

    async def close(self) -> None:
        self.closed = True
        if self.problem is not None:
            raise self.problem


async def test_tool_ending_tools_behind_one_that_does_not_close_are_closed() -> None:
    sources = [Source(RuntimeError("stuck")), Source(asyncio.CancelledError()), Source()]
    env = Source()
    env.reset = env.step = None  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        await ToolEnv(env, sources).close()
    assert all(source.closed for source in (*sources, env))


def test_tool_ending_an_environment_is_closed_where_its_tools_are_closing_and_that_is_cancelled(chance: Chance) -> None:
    pool: Any = FailingPool(chance)
    hosts = EnvHosts({"pool": PoolHost(pool)}, ToolBuilder(pool))
    settings = EnvironmentSettings(name="game", host="pool", options={"n": 1}, tools={"tools": ["own.py:look"]})

    async def main() -> None:
        closing = asyncio.Event()

        async def hang() -> None:
            closing.set()
            await asyncio.Event().wait()

        async def episode() -> None:
            async with hosts.open(settings) as env:
                await env.reset(1)
                env.close = hang  # type: ignore[method-assign]

        task = asyncio.create_task(episode())
        await closing.wait()
        task.cancel()
        await asyncio.wait({task})

    run(main())
    assert chance.opened["processes"] == 2
    assert chance.open["processes"] == 1  # the tool's, whose closing is replaced here


def test_tool_ending_episodes_that_open_sandboxed_tools_at_once_share_one_manager_to_the_end(chance: Chance) -> None:
    async def main() -> None:
        pool: Any = FailingPool(chance)
        hosts = EnvHosts({"pool": PoolHost(pool)}, ToolBuilder(pool, TRUSTED))
        settings = EnvironmentSettings(name="game", host="pool", options={"n": 1}, tools={"tools": ["python"]})

        async def episode() -> str:
            async with hosts.open(settings) as env:
                await env.reset(1)
                call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
                return (await env.step(call))[0]

        said = await asyncio.gather(*(episode() for _ in range(8)))
        assert all("printed" in text for text in said)
        assert chance.open["sandboxes"] == 1
        await hosts.close()

    run(main())
    assert chance.opened["sandboxes"] == 1 and chance.open["sandboxes"] == 0


def test_tool_ending_all_who_wait_for_a_server_get_its_tools_and_a_dead_one_is_connected_anew(chance: Chance) -> None:
    async def main() -> None:
        source = McpTools(["x"])
        first, second = await asyncio.gather(source.open(), source.open())
        assert [tool.name for tool in first] == [tool.name for tool in second] == ["find"]
        source._client._dead = True
        with pytest.raises(InfraError, match="the server ended"):
            await first[0].call({"at": "1"})
        (tool,) = await source.open()
        assert await tool.call({"at": "1"}) == "found {'at': '1'}"
        await source.close()

    run(main())
    assert chance.opened["servers"] == 2 and chance.open["servers"] == 0


@pytest.mark.parametrize("hangs", ["list_tools", "__aexit__"])
def test_tool_ending_a_server_that_hangs_while_it_starts_or_is_left_costs_its_time_limit(
    chance: Chance, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    from worlds import failing

    async def hang(*_: object, **__: object) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 100:
                    raise

    monkeypatch.setattr(failing._Client, hangs, hang)

    async def main() -> float:
        source = McpTools(["x"])
        try:
            await source.open()
        except InfraError:
            assert hangs == "list_tools"
        await source.close()
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(200.0)
        return now

    assert run(main()) <= 4 + 30 + 2 * 6
