"""Serves environments over HTTP, for `host: http`.

    POST   /episodes              {"environment", "options", "wrappers"}  ─► {"episode"}
    POST   /episodes/ID/reset     {"seed"}                                ─► {"observation", "info"}
    POST   /episodes/ID/step      {"action"}    ─► {"observation", "reward", "terminated", "truncated", "info"}
    DELETE /episodes/ID                                                   ─► {}
    GET    /environments                                                  ─► {"environments"}

Status 400: the request is invalid; 404: the episode does not exist; 500: the environment failed. `error` has the
details. Invariants: only the environments that the server was started with are served, since a class given by its path
would run arbitrary code; an episode that is idle for `IDLE_TIMEOUT_S` is closed; closing the server closes all
episodes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from roll.envs.base import encode_json
from roll.envs.hosting import EnvHosts, HostedEnv
from roll.errors import InfraError, UserError
from roll.types import EnvironmentSettings

__all__ = ["IDLE_TIMEOUT_S", "serve_environments"]

IDLE_TIMEOUT_S = 600.0
MAX_BODY_BYTES = 2**24


@dataclass(eq=False)
class _Episode:
    env: HostedEnv
    stack: AsyncExitStack
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes the episode's calls."""
    used_at: float = 0.0


@dataclass(eq=False)
class _Server:
    hosts: EnvHosts
    names: Collection[str]
    idle_s: float
    episodes: dict[str, _Episode] = field(default_factory=dict)

    async def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("environment")
        if name not in self.names:
            raise UserError(f"environment {name!r} is not served: GET /environments lists the served environments")
        wrappers = tuple((str(key), dict(options)) for key, options in body.get("wrappers") or ())
        settings = EnvironmentSettings(name=str(name), options=dict(body.get("options") or {}), wrappers=wrappers)
        stack = AsyncExitStack()
        env = await stack.enter_async_context(self.hosts.open(settings))
        episode_id = secrets.token_urlsafe(16)
        self.episodes[episode_id] = _Episode(env, stack, used_at=asyncio.get_running_loop().time())
        return {"episode": episode_id}

    async def reset(self, episode_id: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._use_episode(episode_id) as env:
            return dict(zip(("observation", "info"), await env.reset(body.get("seed")), strict=True))

    async def step(self, episode_id: str, body: dict[str, Any]) -> dict[str, Any]:
        names = ("observation", "reward", "terminated", "truncated", "info")
        async with self._use_episode(episode_id) as env:
            return dict(zip(names, await env.step(str(body.get("action", ""))), strict=True))

    async def end(self, episode_id: str) -> None:
        episode = self.episodes.pop(episode_id, None)
        if episode is not None:
            await episode.stack.aclose()

    @asynccontextmanager
    async def _use_episode(self, episode_id: str) -> AsyncIterator[HostedEnv]:
        episode = self.episodes.get(episode_id)
        if episode is None:
            raise web.HTTPNotFound(text=json.dumps({"error": f"episode {episode_id} does not exist"}))
        async with episode.turn:
            try:
                yield episode.env
            finally:
                episode.used_at = asyncio.get_running_loop().time()

    async def close_idle_episodes(self) -> None:
        """Close idle episodes periodically, until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.idle_s / 4)
            late = loop.time() - self.idle_s
            # An episode in the middle of a call is not idle, however long the call takes.
            for episode_id in [i for i, e in self.episodes.items() if e.used_at < late and not e.turn.locked()]:
                await self.end(episode_id)


def _make_handler(handle: Callable[[web.Request, dict[str, Any]], Awaitable[dict[str, Any]]]) -> Any:
    async def answer(request: web.Request) -> web.Response:
        try:
            body = await request.json() if request.can_read_body else {}
            if not isinstance(body, dict):
                raise UserError("the body must be a JSON object")
            result = await handle(request, body)
        except (UserError, ValueError, TypeError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)
        except InfraError as error:
            return web.json_response({"error": str(error)}, status=500)
        try:
            return web.json_response(text=encode_json(result))
        except (ValueError, TypeError, RecursionError) as error:
            return web.json_response(
                {"error": f"the result of the environment cannot be encoded as JSON: {error}"}, status=500
            )

    return answer


@asynccontextmanager
async def serve_environments(
    hosts: EnvHosts,
    names: Collection[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    idle_s: float = IDLE_TIMEOUT_S,
) -> AsyncIterator[str]:
    """Start a server of environments, yield its address, and shut the server down at the end.

    Args:
        hosts: The hosts that run the environments.
        names: Names of the served environments.
        host: The address to listen on. Any client that can connect to the address can use the environments.
        port: The port; 0 chooses a free one.
        idle_s: Seconds after which an idle episode is closed.

    Raises:
        OSError: The server cannot listen on this address.
    """
    server = _Server(hosts, names, idle_s)

    async def end(request: web.Request, _: dict[str, Any]) -> dict[str, Any]:
        await server.end(request.match_info["id"])
        return {}

    async def list_environments(*_: object) -> dict[str, Any]:
        return {"environments": sorted(names)}

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/episodes", _make_handler(lambda _, body: server.begin(body)))
    app.router.add_post("/episodes/{id}/reset", _make_handler(lambda r, body: server.reset(r.match_info["id"], body)))
    app.router.add_post("/episodes/{id}/step", _make_handler(lambda r, body: server.step(r.match_info["id"], body)))
    app.router.add_delete("/episodes/{id}", _make_handler(end))
    app.router.add_get("/environments", _make_handler(list_environments))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    watching = asyncio.ensure_future(server.close_idle_episodes())
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        listening = runner.addresses[0]
        yield f"http://{listening[0]}:{listening[1]}"
    finally:
        watching.cancel()
        await runner.cleanup()
        for episode_id in list(server.episodes):
            await server.end(episode_id)
