"""`roll reward serve`: the results of a local run, limits, errors in the results, and the end of the service."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import TypeAdapter

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RemoteReward, RewardConfig, RewardList, expand_rewards
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError, RewardInfraError, UnscorableError
from roll.rewards import build_reward
from roll.rewards.opening import open_reward_lists
from roll.rewards.remote import server as server_module
from roll.rewards.remote.server import RewardServer
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]
FUNCTIONS = """
import os, time

def score(text, answer, metadata) -> bool:
    if text == "hang":
        time.sleep(60)
    if text == "crash":
        os._exit(3)
    if text == "raise":
        raise ValueError("no good")
    if text == "nan":
        return float("nan")
    return text == answer + metadata.get("suffix", "")

async def wait_for_file(text, answer, metadata):
    import asyncio
    open(metadata["started"], "w").close()
    while not os.path.exists(metadata["go"]):
        await asyncio.sleep(0.002)
    return 1.0
"""


def parse(value: Any) -> list[RewardConfig]:
    return TypeAdapter(RewardList).validate_python(expand_rewards(value))


@asynccontextmanager
async def serve(pool: LocalWorkerPool, rewards: Mapping[str, Any], **options: Any) -> AsyncIterator[RewardServer]:
    lists: dict[str, Sequence[RewardConfig]] = {domain: parse(value) for domain, value in rewards.items()}
    async with (
        open_reward_lists(lists, SandboxConfig(), pool) as opened,
        RewardServer(opened, lists, pool, **options) as server,
    ):
        yield server


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


async def post(server: RewardServer, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/score", data=raw, headers=headers) as response,
    ):
        return response.status, await response.json(), response.headers


@pytest.mark.integration
async def test_reward_serve_gives_the_results_of_a_local_run(
    pool: LocalWorkerPool, rollout: MakeRollout, functions: str
) -> None:
    own = {"type": "python", "function": f"{functions}:score", "time_limit_s": 1.0}
    rollouts = [
        rollout("7!", "7", metadata={"suffix": "!"}),
        rollout("8", "7"),
        rollout("7", "7", finished=False),
        rollout("<think>7", "7"),
        rollout("hang", "7"),
    ]
    local, remote = [], []
    async with serve(pool, {"": own}) as server:
        local_reward = build_reward(parse(own), pool)
        reward = build_reward([RemoteReward(type="remote", url=server.url)], pool)
        for each in rollouts:
            local.append(await local_reward(each))
            remote.append(await reward(each))
        for text in ("crash", "raise", "nan"):
            for each_reward in (local_reward, reward):
                with pytest.raises(RewardInfraError):
                    await each_reward(rollout(text, "7"))
        await reward.close()
    outcomes = [(r.value, r.correct, bool(r.timed_out), r.verdict) for r in local]
    assert [(r.value, r.correct, bool(r.timed_out), r.verdict) for r in remote] == outcomes
    assert outcomes[0][:2] == (1.0, True) and outcomes[4] == (0.0, False, True, "timeout")


async def test_reward_serve_selects_the_reward_by_domain_and_reports_the_components(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    parts = [{"type": "format", "tags": ["answer"], "weight": 0.5}, "exact"]
    async with serve(pool, {"d": parts, "other": "exact"}) as server:
        reward = build_reward([RemoteReward(type="remote", url=server.url)], pool)
        result = await reward(rollout("<answer>7</answer>", "<answer>7</answer>"))
        assert (result.value, result.correct) == (1.5, True)
        assert {"remote": 1.5, "remote/format": 1.0, "remote/exact": 1.0}.items() <= result.components.items()
        status, reply, _ = await post(server, {"items": [{"text": "x", "answer": "x", "domain": "nowhere"}]})
        assert status == 200 and reply["results"][0]["kind"] == "unscorable"
        assert "'nowhere' is not served (served: d, other)" in reply["results"][0]["error"]
        await reward.close()


async def test_reward_serve_needs_tokens_for_rewards_of_lengths(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    length = {"type": "length", "free_tokens": 1, "full_tokens": 3}
    async with serve(pool, {"": length}) as server:
        settings: dict[str, Any] = {"type": "remote", "url": server.url, "decides": False}
        without = build_reward([RemoteReward.model_validate(settings)], pool)
        with pytest.raises(UnscorableError, match="'length' requires `token_ids`: set `send_token_ids: true`"):
            await without(rollout("a"))
        reward = build_reward([RemoteReward.model_validate({**settings, "send_token_ids": True})], pool)
        assert (await reward(rollout("a"))).value == 0.0
        status, reply, _ = await post(server, {"items": [{"text": "x", "token_ids": [1, 2]}]})
        assert (status, reply["results"][0]["value"]) == (200, -0.5)
        for each in (without, reward):
            await each.close()
    with pytest.raises(ConfigError, match="'environment' cannot be served"):
        async with serve(pool, {"": "environment"}):
            pass


BAD_BODIES: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "EOF"),
    "empty": (b"", "EOF"),
    "a list": ([], "should be an object"),
    "no items": ({}, "items: Field required"),
    "no item": ({"items": []}, "items: List should have at least 1"),
    "too many items": ({"items": [{"text": ""}] * 257}, "at most 256"),
    "an item without text": ({"items": [{"text": "a"}, {"answer": "7"}]}, "items.1.text: Field required"),
    "text of another type": ({"items": [{"text": 7}]}, "items.0.text: Input should be a valid string"),
    "metadata of another type": ({"items": [{"text": "a", "metadata": []}]}, "items.0.metadata"),
    "an id of another type": ({"id": 7, "items": [{"text": "a"}]}, "id: Input"),
    "deep nesting": (
        b'{"items": [{"text": "a", "metadata": {"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}}]}",
        "recursion",
    ),
    "invalid UTF-8": (b'{"items": [{"text": "\xff"}]}', "invalid"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_reward_serve_an_invalid_request_gets_status_400_with_the_field(pool: LocalWorkerPool, name: str) -> None:
    body, words = BAD_BODIES[name]
    async with serve(pool, {"": "exact"}) as server:
        status, reply, _ = await post(server, body)
        assert status == 400 and words in reply["error"]
        status, reply, _ = await post(server, {"id": "9", "items": [{"text": "7", "answer": "7"}]})
        assert (status, reply["id"], reply["results"][0]["value"]) == (200, "9", 1.0)


@pytest.mark.parametrize(
    "prompt", [[{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 7}], [{"role": 1, "content": [{}]}]]
)
async def test_reward_serve_a_malformed_prompt_is_an_error_of_its_item(pool: LocalWorkerPool, prompt: Any) -> None:
    items = [{"text": "a", "answer": "a", "prompt": prompt}, {"text": "a", "answer": "a", "prompt": "why?"}]
    async with serve(pool, {"": "exact"}) as server:
        status, reply, _ = await post(server, {"items": items})
        assert status == 200 and reply["results"][0]["kind"] == "malformed_prompt"
        assert reply["results"][1]["value"] == 1.0


async def test_reward_serve_a_body_that_is_too_large_gets_status_413(
    pool: LocalWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 10_000)
    big = json.dumps({"items": [{"text": "x" * 20_000}]}).encode()
    async with serve(pool, {"": "exact"}) as server:
        assert (await post(server, big))[0] == 413
        assert (await post(server, gzip.compress(big), **{"Content-Encoding": "gzip"}))[0] in (400, 413)
        assert (await post(server, {"items": [{"text": "x"}]}))[0] == 200


async def test_reward_serve_a_token_is_required(pool: LocalWorkerPool) -> None:
    body = {"items": [{"text": "x", "answer": "x"}]}
    async with serve(pool, {"": "exact"}, token="right") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "right"},
            {"Authorization": "Bearer é"},
        ):
            assert (await post(server, body, **headers))[0] == 401
        assert (await post(server, body, Authorization="Bearer right"))[0] == 200


async def test_reward_serve_refuses_requests_when_it_is_full_and_ends_running_ones_when_it_stops(
    pool: LocalWorkerPool, functions: str, tmp_path: Path
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    own = {"type": "python", "function": f"{functions}:wait_for_file"}
    body = {"items": [{"text": "x", "metadata": {"started": str(started), "go": str(go)}}]}
    async with serve(pool, {"": own}, max_pending=1) as server:
        running = asyncio.create_task(post(server, body))
        while not started.exists():
            await asyncio.sleep(0.002)
        status, reply, headers = await post(server, body)
        assert (status, headers["Retry-After"]) == (503, "1") and "the limit is 1" in reply["error"]
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as response:
            health = await response.json()
        assert (response.status, health["status"], health["pending"], health["refused"]) == (200, "ok", 1, 1)
        stopping = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        go.touch()
        status, reply, _ = await running
        assert (status, reply["results"][0]["value"]) == (200, 1.0)
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(server, body)


async def test_reward_serve_a_client_that_disconnects_frees_its_place(
    pool: LocalWorkerPool, functions: str, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    own = {"type": "python", "function": f"{functions}:wait_for_file"}
    body = {"items": [{"text": "x", "metadata": {"started": str(started), "go": str(tmp_path / "never")}}]}
    async with serve(pool, {"": own}, max_pending=1) as server:
        running = asyncio.create_task(post(server, body))
        while not started.exists():
            await asyncio.sleep(0.002)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with aiohttp.ClientSession() as session, asyncio.timeout(10):
            while True:
                async with session.get(f"{server.url}/health") as response:
                    if (await response.json())["pending"] == 0:
                        break
                await asyncio.sleep(0.002)
