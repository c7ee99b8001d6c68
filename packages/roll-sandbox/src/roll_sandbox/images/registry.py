"""Pulls images from a registry (OCI distribution specification 1.1, "Pull").

    name ──► manifest (from an index: for this machine's platform) ──► configuration and layers, by digest, checked

Connections use `https`, except to this machine or with `insecure`. Tokens and passwords are sent only to the registry
and its token server, never to the target of a redirect. Passwords come from Docker's `config.json`.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from roll_sandbox.errors import (
    BadImageError,
    SandboxAccessError,
    SandboxRequestError,
    SandboxUnavailableError,
    UnknownImageError,
)
from roll_sandbox.images.image import parse_image
from roll_sandbox.images.names import DIGEST_PATTERN, ImageReference
from roll_sandbox.images.sources import MAX_JSON_BYTES, check_blob, choose_platform, parse_json
from roll_sandbox.proxies import find_proxy

__all__ = ["RegistrySource"]

_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry, if a registry is busy or a connection breaks."""
_READ_TIMEOUT_S = 60.0
"""Timeout of one read in seconds."""
_CHUNK_BYTES = 2**20
_CHALLENGE_PARAMETER_PATTERN = re.compile(r'([a-z_]+)="([^"]*)"')


class RegistrySource:
    """An image in a registry; layers are fetched when they are opened (`cache.ImageSource`).

    Args:
        reference: name of the image.
        insecure: if true, use the registry without TLS.
        max_blob_bytes: maximum bytes of one compressed layer.
        backoff_s: seconds to wait before each retry.

    Raises:
        SandboxRequestError: the reference has no registry.
        UnknownImageError: the registry has no such image.
        SandboxAccessError: the registry denies access.
        SandboxUnavailableError: the registry does not answer.
        BadImageError: the registry sends invalid content.
    """

    def __init__(
        self,
        reference: ImageReference,
        *,
        insecure: bool = False,
        max_blob_bytes: int = 20 * 2**30,
        backoff_s: Sequence[float] = _BACKOFF_S,
    ) -> None:
        self._reference = reference
        if not reference.registry:
            raise SandboxRequestError(f"the image name '{reference}' has no registry: write REGISTRY/{reference}.")
        self._host = reference.registry
        self._allow_http = insecure or _is_local_host(self._host)
        self._max_blob_bytes = max_blob_bytes
        self._backoff_s = backoff_s
        self._authorization = ""
        self._opener = urllib.request.build_opener(_RedirectHandler(self._allow_http), _ProxyHandler())
        manifest = self._fetch_manifest(reference.version)
        if isinstance(manifest, dict) and "manifests" in manifest:
            manifest = self._fetch_manifest(str(choose_platform(manifest).get("digest")), exactly=True)
        config = manifest.get("config") if isinstance(manifest, dict) else None
        layers = manifest.get("layers") if isinstance(manifest, dict) else None
        if not isinstance(config, dict) or not isinstance(layers, list):
            raise BadImageError(f"{reference} is not a supported image: its manifest has no layers.")
        with self._fetch_blob(config, MAX_JSON_BYTES) as blob:
            self.image = parse_image(parse_json(blob.read(), "the configuration"), str(config.get("digest")))
        self._layers = [each for each in layers if isinstance(each, dict)]
        if len(self._layers) != len(self.image.layers):
            listed = len(self.image.layers)
            raise BadImageError(f"{reference} has {len(layers)} layers, but its configuration lists {listed}.")

    @contextlib.contextmanager
    def open_layer(self, number: int) -> Iterator[IO[bytes]]:
        """Fetch a layer, and yield its blob; see `cache.ImageSource`."""
        with self._fetch_blob(self._layers[number], self._max_blob_bytes) as blob:
            yield blob

    def _fetch_manifest(self, version: str, *, exactly: bool = False) -> Any:
        if exactly and not DIGEST_PATTERN.fullmatch(version):
            raise BadImageError(f"unsupported manifest digest {version[:80]!r}: only SHA-256 digests are supported.")
        with tempfile.TemporaryFile() as file:
            self._fetch(f"manifests/{version}", file, MAX_JSON_BYTES, ", ".join(_MANIFEST_TYPES))
            if DIGEST_PATTERN.fullmatch(version):
                check_blob(file, version)
            return parse_json(file.read(), "the manifest")

    @contextlib.contextmanager
    def _fetch_blob(self, descriptor: Mapping[str, Any], max_bytes: int) -> Iterator[IO[bytes]]:
        digest, size = descriptor.get("digest"), descriptor.get("size")
        if not isinstance(digest, str) or not DIGEST_PATTERN.fullmatch(digest):
            raise BadImageError(f"unsupported blob digest {str(digest)[:80]!r}: only SHA-256 digests are supported.")
        if type(size) is not int or not 0 <= size <= max_bytes:
            raise BadImageError(
                f"the size of image blob {digest} must not exceed {max_bytes:,} bytes, got {str(size)[:40]}."
            )
        with tempfile.TemporaryFile() as file:
            self._fetch(f"blobs/{digest}", file, size)
            check_blob(file, digest)
            yield file

    def _fetch(self, path: str, file: IO[bytes], max_bytes: int, accept: str = "*/*") -> None:
        """Fetch content into a file, retrying after temporary errors, and rewind the file."""
        url = f"{'http' if self._allow_http else 'https'}://{self._host}/v2/{self._reference.repository}/{path}"
        for pause_s in (*self._backoff_s, None):
            try:
                self._fetch_once(url, file, max_bytes, accept)
                return
            except (OSError, http.client.HTTPException) as error:
                status = error.code if isinstance(error, urllib.error.HTTPError) else None
                if pause_s is None or (status is not None and status != 429 and status < 500):
                    raise self._explain_error(error, status) from None
                time.sleep(pause_s)

    def _fetch_once(self, url: str, file: IO[bytes], max_bytes: int, accept: str) -> None:
        try:
            response = self._open_url(url, accept)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            # The challenge in the first answer names the token server and the scope (distribution specification, "Token
            # Authentication").
            self._authorization = self._authorize(error.headers.get("WWW-Authenticate") or "")
            response = self._open_url(url, accept)
        with response:
            file.seek(0)
            file.truncate()
            while piece := response.read(_CHUNK_BYTES):
                file.write(piece)
                if file.tell() > max_bytes:
                    raise BadImageError(f"{self._host} sent more than the expected {max_bytes:,} bytes for '{url}'.")
            # `HTTPResponse.read(n)` raises no error if the connection ends before the announced length.
            expected = response.headers.get("Content-Length")
            if expected is not None and expected.isdigit() and file.tell() != int(expected):
                raise http.client.IncompleteRead(b"")
        file.seek(0)

    def _open_url(self, url: str, accept: str) -> Any:
        request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "roll"})
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        return self._opener.open(request, timeout=_READ_TIMEOUT_S)

    def _authorize(self, challenge: str) -> str:
        """Return the authorization header for a registry's challenge: a token from its token server, or a password."""
        kind, _, rest = challenge.partition(" ")
        password = _read_credentials(self._reference.registry)
        if kind.lower() == "basic" and password:
            return f"Basic {password}"
        fields = dict(_CHALLENGE_PARAMETER_PATTERN.findall(rest))
        realm = fields.get("realm", "")
        if kind.lower() != "bearer" or not realm.startswith(
            ("https://", "http://") if self._allow_http else "https://"
        ):
            raise self._make_access_error()
        scope = fields.get("scope") or f"repository:{self._reference.repository}:pull"
        query = {"service": fields.get("service", ""), "scope": scope}
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(query)}", headers={"User-Agent": "roll"})
        if password:
            request.add_unredirected_header("Authorization", f"Basic {password}")
        try:
            with self._opener.open(request, timeout=_READ_TIMEOUT_S) as response:
                answer = parse_json(response.read(MAX_JSON_BYTES), "the token")
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise self._make_access_error() from None
            raise
        token = answer.get("token") or answer.get("access_token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token.isprintable() or not token.isascii():
            raise self._make_access_error()
        return f"Bearer {token}"

    def _make_access_error(self) -> SandboxAccessError:
        return SandboxAccessError(
            f"{self._reference.registry} denied access to '{self._reference.repository}': the repository does not "
            f"exist or requires a login (`docker login {self._reference.registry}`)."
        )

    def _explain_error(self, error: Exception, status: int | None) -> Exception:
        if status in (401, 403):
            return self._make_access_error()
        if status == 404:
            return UnknownImageError(f"{self._reference.registry} has no image '{self._reference}'.")
        reason = getattr(error, "reason", None) or error
        return SandboxUnavailableError(
            f"cannot download '{self._reference}' from {self._reference.registry} ({status or type(error).__name__}: "
            f"{str(reason)[:200]}). For a registry without TLS, pass `--insecure`."
        )


class _ProxyHandler(urllib.request.ProxyHandler):
    """Selects the proxy of each address with `roll_sandbox.proxies`, also after a redirect."""

    def __init__(self) -> None:
        super().__init__({})

    def http_open(self, req: urllib.request.Request) -> Any:
        """Set the proxy of the request, if there is one; another handler opens the connection."""
        proxy = find_proxy(req.full_url)
        return None if proxy is None else self.proxy_open(req, proxy, req.type)

    https_open = http_open


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from TLS to a connection without TLS. Credentials are not sent to the new address
    (`add_unredirected_header`).
    """

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith(("https://", "http://") if self._plain else "https://"):
            raise urllib.error.HTTPError(newurl, 403, "a redirect from HTTPS to HTTP is not allowed", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_local_host(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    return name == "localhost"


def _read_credentials(registry: str) -> str:
    """Return the base64 credentials for a registry from Docker's configuration; empty if there are none."""
    directory = os.environ.get("DOCKER_CONFIG")
    path = (Path(directory) if directory else Path.home() / ".docker") / "config.json"
    try:
        auths = json.loads(path.read_bytes()).get("auths", {})
        hosts = {urllib.parse.urlsplit(key if "//" in key else f"//{key}").netloc: each for key, each in auths.items()}
        credentials = hosts.get(registry, {}).get("auth", "")
        base64.b64decode(credentials, validate=True)
    except (OSError, ValueError, AttributeError):
        return ""
    return credentials if isinstance(credentials, str) else ""
