"""The service's routes, tokens, owners and bounds, through a real `roll-sandbox serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sandbox.conftest import LIMITS, missing, roll_sandbox, served
from sandbox.databases import KINDS

from roll_sandbox import (
    Limits,
    Mount,
    PythonCode,
    SandboxAccessError,
    SandboxExpiredError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxSpec,
    SandboxUnavailableError,
    connect,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = {"limits": {"memory_bytes": 2**27, "disk_bytes": 2**24}}


@dataclass
class Served:
    """A service, and who asks it."""

    url: str
    database: str
    directory: Path
    http: aiohttp.ClientSession
    tokens: dict[str, str]

    async def ask(self, method: str, path: str, who: str = "ann", **settings: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.tokens.get(who, who)}"} if who else {}
        async with self.http.request(method, self.url + path, headers=headers, **settings) as answer:
            body = await answer.read()
            is_json = body and answer.content_type == "application/json"
            return answer.status, json.loads(body) if is_json else body


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str], str]
) -> AsyncIterator[Served]:
    if reason := missing("service"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("service")
    bounds = ["--owner-sandboxes", "3", "--owner-lifetime", "600", "--max-message-bytes", str(2**20)]
    database, audit = new_database(request.param), str(directory / "audit.jsonl")
    with served(directory, "--warm", "0", "--audit", audit, *bounds, address=database) as (url, admin):
        make = lambda *rest: roll_sandbox("token", "create", *rest, "--database", database)  # noqa: E731
        tokens = {"admin": admin, "ann": make("ann"), "ben": make("ben"), "reader": make("ann", "--scope", "read")}
        async with aiohttp.ClientSession() as http:
            yield Served(url, database, directory, http, tokens)


async def test_sandbox_service_a_world_is_made_used_copied_and_stopped(service: Served) -> None:
    status, made = await service.ask("POST", "/v1/sandboxes", json={"spec": SPEC, "lifetime_s": 60})
    assert (status, made["state"]) == (201, "running")
    place = f"/v1/sandboxes/{made['sandbox']}"
    status, result = await service.ask("POST", f"{place}/run", json={"source": "print(input())", "stdin": "aGk="})
    assert (status, result["stdout"], result["exit_code"]) == (200, "hi\n", 0)
    assert (await service.ask("PUT", f"{place}/file?path=a/b", data=b"\x00\xff"))[0] == 204
    assert await service.ask("GET", f"{place}/file?path=a/b") == (200, b"\x00\xff")
    assert await service.ask("GET", f"{place}/directory?path=a") == (
        200,
        [{"name": "b", "directory": False, "size": 2}],
    )
    status, session = await service.ask("POST", f"{place}/sessions", json={"env": {"X": "1"}})
    inside = f"{place}/sessions/{session['session']}"
    await service.ask("POST", f"{inside}/run", json={"command": "cd a; Y=2"})
    status, said = await service.ask("POST", f"{inside}/run", json={"command": "echo $X$Y; ls"})
    assert said["stdout"] == "12\nb\n"
    assert (await service.ask("DELETE", inside))[0] == 204
    status, taken = await service.ask("POST", f"{place}/snapshot")
    await service.ask("POST", f"{place}/run", json={"argv": ["rm", "-r", "a"]})
    status, copy = await service.ask("POST", f"{place}/fork", json={"lifetime_s": 60})
    assert status == 201
    assert (await service.ask("GET", f"/v1/sandboxes/{copy['sandbox']}/file?path=a/b"))[0] == 422
    assert (await service.ask("POST", f"/v1/sandboxes/{copy['sandbox']}/restore", data=taken))[0] == 204
    assert await service.ask("GET", f"/v1/sandboxes/{copy['sandbox']}/file?path=a/b") == (200, b"\x00\xff")
    status, longer = await service.ask("POST", f"{place}/extend", json={"lifetime_s": 500})
    assert longer["expires"] > made["expires"] + 400
    assert {each["sandbox"] for each in (await service.ask("GET", "/v1/sandboxes"))[1]} == {
        made["sandbox"],
        copy["sandbox"],
    }
    for each in (made, copy):
        assert (await service.ask("DELETE", f"/v1/sandboxes/{each['sandbox']}"))[0] == 204
        assert (await service.ask("GET", f"/v1/sandboxes/{each['sandbox']}"))[0] == 404


async def test_sandbox_service_no_route_answers_without_a_good_token_or_to_another_owner(service: Served) -> None:
    _, made = await service.ask("POST", "/v1/sandboxes", json={})
    _, described = await service.ask("GET", "/openapi.json")
    tokens = {"expired": ("ann", "--days", "1e-9"), "revoked": ("ann",), "rotated": ("ann",)}
    for name, arguments in tokens.items():
        tokens[name] = roll_sandbox("token", "create", *arguments, "--database", service.database)
    roll_sandbox("token", "revoke", tokens["revoked"].split("_")[1], "--database", service.database)
    fresh = roll_sandbox("token", "rotate", tokens["rotated"].split("_")[1], "--database", service.database)
    assert (await service.ask("GET", "/v1/sandboxes", fresh))[0] == 200
    wrong = service.tokens["ann"][:-1] + ("a" if service.tokens["ann"][-1] != "a" else "b")
    routes = [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]
    assert len(routes) >= 17
    for method, path in routes:
        path = path.replace("{name}", made["sandbox"]).replace("{session}", "0" * 32)
        path = path.replace("{program}", "0" * 32)
        assert (await service.ask(method, path, ""))[0] == 401
        if path.startswith("/v1/sandboxes/"):
            query = "?path=x" if path.endswith(("file", "directory", "archive")) else ""
            body = {"json": {"lifetime_s": 5, "command": "x"}} if path.endswith(("extend", "fork")) else {}
            body = {"json": {"source": "1", "command": "x"}} if path.endswith("run") else body
            body = {"json": {"command": "x"}} if path.endswith("0/run") else body
            body = {"json": {"source": "1"}} if path.endswith(made["sandbox"] + "/run") else body
            body = {"json": {"lifetime_s": 5}} if path.endswith(("extend", "fork")) else body
            body = {"json": {}} if path.endswith("sessions") else body
            assert (await service.ask(method, path + query, "ben", **body))[0] == 404, (method, path)
    for bad in (wrong, *tokens.values(), "roll_x", "x" * 5000):
        assert (await service.ask("GET", "/v1/sandboxes", bad))[0] == 401
    assert (await service.ask("POST", "/v1/sandboxes", "reader", json={}))[0] == 403
    assert (await service.ask("GET", "/metrics", "ann"))[0] == 403
    assert (await service.ask("GET", "/health/live", ""))[0] == 200
    assert (await service.ask("GET", "/no/such/route", "ann"))[0] in (403, 404)
    with pytest.raises(SandboxAccessError, match="rejected the token"):
        await connect(service.url, tokens["revoked"]).start()
    await service.ask("DELETE", f"/v1/sandboxes/{made['sandbox']}")
    kept = str(_rows(service, "SELECT * FROM tokens"))
    assert all(token.split("_", 2)[2] not in kept for token in service.tokens.values())
    if service.database.startswith("sqlite"):
        files = service.database.removeprefix("sqlite:///")
        kept = Path(files).read_bytes() + Path(f"{files}-wal").read_bytes()
        assert all(token.split("_", 2)[2].encode() not in kept for token in service.tokens.values())


async def test_sandbox_service_errors_are_typed_alike_through_the_client(service: Served) -> None:
    spec = SandboxSpec(limits=LIMITS)
    with pytest.raises(SandboxUnavailableError, match="cannot reach a sandbox service"):
        await connect("http://127.0.0.1:9", "x").start()
    async with connect(service.url, service.tokens["ben"], spec=spec, warm=0) as sandboxes:
        with pytest.raises(SandboxRequestError, match="mount of '/etc'"):
            await sandboxes.create(SandboxSpec(mounts=(Mount(source="/etc", target="/x"),)))
        held = [await sandboxes.create() for _ in range(3)]
        with pytest.raises(SandboxQuotaError, match="is 3 sandboxes: 3 are in use"):
            await sandboxes.create()
        await held[0].close()
        again = await sandboxes.create()
        assert (await again.execute(PythonCode(source="print(1)"))).ok
    with pytest.raises(SandboxQuotaError, match="allows 600 s"):
        async with connect(service.url, service.tokens["ben"], warm=0, lifetime_s=3600) as sandboxes:
            await sandboxes.create()


async def test_sandbox_service_a_lifetime_ends_what_runs_with_an_error_that_says_so(service: Served) -> None:
    async with connect(service.url, service.tokens["ben"], warm=0, lifetime_s=500.0) as sandboxes:
        sandbox = await sandboxes.create(SandboxSpec(limits=Limits(wall_s=60.0)))
        job = await sandbox.start(PythonCode(source="import time; print('runs', flush=True); time.sleep(50)"))
        async for _ in job.stream():
            break
        place = f"/v1/sandboxes/{sandbox.name}"
        _, before = await service.ask("GET", place, "ben")
        _, after = await service.ask("POST", f"{place}/extend", "ben", json={"lifetime_s": 0.1})
        assert 400 < before["expires"] - after["expires"] < 500
        with pytest.raises(SandboxExpiredError, match="end of its lifetime"):
            await job.wait()
        await sandbox.close()
        assert sandbox.has_ended


async def test_sandbox_service_what_is_too_large_or_malformed_is_refused(service: Served) -> None:
    assert (await service.ask("POST", "/v1/sandboxes", data=bytes(2**20 + 1)))[0] == 413
    status, said = await service.ask("POST", "/v1/sandboxes", json={"spec": {"limits": {"wall_s": "ten"}}})
    assert (status, said["error"]) == (400, "request") and "spec.limits.wall_s" in said["message"]
    status, said = await service.ask("POST", "/v1/sandboxes", json={"spec": {"limits": {"wall_s": -1}}})
    assert (status, said["error"]) == (400, "request") and "must be positive" in said["message"]
    assert (await service.ask("GET", "/v1/sandboxes/..%2f..%2fetc"))[0] in (404, 422)


async def test_sandbox_service_the_audit_log_has_who_and_what_but_no_body(service: Served) -> None:
    _, made = await service.ask("POST", "/v1/sandboxes", json={})
    await service.ask("POST", f"/v1/sandboxes/{made['sandbox']}/run", json={"source": "print('BODY-7')"})
    await service.ask("DELETE", f"/v1/sandboxes/{made['sandbox']}")
    log = service.directory / "audit.jsonl"
    while not any('"stop"' in line and made["sandbox"] in line for line in log.read_text().splitlines()):
        await asyncio.sleep(0.05)  # flushed twice a second
    text = log.read_text()
    assert "BODY-7" not in text and "roll_" not in text
    entries = [json.loads(line) for line in text.splitlines()]
    actions = [entry["action"] for entry in entries if entry.get("what") == made["sandbox"]]
    assert actions == ["create", "run", "stop"]
    assert _rows(service, f"SELECT state FROM sandboxes WHERE name = '{made['sandbox']}'") == [("ended",)]


def _rows(service: Served, statement: str) -> list[tuple[Any, ...]]:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    with sqlalchemy.create_engine(service.database).connect() as connection:
        return [tuple(row) for row in connection.execute(sqlalchemy.text(statement))]


async def test_sandbox_service_a_token_that_is_revoked_ends_open_lines(service: Served) -> None:
    from roll_sandbox.service.service import _TOKEN_CHECK_INTERVAL_S

    assert _TOKEN_CHECK_INTERVAL_S <= 1.0  # docs/sandbox-service.md: within two seconds
    token = roll_sandbox("token", "create", "eve", "--database", service.database)
    bearer = {"Authorization": f"Bearer {token}"}
    async with service.http.ws_connect(f"{service.url}/v1/line", headers=bearer) as line:
        assert (await line.receive()).type == aiohttp.WSMsgType.BINARY
        roll_sandbox("token", "revoke", token.split("_")[1], "--database", service.database)
        async with asyncio.timeout(30.0):
            assert (await line.receive()).type == aiohttp.WSMsgType.CLOSE
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await service.http.ws_connect(f"{service.url}/v1/line", headers=bearer)
    assert refused.value.status == 401


async def test_sandbox_service_a_quota_that_is_set_holds_in_a_server_that_runs(service: Served) -> None:
    database = ("--database", service.database)
    service.tokens["max"] = roll_sandbox("token", "create", "max", *database)
    said = roll_sandbox("quota", "set", "max", "--sandboxes", "1", "--cpu", "2", "--memory", "1.5GiB", *database)
    assert said == "max  sandboxes=1  memory=1,610,612,736  cpu=2"
    assert said in roll_sandbox("quota", "list", *database).splitlines()
    big = {"spec": {"limits": {"cpu_s": 3.0}}}
    while (answer := await service.ask("POST", "/v1/sandboxes", "max", json=big))[0] == 201:
        await service.ask("DELETE", f"/v1/sandboxes/{answer[1]['sandbox']}", "max")
    assert answer[0] == 429 and "requests 3 s of CPU time" in answer[1]["message"]
    status, made = await service.ask("POST", "/v1/sandboxes", "max", json={"spec": SPEC})
    assert status == 201
    status, refused = await service.ask("POST", "/v1/sandboxes", "max", json={"spec": SPEC})
    assert (status, refused["error"]) == (429, "quota") and "roll-sandbox quota set max" in refused["message"]
    place = f"/v1/sandboxes/{made['sandbox']}"
    status, spent = await service.ask("POST", f"{place}/run", "max", json={"source": "while True: pass", "wall_s": 20})
    assert (status, spent["outcome"]) == (200, "cpu_time")
    more = {"source": "1", "cpu_s": 9.0}
    assert (await service.ask("POST", f"{place}/run", "max", json=more))[0] == 429
    await service.ask("DELETE", place, "max")
    assert roll_sandbox("quota", "set", "max", *[f"--{each}=default" for each in ("sandboxes", "cpu", "memory")],
                        *database) == "max  default"  # fmt: skip
    assert roll_sandbox("quota", "show", "max", *database) == "max  default"
