"""A reward service of this process that a test scripts: it answers, fails, or sends something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], "web.StreamResponse | Awaitable[web.StreamResponse]"]


def score_length(body: dict[str, Any]) -> web.Response:
    """Give each answer its length as value; answers with an even length are right."""
    results = [{"value": float(len(i["text"])), "correct": len(i["text"]) % 2 == 0} for i in body["items"]]
    return web.json_response({"id": body["id"], "results": results})


def send_raw(raw: str, status: int = 200, **headers: str) -> Reply:
    """Reply with this body, whatever was requested."""
    return lambda _: web.Response(text=raw, status=status, content_type="application/json", headers=headers)


@dataclass
class RewardService:
    """The requests it got, and how it replies: with the next entry of `script`, or else with `reply`."""

    url: str = ""
    reply: Reply = score_length
    script: list[Reply] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    request: web.Request | None = None
    """The request of the newest entry of `bodies`."""
    num_running: int = 0
    max_running: int = 0

    @property
    def texts(self) -> list[list[str]]:
        """The answers of each request."""
        return [[item["text"] for item in body["items"]] for body in self.bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            body = json.loads(await request.read())
            self.request = request
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            reply = (self.script.pop(0) if self.script else self.reply)(body)
            return await reply if asyncio.iscoroutine(reply) else reply
        finally:
            self.num_running -= 1


@asynccontextmanager
async def open_service() -> AsyncIterator[RewardService]:
    """Serve on a free port of this machine."""
    service = RewardService()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/score", service.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()
