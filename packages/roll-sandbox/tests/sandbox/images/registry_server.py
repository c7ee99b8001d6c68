"""A registry on this machine, as far as pulling goes, and what can go wrong with one."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sandbox.images.oci import Built


@dataclass
class Registry:
    """What it has and how it behaves."""

    manifests: dict[str, bytes]
    """By tag and by digest."""
    blobs: dict[str, bytes]
    address: str = ""
    password: str | None = None
    """`user:password`; tokens are given to who knows it. `None`: anybody."""
    token: str | None = None
    """Needed for everything but the token itself."""
    redirect: bool = False
    """Blobs lie at another place, which takes no token."""
    failures: list[Any] = field(default_factory=list)
    """Of the next blobs: a status, `cut`, `long` or `wrong`."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Paths, with what came as authorization."""


def registry_of(built: Built, tag: str = "latest", **settings: Any) -> Registry:
    manifest = built.blobs[built.manifest]
    return Registry({tag: manifest, built.manifest: manifest}, dict(built.blobs), **settings)


@contextlib.contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """Its `host:port`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            authorization = self.headers.get("Authorization", "")
            registry.asked.append((path, authorization))
            if path == "/token":
                self._token(urllib.parse.parse_qs(query), authorization)
            elif path.startswith("/elsewhere/"):
                self._blob(path.rpartition("/")[2])
            elif registry.token is not None and authorization != f"Bearer {registry.token}":
                realm = f'Bearer realm="http://{registry.address}/token",service="test",scope="repository:a/world:pull"'
                self._answer(401, b"{}", {"WWW-Authenticate": realm})
            elif "/manifests/" in path:
                found = registry.manifests.get(path.rpartition("/")[2])
                self._answer(404 if found is None else 200, found or b"{}")
            elif registry.redirect:
                place = f"http://localhost:{server.server_port}/elsewhere/{path.rpartition('/')[2]}"
                self._answer(307, b"", {"Location": place})
            else:
                self._blob(path.rpartition("/")[2])

        def _token(self, query: dict[str, list[str]], authorization: str) -> None:
            expected = registry.password and "Basic " + base64.b64encode(registry.password.encode()).decode()
            if expected and authorization != expected:
                self._answer(401, b"{}")
            else:
                assert query == {"service": ["test"], "scope": ["repository:a/world:pull"]}
                self._answer(200, json.dumps({"token": registry.token}).encode())

        def _blob(self, digest: str) -> None:
            failure = registry.failures.pop(0) if registry.failures else None
            data = registry.blobs.get(digest)
            if isinstance(failure, int):
                self._answer(failure, b"sorry")
            elif data is None:
                self._answer(404, b"{}")
            elif failure == "cut":
                self._answer(200, data[: len(data) // 2], {"Content-Length": str(len(data))})
            elif failure == "long":
                self._answer(200, data + bytes(10**6))
            else:
                self._answer(200, data if failure is None else bytes(len(data)))

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield registry.address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
