"""Agents at the endpoint without a network: they fork, stream, leave, hang, crash, and go on after their end.

agent ─► `_Wire`: a request as aiohttp makes it ─► the production server ─► what it writes, until the agent leaves
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from roll.agents.programs import AgentError, AgentTask
from roll.agents.server import AgentServer
from roll.errors import WorkerDiedError
from roll.types import Rollout
from worlds.failing import Chance

__all__ = ["Agents"]

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class _Transport:
    def __init__(self) -> None:
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing


class _Writer:
    """What the server writes to."""

    length: int | None = None
    output_size = buffer_size = 0

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def enable_chunking(self) -> None: ...

    async def drain(self) -> None: ...

    def send_headers(self) -> None: ...

    async def write_headers(self, status_line: str, headers: Any) -> None:
        await self._wire.travel()

    async def write(self, data: bytes) -> None:
        await self._wire.travel()
        self._wire.received += data

    async def write_eof(self, data: bytes = b"") -> None:
        await self.write(data)


class _Wire:
    """One request and its answer."""

    def __init__(self, server: AgentServer, chance: Chance, key: str, body: dict[str, Any]) -> None:
        self._server, self._chance = server, chance
        self.transport = _Transport()
        self.received = b""
        self.task = asyncio.current_task()
        raw, loop = json.dumps(body).encode(), asyncio.get_running_loop()
        headers = CIMultiDictProxy(CIMultiDict({"Authorization": f"Bearer {key}", "Host": "h"}))
        message = RawRequestMessage(
            "POST", "/v1/chat/completions", HttpVersion11, headers, (), False, None, False, False,
            URL("/v1/chat/completions"),
        )  # fmt: skip
        protocol: Any = SimpleNamespace(ssl_context=None, peername=None, sockname=None, transport=self.transport)
        payload: Any = SimpleNamespace(readany=self._body(raw), set_read_chunk_size=lambda size: None)
        writer: Any = _Writer(self)
        task: Any = None
        self.request = web.BaseRequest(message, payload, protocol, writer, task, loop)

    @staticmethod
    def _body(raw: bytes) -> Callable[[], Any]:
        parts = [raw, b""]

        async def readany() -> bytes:
            return parts.pop(0)

        return readany

    async def travel(self) -> None:
        await asyncio.sleep(float(self._chance.of("0", "0", "0", "0.5")))
        if self.transport.closing:
            raise ConnectionResetError

    async def serve(self) -> int:
        """As aiohttp does."""
        response = await self._server._handle_request(self.request)
        with suppress(ConnectionError):
            await response.prepare(self.request)
            await response.write_eof()
        return response.status


class Agents:
    """A `Program`: each run of it is an agent that does as it likes."""

    def __init__(self, server: AgentServer, chance: Chance, complain: Callable[[str], None]) -> None:
        self._server, self._chance, self._complain = server, chance, complain
        self._ghosts: set[asyncio.Task[Any]] = set()
        self._whole: defaultdict[str, list[str]] = defaultdict(list)
        """By rollout, answers that arrived to their end."""
        self._asked: defaultdict[str, int] = defaultdict(int)

    async def __call__(self, task: AgentTask, base_url: str, api_key: str) -> str | None:
        name = api_key.rpartition(".")[0]
        self._whole[name].clear()
        self._asked[name] = 0
        self._chance.begin("agents")
        try:
            await self._talk(name, api_key)
        finally:
            self._chance.end("agents")
            if self._chance.under(0.2):  # what it leaves behind goes on asking
                ghost = asyncio.create_task(self._haunt(name, api_key))
                self._ghosts.add(ghost)
                ghost.add_done_callback(self._ghosts.discard)
        return "done"

    async def _talk(self, name: str, key: str) -> None:
        chance = self._chance
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
        for turn in range(int(chance.of("1", "2", "3", "4", "6"))):
            fault = await chance.call("die", "hang", "slow", "raise_own", "infra")
            if fault == "die":
                raise AgentError("it crashed")
            if fault == "infra":
                raise WorkerDiedError("its machine is gone")
            more: dict[str, Any] = {"tools": TOOLS} if chance.under(0.3) else {}
            more |= {"n": 2} if chance.under(0.1) else {}
            more |= {"stop": ["o 5"]} if chance.under(0.2) else {}
            if chance.under(0.2):  # a fork, and perhaps a third
                asks = [self._ask(name, key, messages, **more) for _ in range(int(chance.of("2", "3")))]
                said = (await asyncio.gather(*asks))[0]
            elif chance.under(0.2):  # a sub-agent
                await self._ask(name, key, [{"role": "user", "content": f"Sub {turn}."}])
                said = await self._ask(name, key, messages, **more)
            else:
                said = await self._ask(name, key, messages, **more)
            if said is None:
                continue
            if chance.under(0.1):  # it writes its history anew
                said = {"role": "assistant", "content": "short"}
            messages = [*messages, said, *self._replies(said)]

    def _replies(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        calls = said.get("tool_calls") or ()
        tools = [{"role": "tool", "tool_call_id": call["id"], "content": "seen 5"} for call in calls]
        return tools or [{"role": "user", "content": "On."}]

    async def _ask(self, name: str, key: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any] | None:
        """The answer; `None` where there is none."""
        stream = self._chance.under(0.5)
        leaves_s = float(self._chance.of("0", "0.1", "3", "20")) if self._chance.under(0.15) else None
        wire = _Wire(self._server, self._chance, key, {"model": "m", "messages": messages, "stream": stream, **more})
        self._asked[name] += 1
        serving = asyncio.create_task(wire.serve())
        try:
            await asyncio.wait({serving}, timeout=leaves_s)
        finally:
            if not serving.done():  # the agent is gone, as aiohttp sees it
                wire.transport.closing = True
                serving.cancel()
        if not serving.done():
            await asyncio.wait({serving})
            return None
        status = serving.result()
        if status >= 500 and status != 503:
            self._complain(f"the endpoint answers with status {status}")
        if status == 503:
            raise AgentError("the model is away") if self._chance.under(0.5) else RuntimeError("no model")
        if status != 200:
            return None
        said = _streamed(wire.received) if stream else [c["message"] for c in json.loads(wire.received)["choices"]]
        for one in said:
            self._whole[name].append(one["content"] or "")
        return said[0]

    async def _haunt(self, name: str, key: str) -> None:
        """After its end nothing is answered."""
        await asyncio.sleep(float(self._chance.of("6", "30")))
        wire = _Wire(self._server, self._chance, key, {"model": "m", "messages": [{"role": "user", "content": "?"}]})
        status = await asyncio.wait_for(wire.serve(), 400.0)
        if status != 401:
            self._complain(f"{name} is answered after its end: {status}")

    def check(self, name: str, rollout: Rollout) -> None:
        """What the agent got is recorded, and little else."""
        written = ["".join(map(chr, rollout.token_ids[t.start : t.end].tolist())) for t in rollout.turns]
        whole = self._whole[name]
        assert len(whole) <= len(written), f"{name} got {len(whole)} answers, and {len(written)} are recorded"
        for content in whole:
            assert any(content in text for text in written), f"{name} got {content!r}, which is not recorded"

    async def close(self) -> None:
        """Wait for those that are left behind."""
        await asyncio.gather(*self._ghosts)


def _streamed(received: bytes) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in received.decode().split("\n\n"):
        text = line.removeprefix("data: ")
        if not text or text == "[DONE]":
            continue
        for choice in json.loads(text)["choices"]:
            message = found.setdefault(choice["index"], {"role": "assistant", "content": ""})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[part["index"]]
                call["id"] = part.get("id") or call["id"]
                call["function"]["name"] += part["function"].get("name") or ""
                call["function"]["arguments"] += part["function"].get("arguments") or ""
    return [found[index] for index in sorted(found)]
