"""Every route, HTTP or WebSocket, refuses bad tokens: over the application's own table, so that none is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from fastapi import FastAPI
from sqlalchemy import update

from roll_sandbox.service.access import ROCK_PREFIX
from roll_sandbox.service.app import make_app
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.store.tables import tokens as table

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "somebodys-sandbox"


class App:
    def __init__(self, directory: Path) -> None:
        settings = Settings(database=f"sqlite:///{directory}/db", runtime=None)
        self.service = Service(settings)
        self.app: Any = make_app(self.service)
        self.fastapi: FastAPI = self.app._app
        made = self.service.tokens
        self.tokens = {name: made.create("ann") for name in ("good", "expired", "revoked")}
        self.tokens["wrong"] = self.tokens["good"][:-4] + "AAAA"
        self.tokens["other"] = made.create("ben")
        self.tokens["worker"] = made.create("ann", ["worker"])
        part = self.tokens["expired"].split("_")[1]
        self.service.store.write_now(update(table).where(table.c.id == part).values(expires=time.time() - 1.0))
        made.revoke(self.tokens["revoked"].split("_")[1])

    def routes(self) -> list[tuple[str, str]]:
        """Methods and paths, with names put in; `WS` for a WebSocket."""
        found = []
        for path, kinds in self._table():
            path = path.replace("{name}", NAME).replace("{session}", "0" * 32).replace("{program}", "0" * 32)
            assert "{" not in path, path
            found += [(kind, path) for kind in kinds]
        return found

    def _table(self) -> list[tuple[str, list[str]]]:
        flat, rest = [], list(self.fastapi.routes)
        while rest:
            route = rest.pop()
            inner = getattr(route, "effective_route_contexts", None)
            if inner is not None:
                rest += list(inner())
            elif hasattr(route, "path"):
                methods = getattr(route, "methods", None)
                flat.append((route.path, sorted(methods) if methods else ["WS"]))
        return flat

    async def ask(self, kind: str, path: str, headers: dict[str, str], peer: str) -> int:
        """The status; of a WebSocket 403 where it is refused."""
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"path": path, "raw_path": path.encode(), "query_string": b"path=x", "headers": raw}
        scope |= {"client": (peer, 1), "server": ("test", 80), "root_path": "", "http_version": "1.1", "scheme": "http"}
        scope |= {"type": "websocket", "subprotocols": []} if kind == "WS" else {"type": "http", "method": kind}
        said: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if kind != "WS":
                return {"type": "http.request", "body": b"{}", "more_body": False}
            if any(each["type"] == "websocket.accept" for each in said):
                return {"type": "websocket.disconnect", "code": 1000}
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        await asyncio.wait_for(self.app(scope, receive, send), 20.0)
        return 403 if said[0]["type"] == "websocket.close" else said[0].get("status", 101)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    made = App(tmp_path_factory.mktemp("access"))
    await made.service.start()
    yield made
    await made.service.close()


@pytest.mark.parametrize("token", ["none", "wrong", "expired", "revoked", "nonsense"])
async def test_sandbox_service_auth_every_route_refuses(app: App, token: str) -> None:
    routes = app.routes()
    assert len(routes) >= 40
    assert (
        sum(kind == "WS" for kind, _ in routes) >= 3 and sum(path.startswith(ROCK_PREFIX) for _, path in routes) >= 15
    )
    said = {"none": "", "nonsense": "x" * 5000}.get(token) if token in ("none", "nonsense") else app.tokens[token]
    headers = {"Authorization": f"Bearer {said}"} if said else {}
    answers = {
        (kind, path): await app.ask(kind, path, headers, f"{token}{number}")
        for number, (kind, path) in enumerate(routes)
        if path != "/health/live"
    }
    assert {place: status for place, status in answers.items() if status != (403 if place[0] == "WS" else 401)} == {}


async def test_sandbox_service_auth_a_good_token_is_not_refused_so(app: App) -> None:
    good = {"Authorization": f"Bearer {app.tokens['good']}"}
    assert await app.ask("GET", "/v1/sandboxes", good, "good") == 200
    assert await app.ask("WS", "/v1/line", good, "good") == 101
    assert await app.ask("WS", "/v1/worker", good, "good") == 403


async def test_sandbox_service_auth_paths_that_nobody_listed_take_the_most(app: App) -> None:
    good = {"Authorization": f"Bearer {app.tokens['good']}"}
    for path in ("/", "/v1/workers", "/v1/new", "/v2", "/metrics", "/docs", "/v1/sandboxesx"):
        assert await app.ask("GET", path, good, "good") == 403, path


async def test_sandbox_service_auth_guesses_from_one_place_are_slowed(app: App) -> None:
    wrong = {"Authorization": f"Bearer {app.tokens['wrong']}"}
    answers = [await app.ask("GET", "/v1/sandboxes", wrong, "guesser") for _ in range(30)]
    assert answers[0] == 401 and answers[-1] == 429
