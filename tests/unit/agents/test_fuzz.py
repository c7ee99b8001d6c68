"""The endpoint, given whatever its own description allows, and whatever lies beside that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from worlds.agents import Speaker, request_of
from worlds.schemas import ANYTHING, allowed

from roll.agents import Session
from roll.agents.openapi import build_description
from roll.agents.server import AgentServer
from roll.config.agents import AgentLimitsConfig
from roll.data import ChatRenderer
from roll.models import load_tokenizer

SECRET = "what-another-agent-was-told"
PATHS = [path for path, operations in build_description()["paths"].items() if "post" in operations]
SCHEMAS = build_description()["components"]["schemas"]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A path and a body for it: as described, with a part replaced by anything, or nothing of the kind."""
    path = draw(st.sampled_from(PATHS))
    schema = build_description()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = draw(allowed(schema, SCHEMAS))
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(body)))
        body = {**body, name: draw(ANYTHING)}
    return path, draw(ANYTHING) if draw(st.integers(0, 9)) == 0 else body


class World:
    """A loop of its own with a server, a session to attack, and another one with a secret."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.loop = asyncio.new_event_loop()
        self.renderer = renderer
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self.server = AgentServer()
        await self.server.start()
        self.http = aiohttp.ClientSession()
        self.mine, self.other = self._session("mine"), self._session("other")
        body = {"model": "m", "input": SECRET}
        status, said = await self.send("/v1/responses", json.dumps(body).encode(), self.other.key)
        assert status == 200 and SECRET in said
        self.response_id = json.loads(said)["id"]

    def _session(self, name: str) -> Session:
        texts = ["Yes.", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "<think>x</think>y", SECRET]
        speaker = Speaker(self.renderer, lambda context: texts[len(context) % 3] if name == "mine" else texts[3])
        limits = AgentLimitsConfig(turns=10**6, tokens=10**9, time_s=3600.0)
        first = request_of(self.renderer.tokenize("a"), name)
        session = Session(name, first, speaker.generate, self.renderer, limits=limits, max_context=2048)
        self.server.sessions.add(session)
        return session

    async def send(self, path: str, body: bytes, key: str | None) -> tuple[int, str]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = self.server.base_url.removesuffix("/v1") + path
        async with self.http.post(url, data=body, headers=headers) as response:
            return response.status, await response.text(errors="replace")

    def ask(self, path: str, body: bytes, key: str | None) -> tuple[int, str]:
        return self.loop.run_until_complete(self.send(path, body, key))

    def close(self) -> None:
        self.loop.run_until_complete(self.http.close())
        self.loop.run_until_complete(self.server.close())
        self.loop.close()


@pytest.fixture(scope="module")
def world(tiny_model: Path) -> Iterator[World]:
    made = World(ChatRenderer(load_tokenizer(str(tiny_model))))
    yield made
    made.close()


def check(world: World, path: str, body: bytes) -> None:
    status, said = world.ask(path, body, world.mine.key)
    assert status in (200, 400, 404), said
    assert SECRET not in said
    if status != 200:
        error = json.loads(said)["error"]
        assert error["type"] and error["message"]
    for key in (None, "", world.mine.session_id, world.mine.key[:-1]):
        assert world.ask(path, body, key)[0] == 401
    assert not world.mine.failed.done()


EVERYTHING = settings(max_examples=60, suppress_health_check=list(HealthCheck))


@EVERYTHING
@given(bodies())
@pytest.mark.integration
def test_agent_fuzz_whatever_is_sent_is_answered_or_refused_with_a_reason(world: World, sent: tuple[str, Any]) -> None:
    path, body = sent
    check(world, path, json.dumps(body).encode("utf-8", "surrogatepass"))


@EVERYTHING
@given(st.sampled_from(PATHS), st.binary(max_size=40))
def test_agent_fuzz_bytes_that_are_no_json_are_refused(world: World, path: str, body: bytes) -> None:
    check(world, path, body)


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_agent_fuzz_a_long_series_of_bodies_finds_no_error_of_ours(world: World, sent: tuple[str, Any]) -> None:
    path, body = sent
    check(world, path, json.dumps(body).encode("utf-8", "surrogatepass"))


def test_agent_fuzz_another_sessions_responses_are_not_known_here(world: World) -> None:
    body = {"model": "m", "input": "What was said?", "previous_response_id": world.response_id}
    status, said = world.ask("/v1/responses", json.dumps(body).encode(), world.mine.key)
    assert status == 404 and SECRET not in said
