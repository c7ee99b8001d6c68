"""What HTTP clients have beyond the plain routes: keys, recorded ends, archives, streams, pages, and TLS."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import ssl
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sandbox.conftest import missing, roll_sandbox, served

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from roll_sandbox import OversizedUploadError, PythonCode, SandboxRequestError, SandboxUnavailableError, connect
from roll_sandbox.service.archives import check_archive

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Caller:
    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.http, self.url, self.token = http, url, token

    async def ask(self, method: str, path: str, key: str = "", **settings: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"} | ({"Idempotency-Key": key} if key else {})
        async with self.http.request(method, self.url + path, headers=headers, **settings) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if body and answer.content_type == "application/json" else body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Caller]:
    if reason := missing("service"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("http")
    with served(directory, "--warm", "0", "--audit", str(directory / "audit.jsonl")) as (url, _):
        database = f"sqlite:///{directory}/sandboxes.db"
        async with aiohttp.ClientSession() as http:
            yield Caller(http, url, roll_sandbox("token", "create", "ann", "--database", database))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(caller: Caller) -> str:
    _, made = await caller.ask("POST", "/v1/sandboxes", key="the-one-world", json={})
    return f"/v1/sandboxes/{made['sandbox']}"


async def test_sandbox_service_http_the_same_key_is_the_same_sandbox_and_the_same_program(
    caller: Caller, place: str
) -> None:
    assert place.endswith("/the-one-world")
    again = await asyncio.gather(*(caller.ask("POST", "/v1/sandboxes", key="the-twin-1", json={}) for _ in range(4)))
    assert [(status, made.get("sandbox", made)) for status, made in again] == [(201, "the-twin-1")] * 4
    other = {"spec": {"limits": {"wall_s": 5.0}}}
    assert (await caller.ask("POST", "/v1/sandboxes", key="the-twin-1", json=other))[0] == 400
    assert (await caller.ask("DELETE", "/v1/sandboxes/the-twin-1"))[0] == 204
    assert (await caller.ask("POST", "/v1/sandboxes", key="the-twin-1", json={}))[0] == 404
    program = {"argv": ["bash", "-c", "sleep 0.2; echo x >> count; wc -l < count"]}
    runs = [caller.ask("POST", f"{place}/run", key="program-1", json=program) for _ in range(3)]
    results = [*await asyncio.gather(*runs), await caller.ask("POST", f"{place}/run", key="program-1", json=program)]
    assert [(status, said["stdout"]) for status, said in results] == [(200, "1\n")] * 4
    status, ended = await caller.ask("GET", f"{place}/programs/program-1")
    assert (status, ended["state"], ended["result"]["exit_code"]) == (200, "ended", 0)
    assert ended["result"]["output_kept"] is False
    for number in range(65):  # a worker keeps the output of 64
        await caller.ask("POST", f"{place}/run", key=f"program-more-{number}", json={"argv": ["true"]})
    status, late = await caller.ask("POST", f"{place}/run", key="program-1", json=program)
    assert (status, late["exit_code"], late["stdout"], late["output_kept"]) == (200, 0, "", False)
    assert (await caller.ask("GET", f"{place}/file?path=count"))[1] == b"x\n"
    assert (await caller.ask("GET", f"{place}/programs/program-9"))[0] == 404


async def test_sandbox_service_http_shells_that_cannot_be_are_the_callers_fault(caller: Caller, place: str) -> None:
    assert (await caller.ask("POST", f"{place}/sessions", json={"cwd": "no/such/place"}))[0] == 400
    _, made = await caller.ask("POST", f"{place}/sessions", json={})
    inside = f"{place}/sessions/{made['session']}"
    await caller.ask("POST", f"{inside}/run", json={"command": "exit 3"})
    assert (await caller.ask("POST", f"{inside}/run", json={"command": "true"}))[0] == 404


async def test_sandbox_service_http_lists_come_in_pages(caller: Caller, place: str) -> None:
    for name in ("page-aaaa", "page-bbbb", "page-cccc"):
        await caller.ask("POST", "/v1/sandboxes", key=name, json={})
    _, first = await caller.ask("GET", "/v1/sandboxes?after=page&limit=2".replace("=page&", "=page-000&"))
    _, second = await caller.ask("GET", "/v1/sandboxes?after=page-bbbb&limit=1")
    assert [each["sandbox"] for each in (*first, *second)] == ["page-aaaa", "page-bbbb", "page-cccc"]
    assert (await caller.ask("GET", "/v1/sandboxes?limit=0"))[0] == 422
    for name in ("page-aaaa", "page-bbbb", "page-cccc"):
        await caller.ask("DELETE", f"/v1/sandboxes/{name}")


def archive(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, mode: str = "w") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as made:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    return sink.getvalue()


async def test_sandbox_service_http_directories_go_up_and_down_as_archives(caller: Caller, place: str) -> None:
    up = archive(("a/b", b"1"), ("c", b"\x00\xff"))
    assert (await caller.ask("PUT", f"{place}/archive?path=d", data=up))[0] == 204
    await caller.ask("POST", f"{place}/run", json={"argv": ["ln", "-s", "/etc", "d/link"]})
    status, down = await caller.ask("GET", f"{place}/archive?path=d")
    with tarfile.open(fileobj=io.BytesIO(down)) as made:
        files = {each.name: made.extractfile(each).read() for each in made if each.isreg()}
        assert files == {"a/b": b"1", "c": b"\x00\xff"} and "link" not in made.getnames()
    assert status == 200
    assert (await caller.ask("GET", f"{place}/archive?path=nowhere"))[0] == 422
    through = archive(("link/x", b"1"))
    assert (await caller.ask("PUT", f"{place}/archive?path=d", data=through))[0] == 422


@pytest.mark.parametrize(
    "hostile",
    [
        archive(("../x", b"1")),
        archive(("a/../../x", b"1")),
        archive(("/etc/x", b"1")),
        archive(("x", b""), kind=tarfile.SYMTYPE),
        archive(("x", b""), kind=tarfile.LNKTYPE),
        archive(("x", b""), kind=tarfile.CHRTYPE),
        archive(("x", b""), kind=tarfile.FIFOTYPE),
        archive(("x", bytes(10**6)), mode="w:gz"),
        b"",
        b"not an image archive" * 100,
    ],
)
async def test_sandbox_service_http_hostile_archives_are_refused(hostile: bytes) -> None:
    with pytest.raises(SandboxRequestError):
        check_archive(hostile, 2**24, 100)


async def test_sandbox_service_http_compressed_archives_are_refused_at_every_time() -> None:
    # The time in the header of gzip changes the sum of the first block, which must never pass for a header of tar.
    compressed = archive(("x", bytes(10**6)), mode="w:gz")
    for second in range(256):
        with pytest.raises(SandboxRequestError, match="uncompressed"):
            check_archive(compressed[:4] + bytes([second]) + compressed[5:], 2**24, 100)


async def test_sandbox_service_http_archives_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OversizedUploadError):
        check_archive(archive(("x", bytes(1000))), 999, 100)
    with pytest.raises(OversizedUploadError):
        check_archive(archive(*((str(number), b"") for number in range(101))), 2**24, 100)


async def test_sandbox_service_http_output_is_streamed_as_json(caller: Caller, place: str) -> None:
    headers = {"Authorization": f"Bearer {caller.token}"}
    async with caller.http.ws_connect(caller.url + f"{place}/stream", headers=headers) as socket:
        await socket.send_json({"run": {"source": "print(1, flush=True); print(input()); raise SystemExit(3)"}})
        first = await socket.receive_json()
        assert first == {"stream": "stdout", "data": base64.b64encode(b"1\n").decode()}
        await socket.send_json({"input": base64.b64encode(b"two\n").decode()})
        assert base64.b64decode((await socket.receive_json())["data"]) == b"two\n"
        end = (await socket.receive_json())["end"]
        assert (end["outcome"], end["exit_code"]) == ("exited", 3)
    for bad in ([], {"run": {}}, {"run": {"argv": ["x"]}, "key": "../x"}, {"run": {"argv": ["\0"]}}, {"walk": 1}):
        async with caller.http.ws_connect(caller.url + f"{place}/stream", headers=headers) as socket:
            await socket.send_json(bad)
            assert (await socket.receive_json())["error"] == "request", bad


async def test_sandbox_service_http_after_a_restart_sandboxes_and_sessions_are_lost_and_say_so(tmp_path: Path) -> None:
    if reason := missing("service"):
        pytest.skip(reason)
    async with aiohttp.ClientSession() as http:
        with served(tmp_path, "--warm", "0") as (url, token):
            caller = Caller(http, url, token)
            await caller.ask("POST", "/v1/sandboxes", key="world-of-old", json={})
            _, session = await caller.ask("POST", "/v1/sandboxes/world-of-old/sessions", json={})
            unknown = session["session"].replace("-", "-0")[:-1]
            assert (await caller.ask("DELETE", f"/v1/sandboxes/world-of-old/sessions/{unknown}"))[0] == 404
            earlier = "0" * 12 + "-" + "0" * 32
            status, said = await caller.ask("DELETE", f"/v1/sandboxes/world-of-old/sessions/{earlier}")
            assert (status, said["error"]) == (410, "lost")


async def test_sandbox_service_http_tls_end_to_end(tmp_path: Path) -> None:
    if missing("service") or not shutil.which("openssl"):
        pytest.skip("bubblewrap or openssl is not installed")
    for name in ("good", "other"):
        files = [
            "-keyout",
            str(tmp_path / f"{name}.key"),
            "-out",
            str(tmp_path / f"{name}.pem"),
            "-nodes",
            "-days",
            "2",
        ]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(["openssl", "req", "-x509", *curve, *files, *named], check=True, capture_output=True)
    tls = ["--certificate", str(tmp_path / "good.pem"), "--key", str(tmp_path / "good.key")]
    with served(tmp_path, "--warm", "0", *tls) as (url, token):
        assert url.startswith("https://")
        async with connect(url, token, warm=0, ca_file=tmp_path / "good.pem") as sandboxes:
            assert (await sandboxes.execute(PythonCode(source="print(1)"))).stdout == b"1\n"
        for wrong in ({"ca_file": tmp_path / "other.pem"}, {}):
            with pytest.raises(SandboxUnavailableError, match="certificate"):
                await connect(url, token, warm=0, **wrong).start()
        trusted = ssl.create_default_context(cafile=tmp_path / "good.pem")
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{url}/v1/sandboxes", ssl=trusted, headers={"Authorization": f"Bearer {token}"}) as answer,
        ):
            assert (answer.status, await answer.json()) == (200, [])
