"""One rule for every HTTP client: the environment names proxies, and this machine is reached without one."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roll.config.rewards import JudgeReward
from roll.envs.tools.search import HttpSearch
from roll.errors import ConfigError
from roll.process_environment import prepare_environment
from roll.proxies import describe_proxy, exclude_local_host_from_proxy, find_proxy, is_local_host, make_client_session
from roll.rewards.judge.chat import EndpointChat
from roll.types import Message
from roll_sandbox.images.names import ImageReference
from roll_sandbox.images.registry import RegistrySource
from roll_sandbox.remote.calls import call_service

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *map(str.upper, NAMES)):
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)


class Server(ThreadingHTTPServer):
    """A proxy, or a server: answers whatever it is asked, and remembers what that was."""

    def __init__(self, answer: object) -> None:
        self.asked: list[str] = []
        outer, body = self, json.dumps(answer).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def serve() -> Iterator[object]:
    servers: list[Server] = []

    def start(answer: object) -> Server:
        servers.append(Server(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("run.localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", True),
        ("::", True),
        (socket.gethostname(), True),
        ("localhost.example.com", False),
        ("10.0.0.1", False),
        ("8.8.8.8", False),
        ("fe80::1%eth0", False),
        ("", False),
    ],
)
def test_proxies_know_this_machine(host: str, own: bool) -> None:
    assert is_local_host(host) is own


@pytest.mark.parametrize(
    ("excepted", "url", "used"),
    [
        ("", "http://judge.example.com/v1", True),
        ("judge.example.com", "http://judge.example.com/v1", False),
        ("example.com", "http://judge.example.com/v1", False),
        (".example.com", "http://judge.example.com/v1", False),
        ("*.example.com", "http://judge.example.com/v1", False),
        ("ample.com", "http://judge.example.com/v1", True),
        ("other.com, JUDGE.example.com", "http://Judge.Example.com/v1", False),
        ("*", "http://judge.example.com/v1", False),
        ("judge.example.com:8000", "http://judge.example.com:8000/v1", False),
        ("judge.example.com:8000", "http://judge.example.com:9000/v1", True),
        ("judge.example.com:80", "http://judge.example.com/v1", False),
        ("10.0.0.0/8", "http://10.1.2.3:8000", False),
        ("10.0.0.0/8", "http://11.1.2.3:8000", True),
        ("10.1.2.3", "http://10.1.2.3:8000", False),
        ("0.1.2.3", "http://10.0.1.2.3.example.com", True),
        ("fd00::/8", "http://[fd00::1]:8000", False),
        ("fd00::1", "http://[fd00::1]:8000", False),
        (" , ,/, :80,[", "http://judge.example.com/v1", True),
    ],
)
def test_proxies_are_not_used_for_what_no_proxy_lists(
    monkeypatch: pytest.MonkeyPatch, excepted: str, url: str, used: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.net:3128")
    monkeypatch.setenv("NO_PROXY", excepted)
    assert find_proxy(url) == ("http://proxy.example.net:3128" if used else None)


def test_proxies_are_chosen_by_scheme_and_socks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example.net:1")
    assert (find_proxy("https://a.com"), find_proxy("wss://a.com")) == ("http://proxy.example.net:1",) * 2
    assert find_proxy("http://a.com") is None
    monkeypatch.setenv("all_proxy", "socks5://user:secret@other.example.net:2")
    assert find_proxy("https://a.com") == "http://proxy.example.net:1"
    with pytest.raises(ConfigError, match=r"'socks5://other\.example\.net' for http://a\.com.*HTTP_PROXY") as refused:
        find_proxy("http://a.com")
    assert "secret" not in str(refused.value)
    assert find_proxy("http://127.0.0.1:1") is None


def test_proxies_are_named_without_their_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.example.net:3128")
    said = describe_proxy("http://a.com")
    assert said == " (through the proxy proxy.example.net:3128; to bypass it, add the host to NO_PROXY)"
    assert describe_proxy("http://localhost:1") == ""


def test_environments_of_programs_reach_this_machine_without_a_proxy() -> None:
    assert exclude_local_host_from_proxy({"A": "b"}) == {"A": "b"}
    local = "localhost,127.0.0.1,::1,0.0.0.0"
    plain = exclude_local_host_from_proxy({"HTTP_PROXY": "http://p:1"})
    assert (plain["NO_PROXY"], plain["no_proxy"]) == (local, local)
    listed = exclude_local_host_from_proxy({"https_proxy": "http://p:1", "no_proxy": "a.com, localhost"})
    assert listed["NO_PROXY"] == listed["no_proxy"] == "a.com,localhost,127.0.0.1,::1,0.0.0.0"
    assert exclude_local_host_from_proxy({"ALL_PROXY": "http://p:1", "NO_PROXY": "*"})["no_proxy"] == "*"
    assert exclude_local_host_from_proxy(listed) == listed
    assert "NO_PROXY" not in exclude_local_host_from_proxy({"HTTP_PROXY": ""})


def test_proxies_programs_that_are_started_reach_this_machine_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    """What other libraries' clients do in a child process: here Python's own."""
    proxy, server = serve("proxy"), serve("server")
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    for name in ("no_proxy", "NO_PROXY"):  # what `prepare_environment` sets is undone after the test
        monkeypatch.setenv(name, "")
    prepare_environment()
    program = f"import urllib.request as r; print(r.urlopen({server.url + '/a'!r}).read())"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    )
    assert "server" in said.stdout and (proxy.asked, server.asked) == ([], ["/a"])


async def test_proxies_sessions_use_the_proxy_for_others_and_none_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    proxy, server = serve("proxy"), serve("server")
    monkeypatch.setenv("http_proxy", proxy.url)
    for url, answer in (("http://elsewhere.invalid/a", '"proxy"'), (f"{server.url}/b", '"server"')):
        async with make_client_session(url) as session, session.get(url) as response:
            assert await response.text() == answer
    assert (proxy.asked, server.asked) == (["http://elsewhere.invalid/a"], ["/b"])


@pytest.mark.parametrize("place", ["elsewhere", "here"])
async def test_proxies_judges_searches_sandboxes_and_registries_keep_the_rule(
    monkeypatch: pytest.MonkeyPatch, serve: Any, place: str
) -> None:
    answer = {
        "choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}],
        "result": [[{"document": {"contents": "title\ntext"}}]],
    }
    proxy, server = serve(answer), serve(answer)
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    url = server.url if place == "here" else "http://elsewhere.invalid"
    asked = server.asked if place == "here" else proxy.asked

    judge = EndpointChat(JudgeReward(type="judge", rubric="quality", url=f"{url}/v1", model="m", max_attempts=1))
    try:
        assert await judge.generate_reply([Message(role="user", content="?")], {}) == "fine"
    finally:
        await judge.close()
    assert "title" in await HttpSearch(url).call({"query": "x"})
    assert await call_service(url, "token", "GET", "/v1/sandboxes") == answer
    with pytest.raises(Exception, match="is not a supported image"):
        RegistrySource(
            ImageReference(registry=url.removeprefix("http://"), repository="a/b", version="c"), insecure=True
        )
    assert len(asked) == 4 and not (proxy if place == "here" else server).asked


def test_proxies_have_one_place_in_each_library() -> None:
    """Whoever adds a client takes a session from `roll.proxies`, or from `roll_sandbox.proxies`."""
    root = Path(__file__).parents[2]
    own = re.compile(r"aiohttp\.ClientSession\(|urllib\.request\.urlopen|httpx\.|^import requests|^from requests", re.M)
    found = {
        str(path.relative_to(source))
        for source in (root / "src", root / "packages" / "roll-sandbox" / "src")
        for path in source.rglob("*.py")
        if own.search(path.read_text(encoding="utf-8"))
    }
    # the second one asks for the proxy of each request
    assert found == {"roll_sandbox/proxies.py", "roll/envs/http_host.py"}
