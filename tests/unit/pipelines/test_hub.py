"""Uploading an export, against a hub on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from roll.errors import HubError
from roll.pipelines.exporting import check_hub, upload


class Hub(ThreadingHTTPServer):
    """Takes a commit as the hub does, or answers everything with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.status != 200:
            self._answer({"error": "no"}, self.server.status)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.address}/me/model"})
        elif self.path.startswith("/api/models/me/model/preupload/"):
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif self.path.startswith("/api/models/me/model/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{self.server.address}/me/model/commit/1234"
            self._answer({"success": True, "commitUrl": address, "commitOid": "1234"})
        else:
            self._answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self._answer({"sha": "0", "id": "me/model", "siblings": []}, self.server.status)

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n# model\n")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_hub_upload_every_file_is_uploaded_in_one_commit_to_a_private_repository(hub: Hub, model: Path) -> None:
    check_hub("me/model")
    assert upload(model, "me/model") == f"{hub.address}/me/model/commit/1234"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    (created,) = hub.created
    assert (created["organization"], created["name"]) == ("me", "model")
    assert created.get("private", created.get("visibility")) in (True, "private")
    assert hub.tokens == {"Bearer hf_ours"}


def test_hub_upload_a_repository_is_public_only_where_that_is_asked_for(hub: Hub, model: Path) -> None:
    upload(model, "me/model", public=True)
    assert hub.created[0].get("private", hub.created[0].get("visibility")) in (False, "public")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the token is not valid: run `hf auth login` again"),
        (403, "the token may not write to 'me/model'"),
        (404, "the owner of 'me/model' does not exist"),
    ],
)
def test_hub_upload_a_refusal_says_what_to_mend_and_how_to_go_on(
    hub: Hub, model: Path, status: int, message: str
) -> None:
    hub.status = status
    with pytest.raises(HubError) as refused:
        upload(model, "me/model")
    assert message in str(refused.value)
    assert f"'{model}' was written, but not uploaded" in str(refused.value)
    assert f"`hf upload me/model {model}`" in str(refused.value)


def test_hub_upload_a_hub_that_does_not_answer_is_named(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(HubError, match=rf"the upload to {hub.address} failed \(\w*Error"):
        upload(model, "me/model")


def test_hub_upload_what_cannot_work_is_refused_before_anything_is_written(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "me/model/x", "me/mo del", ""):
        with pytest.raises(HubError, match="is not a valid Hub repository name: expected owner/name"):
            check_hub(name)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(
        HubError, match="no user is signed in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN"
    ):
        check_hub("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        check_hub("me/model")
    assert not hub.created and not hub.files
