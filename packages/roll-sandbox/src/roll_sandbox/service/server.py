"""`roll-sandbox serve`: checks the settings, listens, and runs the server."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from roll_sandbox.errors import ConfigError
from roll_sandbox.runtimes import check_runtime
from roll_sandbox.service.app import make_app
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings

__all__ = ["serve"]

_TCP_TIMEOUT_MS = 60_000


def serve(
    settings: Settings,
    host: str,
    port: int,
    *,
    certificate: Path | None,
    key: Path | None,
    print_line: Callable[[str], None],
    insecure: bool = False,
) -> None:
    """Serve until interrupted.

    Args:
        settings: the service's settings.
        host: address to listen on.
        port: port to listen on; 0 selects a free port.
        certificate, key: files for TLS, in PEM format. Without them, `host` must be an address of this machine only,
            unless `insecure` is set.
        print_line: function that prints a line to the user.
        insecure: if true, permit other addresses without TLS.

    Raises:
        ConfigError: a setting is invalid, listening on the address fails, or connections would not be encrypted.
        SandboxUnavailableError: this machine cannot run sandboxes.
    """
    _check_tls(certificate, key)
    if certificate is None and not insecure and host not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError(
            f"listening on '{host}' without TLS sends tokens in clear text: set `--certificate` and `--key`, listen "
            "on 127.0.0.1, or set `--insecure` behind a proxy that terminates TLS."
        )
    _check_settings(settings)
    service = Service(settings)
    listening = _listen(host, port)

    def on_started() -> None:
        shown_host = f"[{host}]" if ":" in host else host
        print_line(
            f"ROLL's sandbox service: {'https' if certificate else 'http'}://{shown_host}:{listening.getsockname()[1]}"
        )
        if not service.tokens.list():
            print_line("No token exists yet: roll-sandbox token create OWNER creates one.")

    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        loop="auto",
        http=_choose_protocol(),
        ws="websockets-sansio",
        ws_max_size=settings.max_message_bytes,
        ws_per_message_deflate=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        timeout_graceful_shutdown=5,
    )
    _Server(config, service, on_started).run(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that starts the service itself, so that errors are raised; uvicorn would only log them."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.start()
        await super().startup(sockets)
        self._started()


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) != (key is None):
        raise ConfigError("TLS needs both `--certificate` and `--key`.")
    if certificate is None or key is None:
        return
    for path in (certificate, key):
        if not path.is_file():
            raise ConfigError(f"file '{path}' does not exist: TLS needs a certificate and its key in PEM format.")
    try:
        # An empty password is given: otherwise OpenSSL would ask for one on the terminal if the key is encrypted.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # includes SSLError
        raise ConfigError(
            f"cannot load the TLS certificate '{certificate}' with the key '{key}': {error.strerror}. Both must be in "
            "PEM format, and the key must not have a password."
        ) from None


def _check_settings(settings: Settings) -> None:
    """Check the settings whose errors would otherwise appear only when a sandbox is requested."""
    if settings.runtime is not None:
        check_runtime(settings.runtime)
    for path in settings.mounts:
        if not Path(path).is_dir():
            raise ConfigError(f"--mounts: directory '{path}' does not exist.")
    for option, seconds in (("--lifetime", settings.lifetime_s), ("--owner-lifetime", settings.quota.lifetime_s)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{option} must be a positive, finite number of seconds, got {seconds:g}.")
    if settings.audit is not None and settings.audit.is_dir():
        raise ConfigError(f"--audit must be a file, got the directory '{settings.audit}'.")


def _choose_protocol() -> Any:
    try:
        from roll_sandbox.service.http_limits import BoundedHttpProtocol
    except ImportError:  # httptools is not installed
        return "h11"
    return BoundedHttpProtocol


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, answers are delayed by 40 ms (delayed ACK).
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # disconnects peers that read nothing for this time
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_TIMEOUT_MS)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}. Choose another `--port` (0 selects a free port) or `--host`."
        ) from None
    listening.listen(2048)
    return listening
