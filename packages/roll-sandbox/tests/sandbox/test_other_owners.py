"""What one owner has does not exist for another: every route answers as for a name of nobody's.

The routes are those of the OpenAPI: a new one fails here until it is said what a request to it looks like.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sandbox.conftest import missing, roll_sandbox, served
from sandbox.test_service_http import Caller

from roll_sandbox import SandboxSpec, UnknownSandboxError
from roll_sandbox.remote import RemoteRuntime

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME, NOBODYS = "the-world-of-ann", "the-world-of-0mm"
SESSION, PROGRAM = "5e551011", "the-program"
ROCK_PREFIX = "/apis/envs/sandbox/v1/"
BODIES: dict[str, dict[str, Any]] = {
    "run": {"argv": ["true"]},
    "sessions": {},
    "sessions/run": {"command": "true"},
    "extend": {"lifetime_s": 5.0},
    "fork": {"lifetime_s": 5.0},
    "execute": {"command": ["true"]},
    "run_in_session": {"command": "true", "session": SESSION},
    "create_session": {"session": SESSION},
    "close_session": {"session": SESSION},
    "read_file": {"path": "kept"},
    "write_file": {"path": "kept", "content": "spoilt"},
    "delete": {},
    "stop": {},
}
WITHOUT_BODY = {"GET", "DELETE"}
RAW = {"file", "archive", "restore", "snapshot"}
NO_NAME = {
    *("/health/ready", "/metrics", "/v1/sandboxes", "/v1/workers"),
    *(ROCK_PREFIX + each for each in ("start", "start_async", "sandboxes", "get_token", "commit", "restart")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Caller, Caller]]:
    if reason := missing("service"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("owners")
    with served(directory, "--warm", "0") as (url, _):
        database = ("--database", f"sqlite:///{directory}/sandboxes.db")
        tokens = [roll_sandbox("token", "create", each, *database) for each in ("ann", "ben")]
        async with aiohttp.ClientSession() as http:
            yield Caller(http, url, tokens[0]), Caller(http, url, tokens[1])


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("kept"), io.BytesIO(b""))
    return buffer.getvalue()


async def asked(caller: Caller, method: str, path: str, name: str) -> tuple[int, str]:
    """The answer to a right request, with the name taken out."""
    last = path.rpartition("/")[2]
    kind = "sessions/run" if path.endswith("/{session}/run") else last
    if last in ("{name}", "{session}", "{program}", "directory", "is_alive", "get_status"):
        assert method in WITHOUT_BODY
    settings: dict[str, Any] = {"params": {"path": "kept"} if last in ("file", "directory", "archive") else {}}
    if path.startswith(ROCK_PREFIX):
        if method == "GET":
            settings["params"] = {"sandbox_id": name}
        elif kind == "upload":
            form = aiohttp.FormData({"target_path": "kept", "sandbox_id": name})
            form.add_field("file", b"spoilt", filename="kept")
            settings["data"] = form
        else:
            settings["json"] = BODIES[kind] | {"sandbox_id": name}
    elif method not in WITHOUT_BODY:
        settings |= {"data": tar()} if kind in RAW else {"json": BODIES[kind]}
    place = path.format(name=name, session=SESSION, program=PROGRAM)
    status, said = await caller.ask(method, place, **settings)
    return status, json.dumps(said if not isinstance(said, bytes) else said.decode()).replace(name, "NAME")


async def test_sandbox_owner_every_route_answers_another_owner_as_if_there_were_nothing(
    owners: tuple[Caller, Caller],
) -> None:
    ann, ben = owners
    assert (await ann.ask("POST", "/v1/sandboxes", key=NAME, json={}))[0] == 201
    place = f"/v1/sandboxes/{NAME}"
    assert (await ann.ask("PUT", f"{place}/file?path=kept", data=b"ann's"))[0] in (200, 204)
    assert (await ann.ask("POST", f"{place}/run", key=PROGRAM, json={"argv": ["echo", "secret"]}))[0] == 200
    _, before = await ann.ask("GET", place)
    _, schema = await ben.ask("GET", "/openapi.json")
    routes = [(method.upper(), path) for path, kinds in schema["paths"].items() for method in kinds]
    of_a_sandbox = [each for each in routes if each[1] not in NO_NAME and not each[1].startswith("/v1/workers/")]
    assert len(of_a_sandbox) >= 25
    for method, path in of_a_sandbox:
        status, said = await asked(ben, method, path, NAME)
        assert (status, said) == await asked(ben, method, path, NOBODYS), (method, path)
        assert status == (200 if path.startswith(ROCK_PREFIX) else 404), (method, path, said)
        assert "secret" not in said and "ann" not in said
    assert (await ben.ask("GET", "/v1/sandboxes"))[1] == []
    _, listed = await ben.ask("GET", ROCK_PREFIX + "sandboxes")
    assert NAME not in json.dumps(listed)
    _, after = await ann.ask("GET", place)
    assert after | {"expires": 0} == before | {"expires": 0} and abs(after["expires"] - before["expires"]) < 1
    assert (await ann.ask("GET", f"{place}/file?path=kept")) == (200, b"ann's")
    assert (await ben.ask("POST", "/v1/sandboxes", key=NAME, json={}))[0] == 201  # a name is an owner's own
    assert (await ben.ask("GET", f"{place}/file?path=kept"))[0] == 422
    assert (await ben.ask("DELETE", place))[0] == 204
    assert (await ann.ask("GET", f"{place}/file?path=kept")) == (200, b"ann's")


async def test_sandbox_owner_sockets_answer_another_owner_as_if_there_were_nothing(
    owners: tuple[Caller, Caller],
) -> None:
    ann, ben = owners
    name = "ann-has-one-more"
    assert (await ann.ask("POST", "/v1/sandboxes", key=name, json={}))[0] == 201
    answers = []
    for each in (name, NOBODYS):
        address, headers = f"{ben.url}/v1/sandboxes/{each}/stream", {"Authorization": f"Bearer {ben.token}"}
        async with ben.http.ws_connect(address, headers=headers) as socket:
            await socket.send_json({"run": {"argv": ["true"]}})
            answers.append(json.dumps(await socket.receive_json()).replace(each, "NAME"))
    assert answers[0] == answers[1] and json.loads(answers[0])["error"] == "unknown"
    runtime = RemoteRuntime(ben.url, ben.token)
    await runtime.start()
    try:
        for each in (name, NOBODYS):
            with pytest.raises(UnknownSandboxError):
                await runtime.attach(each, SandboxSpec())
            with pytest.raises(UnknownSandboxError):
                await runtime.inspect(each)
    finally:
        await runtime.close()
    assert (await ann.ask("GET", f"/v1/sandboxes/{name}"))[1]["state"] == "running"
