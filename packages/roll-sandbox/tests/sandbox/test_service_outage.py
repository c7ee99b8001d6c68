"""What a service answers while its database does not, and that its event loop never waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

sqlalchemy = pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from starlette.testclient import TestClient  # noqa: E402
from starlette.testclient import WebSocketDenialResponse as Denied  # noqa: E402

from roll_sandbox.service.app import make_app  # noqa: E402
from roll_sandbox.service.service import Service  # noqa: E402
from roll_sandbox.service.settings import Settings  # noqa: E402


def test_sandbox_service_outage_a_service_without_its_database_answers_503_and_goes_on_when_it_is_back(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(Settings(database=database, runtime=None, audit=tmp_path / "audit.jsonl"))
    bearer = {"Authorization": f"Bearer {service.tokens.create('ann', ['run', 'read', 'admin'])}"}
    on_the_loop: list[str] = []

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if asyncio._get_running_loop() is not None:
            on_the_loop.append(statement)

    sqlalchemy.event.listen(service.store.engine, "before_cursor_execute", executed)
    connect = service.store.engine.connect

    def away() -> Any:
        raise sqlalchemy.exc.OperationalError("", {}, Exception("gone"))

    with TestClient(make_app(service)) as client:
        assert client.get("/v1/sandboxes", headers=bearer).json() == []
        monkeypatch.setattr(service.store.engine, "connect", away)
        refused = client.get("/v1/sandboxes", headers=bearer)
        assert (refused.status_code, refused.json()["error"]) == (503, "database")
        assert "gone" in refused.json()["message"]
        with pytest.raises(Denied) as denied, client.websocket_connect("/v1/line", headers=bearer):
            pass
        assert denied.value.status_code == 503
        assert client.get("/health/live").status_code == 200
        monkeypatch.setattr(service.store.engine, "connect", connect)
        assert client.get("/v1/sandboxes", headers=bearer).status_code == 200
        assert "roll_sandbox_database_up 1" in client.get("/metrics", headers=bearer).text
    assert on_the_loop == []
