"""A real HTTP server of this process that speaks as much of the OpenAI API as a judge needs, and fails on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], "web.StreamResponse | Awaitable[web.StreamResponse]"]


def completion(content: str) -> web.Response:
    """A chat completion with this text."""
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


def score(value: int) -> web.Response:
    return completion(json.dumps({"reasoning": "because", "score": value}))


@dataclass
class JudgeServer:
    """What it was asked, and how it answers: the next of `script`, or else `answer`."""

    url: str = ""
    answer: Answer = lambda body: score(10)
    script: list[Answer] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    request: web.Request | None = None
    """The newest."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self.request = request
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            answer = self.script.pop(0) if self.script else self.answer
            response = answer(body)
            return await response if asyncio.iscoroutine(response) else response
        finally:
            self.under_way -= 1


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    """Serve on a free port of this machine."""
    server = JudgeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
