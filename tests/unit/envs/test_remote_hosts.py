"""Environments behind HTTP and in a sandbox: the same values as here, and failures that cost their own episode."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from roll.config.sandbox import SandboxConfig
from roll.envs.episode_program import serve
from roll.envs.hosting import EnvHosts
from roll.envs.http_host import HttpHost
from roll.envs.sandbox_host import SandboxHost
from roll.envs.server import serve_environments
from roll.errors import DataError, InfraError
from roll.types import EnvironmentSettings
from roll_sandbox import SandboxManager, SandboxUnavailableError
from roll_sandbox.remote.calls import call_service

OPTIONS = {"max_number": 5, "num_turns": 3}


@pytest.fixture
async def hosts() -> AsyncIterator[EnvHosts]:
    hosts = EnvHosts({"http": HttpHost()})
    yield hosts
    await hosts.close()


async def transcript(hosts: EnvHosts, settings: EnvironmentSettings) -> list[object]:
    async with hosts.open(settings) as env:
        found: list[object] = [await env.reset(7)]
        return found + [await env.step(guess) for guess in ("1", "nothing", "5")]


async def test_env_remote_hosts_a_server_plays_what_this_process_would_play(hosts: EnvHosts) -> None:
    here = await transcript(hosts, EnvironmentSettings(name="guess_number", options=OPTIONS))
    served = EnvHosts()
    async with serve_environments(served, ["guess_number"]) as url:
        there = EnvironmentSettings(name="guess_number", options=OPTIONS, host="http", url=url + "/")
        assert await transcript(hosts, there) == here
        async with hosts.open(there):
            async with asyncio.timeout(20):
                while served.num_open > 1:  # the first one's end is on its way
                    await asyncio.sleep(0)
            assert served.num_open == 1
    assert served.num_open == 0  # the server is gone, and what it played with it


async def test_env_remote_hosts_what_a_server_refuses_is_the_users_and_what_it_fails_is_ours(hosts: EnvHosts) -> None:
    async with serve_environments(EnvHosts(), ["guess_number"]) as url:
        own = EnvironmentSettings(name="os.py:System", host="http", url=url)
        with pytest.raises(DataError, match=r"environment 'os.py:System' is not served: GET /environments"):
            await transcript(hosts, own)
        wrong = EnvironmentSettings(name="guess_number", options={"colour": 1}, host="http", url=url)
        with pytest.raises(DataError, match="colour"):
            await transcript(hosts, wrong)
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/episodes/none/step", json={"action": "1"}) as response:
                assert (response.status, await response.json(content_type=None)) == (
                    404,
                    {"error": "episode none does not exist"},
                )
            async with session.post(f"{url}/episodes", data="[" * 100_000) as response:
                assert response.status == 400
    gone = EnvironmentSettings(name="guess_number", host="http", url=url)
    with pytest.raises(
        InfraError, match=r"its start failed: InfraError: the response of the server at .* cannot be read"
    ):
        await transcript(hosts, gone)


async def test_env_remote_hosts_http_hosts_and_calls_read_an_answer_that_nests_too_deeply_as_none() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text="[" * 100_000, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, host = f"http://127.0.0.1:{runner.addresses[0][1]}", HttpHost()
    with pytest.raises(InfraError, match="cannot be read: RecursionError"):
        await host.start(EnvironmentSettings(name="guess_number", host="http", url=url))
    assert (await call_service(url, "token", "GET", "/v1/sandboxes"))[
        :3
    ] == "[[["  # a text, as of anything that is no JSON
    await host.close()
    await runner.cleanup()


NUMPYS = """
    import numpy as np
    class Own:
        def reset(self, seed=None):
            return "o", {"at": np.int64(3), "where": {1, }}
        def step(self, action):
            key = (1, 2) if action == "key" else "board"
            return "o", np.float32(0.5), np.bool_(True), np.bool_(False), {key: np.zeros(2)}
    """


async def test_env_remote_hosts_values_of_numpy_reach_another_process(tmp_path: Path, hosts: EnvHosts) -> None:
    (tmp_path / "own.py").write_text(textwrap.dedent(NUMPYS))
    name = f"{tmp_path}/own.py:Own"
    begun, stepped = ["o", {"at": 3, "where": "{1}"}], ["o", 0.5, True, False, {"board": [0.0, 0.0]}]
    async with (
        serve_environments(EnvHosts(), [name]) as url,
        hosts.open(EnvironmentSettings(name=name, host="http", url=url)) as env,
    ):
        assert list(await env.reset(1)) == begun
        assert list(await env.step("a")) == stepped
        with pytest.raises(InfraError, match="the result of the environment cannot be encoded as JSON: keys must be"):
            await env.step("key")
    said: list[str] = []
    calls = [{"call": "start", "name": name, "options": {}, "wrappers": []}, {"call": "reset", "seed": 1}]
    serve([json.dumps(call) for call in [*calls, {"call": "step", "action": "a"}]], said.append)
    assert [json.loads(line)["value"] for line in said] == [None, begun, stepped]


async def test_env_remote_hosts_in_a_sandbox_an_environment_sees_nothing_of_this_machine(tmp_path: Path) -> None:
    source = """
        import os
        class Own:
            def reset(self, seed=None):
                return f"seed {seed}", {}
            def step(self, action):
                print("no reply")
                if action == "exit":
                    os._exit(3)
                return str(os.path.exists(action)), 0.5, False, False, {"state": "s"}
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(source))
    try:
        async with SandboxManager("bubblewrap", warm=0):
            pass
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    hosts = EnvHosts({"sandbox": SandboxHost(SandboxConfig())})
    settings = EnvironmentSettings(name=f"{tmp_path}/own.py:Own", host="sandbox")
    try:
        async with hosts.open(settings) as env:
            assert await env.reset(3) == ("seed 3", {})
            assert await env.step(str(tmp_path)) == ("False", 0.5, False, False, {"state": "s"})
            with pytest.raises(InfraError, match="the environment's sandbox ended: exited"):
                await env.step("exit")
    finally:
        await hosts.close()
