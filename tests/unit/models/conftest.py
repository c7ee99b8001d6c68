"""Fixtures for models: the tiny model's tokenizer, and a model hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roll.models import load_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> object:
    """Tokenizer of the tiny model."""
    return load_tokenizer(tiny_model)


@pytest.fixture
def small_hub(tiny_model: Path) -> Iterator[str]:
    """Address of a hub on this machine that has one model, `owner/tiny`."""
    commit = "0" * 39 + "1"
    files = sorted(file.name for file in tiny_model.iterdir())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            headers = {"X-Repo-Commit": commit}
            if path.startswith("/api/models/owner/tiny/tree/"):
                body = json.dumps(
                    [{"type": "file", "path": f, "size": (tiny_model / f).stat().st_size, "oid": f} for f in files]
                ).encode()
            elif path.startswith("/api/models/owner/tiny"):
                siblings = [{"rfilename": f} for f in files]
                body = json.dumps({"id": "owner/tiny", "sha": commit, "siblings": siblings}).encode()
            elif path.startswith("/owner/tiny/resolve/") and name in files:
                body = (tiny_model / name).read_bytes()
                headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()
