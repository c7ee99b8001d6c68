"""ROCK's REST routes, asked as its SDK asks (`rock/sdk/sandbox/client.py`, 1.11), through a `roll-sandbox serve`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sandbox.conftest import missing, roll_sandbox, served

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Rock:
    """A caller in ROCK's words."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self.http, self.url, self.headers = http, url + "/apis/envs/sandbox/v1", headers

    async def ask(self, method: str, path: str, **settings: Any) -> dict[str, Any]:
        async with self.http.request(method, f"{self.url}/{path}", headers=self.headers, **settings) as answer:
            return await answer.json() | {"http": answer.status}

    async def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        return await self.ask("POST", path, json=body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rock]:
    if reason := missing("service"):
        pytest.skip(reason)
    directory: Path = tmp_path_factory.mktemp("rock")
    with served(directory, "--warm", "0") as (url, _):
        token = roll_sandbox("token", "create", "ann", "--database", f"sqlite:///{directory}/sandboxes.db")
        async with aiohttp.ClientSession() as http:
            yield Rock(http, url, {"X-Cluster": "zb-a", "XRL-Authorization": f"Bearer {token}"})


START = {
    "image": "python:3.11",
    "image_os": "linux",
    "auto_clear_time": 5,
    "auto_clear_time_minutes": 5,
    "startup_timeout": 180.0,
    "memory": "256m",
    "cpus": 2,
    "num_gpus": None,
    "sandbox_id": None,
    "disk": "50G",
}


async def test_sandbox_service_rock_what_the_sdk_asks_for_is_done(rock: Rock) -> None:
    made = await rock.post("start_async", **START)
    assert made["status"] == "Success"
    name = made["result"]["sandbox_id"]
    status = (await rock.ask("GET", f"get_status?sandbox_id={name}&include_all_states=False"))["result"]
    assert (status["sandbox_id"], status["is_alive"], status["state"]) == (name, True, "running")
    said = await rock.post(
        "execute", sandbox_id=name, command=["sh", "-c", "echo $A; exit 3"], timeout=60, cwd=None, env={"A": "b"}
    )
    assert said["result"] == {"stdout": "b\n", "stderr": "", "exit_code": 3}
    session = {"sandbox_id": name, "session": "s"}
    opened = await rock.post(
        "create_session", **session, session_type="bash", startup_source=[], env_enable=False, env={"X": "1"}
    )
    assert opened["result"] == {"output": "", "session_type": "bash"}
    await rock.post("run_in_session", **session, command="Y=2", action_type="bash", check="raise", timeout=None)
    said = await rock.post(
        "run_in_session", **session, command=r"printf '\e[1;31m%s\e[0m\n' $X$Y; echo e >&2; (exit 4)", check="silent"
    )
    assert (said["result"]["output"], said["result"]["exit_code"]) == ("12\ne", 4)
    said = await rock.post("run_in_session", **session, command="(exit 4)", check="raise")
    assert (said["status"], said["result"]["code"]) == ("Failed", 6000)
    said = await rock.post("run_in_session", **session, command="sleep 9", check="raise", timeout=0.2)
    assert (said["status"], said["result"]["code"]) == ("Failed", 6000)
    assert (await rock.post("write_file", sandbox_id=name, path="/tmp/a", content="é\n"))["result"]["success"]
    assert (await rock.post("read_file", sandbox_id=name, path="/tmp/a"))["result"] == {"content": "é\n"}
    form = aiohttp.FormData({"target_path": "/tmp/b", "sandbox_id": name})
    form.add_field("file", b"\x00\r\n--x\xff", filename="b.bin", content_type="application/octet-stream")
    assert (await rock.ask("POST", "upload", data=form))["result"]["success"]
    said = await rock.post("execute", sandbox_id=name, command="od -An -tx1 /tmp/b", timeout=60)
    assert said["result"]["stdout"].split() == ["00", "0d", "0a", "2d", "2d", "78", "ff"]
    assert (await rock.post("close_session", **session, session_type="bash"))["status"] == "Success"
    assert [each["sandbox_id"] for each in (await rock.ask("GET", "sandboxes"))["result"]["items"]] == [name]
    assert (await rock.post("stop", sandbox_id=name))["status"] == "Success"
    gone = await rock.ask("GET", f"get_status?sandbox_id={name}")
    assert (gone["http"], gone["status"], gone["result"]["code"]) == (200, "Failed", 4000)
    gone = (await rock.ask("GET", f"get_status?sandbox_id={name}&include_all_states=True"))["result"]
    assert (gone["state"], gone["is_alive"]) == ("stopped", False)
    assert not (await rock.ask("GET", f"is_alive?sandbox_id={name}"))["result"]["is_alive"]
    other = await rock.ask("GET", f"get_status?sandbox_id={'x' * 8}&include_all_states=True")
    assert (other["status"], other["result"]["code"]) == ("Failed", 4000)


async def test_sandbox_service_rock_what_is_not_offered_or_malformed_fails_in_rocks_words(rock: Rock) -> None:
    for path in ("restart", "commit"):
        said = await rock.post(path, sandbox_id="x" * 8)
        assert (said["http"], said["status"], said["result"]["code"]) == (200, "Failed", 4000)
    for form in ({"target_path": "x"}, {"sandbox_id": "x" * 8, "target_path": "x"}, {"other": "x"}):
        said = await rock.ask("POST", "upload", data=aiohttp.FormData(form, default_to_multipart=True))
        assert (said["http"], said["status"], said["result"]["code"]) == (200, "Failed", 4000)
    said = await rock.post("execute")
    assert said["result"]["code"] == 4000
    for body in (
        {"memory": "lots"},
        {"memory": "1i"},
        {"num_gpus": 1},
        {"sandbox_id": "../x"},
        {"auto_clear_time_minutes": 10**9},
    ):
        said = await rock.post("start_async", **{**START, **body})
        assert (said["status"], said["result"]["code"]) == ("Failed", 4000), body


async def test_sandbox_service_rock_a_token_may_be_the_urls_password_on_these_routes_only(rock: Rock) -> None:
    token = rock.headers["XRL-Authorization"].split()[1]
    basic = {"Authorization": "Basic " + base64.b64encode(f"rock:{token}".encode()).decode()}
    assert (await Rock(rock.http, rock.url[:-21], basic).ask("GET", "sandboxes"))["status"] == "Success"
    for headers in (basic, rock.headers):
        async with rock.http.get(rock.url[:-21] + "/v1/sandboxes", headers=headers) as answer:
            assert answer.status == 401
