"""Nobody reads without the token, and no other site reads through somebody's browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from unit.dashboard.conftest import client_of, endpoints, ids

from roll.cli.main import run as roll
from roll.dashboard import serving
from roll.dashboard.access import build_cookie_name
from roll.dashboard.rollouts import encode_row
from roll.errors import ConfigError

MakeRun = Callable[..., Path]
TOKEN = "t0ken-of-this-server"
COOKIE = build_cookie_name(TOKEN)


def everywhere(path: Path) -> TestClient:
    return client_of(path, host="0.0.0.0", token=TOKEN, own="http://machine.example:7265")


def test_dashboard_access_without_the_token_nothing_at_all_is_answered(make_run: MakeRun) -> None:
    path = make_run()
    client = everywhere(path)
    run = ids(client_of(path))["demo"]
    wrong: tuple[dict[str, str], ...] = (
        {}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"{COOKIE}="}, {"Cookie": f"{COOKIE}={TOKEN[:-1]}"}, {"Cookie": "\x00;=;"},
    )  # fmt: skip
    for url in (
        "/",
        "/static/x.js",
        "/api/runs",
        f"/api/runs/{run}/events",
        *endpoints(run, encode_row(1, "train", 0)),
    ):
        for headers in wrong:
            assert client.get(url, headers=headers).status_code == 401, (url, headers)
        assert client.get(url, params={"token": "wrong"}).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_dashboard_access_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(make_run: MakeRun) -> None:
    client = everywhere(make_run())
    answer = client.get("/?token=t0ken-of-this-server&view=%23%2Foverview")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?view=%23%2Foverview"
    cookie = answer.headers["set-cookie"]
    assert f"{COOKIE}={TOKEN}" in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert client.get("/api/runs", headers={"Cookie": f"{COOKIE}={TOKEN}"}).status_code == 200


def test_dashboard_access_a_redirect_never_leads_to_another_site(make_run: MakeRun) -> None:
    client = everywhere(make_run())
    for path in ("//evil.example/", "///evil.example", "/\\evil.example"):
        location = client.get(f"http://machine.example:7265{path}?token={TOKEN}").headers["location"]
        assert location.startswith("/") and not location.startswith(("//", "/\\")), location


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7265", "127.0.0.1.evil.example", "localhost@evil.example", "", "a b", "[::1"]
)
def test_dashboard_access_a_request_that_calls_this_machine_otherwise_is_refused(make_run: MakeRun, host: str) -> None:
    client = client_of(make_run())
    answer = client.get("/api/runs", headers={"Host": host})
    assert answer.status_code == 403
    assert "demo" not in answer.text


def test_dashboard_access_without_a_token_a_server_on_all_addresses_answers_to_no_name(make_run: MakeRun) -> None:
    client = client_of(make_run(), host="0.0.0.0", own="http://machine.example:7265")
    assert client.get("/api/runs").status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7265", "localhost", "LOCALHOST:8000", "[::1]:7265", "127.0.0.2"])
def test_dashboard_access_this_machine_has_several_names(make_run: MakeRun, host: str) -> None:
    assert client_of(make_run()).get("/api/runs", headers={"Host": host}).status_code == 200


def test_dashboard_access_everything_is_only_read(make_run: MakeRun) -> None:
    client = client_of(make_run())
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405
    head = client.head("/api/runs")
    assert (head.status_code, head.content) == (200, b"")


def test_dashboard_access_every_answer_forbids_foreign_scripts_frames_and_guesses(make_run: MakeRun) -> None:
    client = client_of(make_run())
    for url in ("/", "/api/runs", "/api/runs/none/facets", "/no/such", "/static/none.js"):
        headers = client.get(url).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self'") and "script-src" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert (
        client.get("/api/runs", headers={"Origin": "http://evil.example"})
        .headers.keys()
        .isdisjoint({"access-control-allow-origin", "access-control-allow-credentials"})
    )


def test_dashboard_access_other_addresses_get_a_token_and_this_machine_needs_none(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [listening.close() for listening in sockets])
    monkeypatch.setattr(serving.os, "nice", lambda by: 0)
    said: list[str] = []
    path = make_run()
    serving.serve([path], "127.0.0.1", 0, None, open_browser=False, notify=said.append)
    serving.serve([path], "0.0.0.0", 0, None, open_browser=False, notify=said.append)
    serving.serve([path], "127.0.0.1", 0, "mine-and-mine", open_browser=False, notify=said.append)
    assert "token" not in said[0] and said[0].split()[2].startswith("http://127.0.0.1:")
    assert len(said[1].split("?token=")[1].split()[0]) >= 32
    assert "?token=mine-and-mine" in said[2]
    assert threading.active_count() >= 1


@pytest.mark.parametrize("token", ["", "short", "with space", "a;b=cdefgh", "ümlautümlaut"])
def test_dashboard_access_a_token_that_is_none_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="--token must have"):
        serving.serve([tmp_path], "0.0.0.0", 0, token, open_browser=False, notify=print)


def test_dashboard_access_an_address_that_is_taken_is_said(make_run: MakeRun) -> None:
    taken = serving._listen("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
        serving.serve([make_run()], "127.0.0.1", port, None, open_browser=False, notify=print)
    taken.close()


def test_dashboard_access_a_run_that_is_not_there_is_named_with_those_that_are(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run("quickstart")
    assert roll(["dashboard", str(path.with_name("quikstart")), "--port", "0"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err


def test_dashboard_access_where_no_browser_opens_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    serving._open_browser("http://127.0.0.1:7265/", said.append)
    assert "open the address" in said[0]


def test_dashboard_access_who_is_told_the_address_can_connect_at_once() -> None:
    with serving._listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname(), timeout=5):
        pass


def test_dashboard_access_a_malformed_cookie_of_another_server_does_not_hide_ours(make_run: MakeRun) -> None:
    client = client_of(make_run(), token=TOKEN)
    for other in ('theme={"dark": 1}', "a b=c", "=", 'x="y'):
        cookies = f"{other}; {build_cookie_name(TOKEN)}={TOKEN}; {other}"
        assert client.get("/api/runs", headers={"Cookie": cookies}).status_code == 200


def test_dashboard_access_a_web_socket_is_refused(make_run: MakeRun) -> None:
    client = client_of(make_run())
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/runs"):
        pass
