"""Runs the server of `roll dashboard`: chooses the address and the token, and prints the address."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from roll.dashboard.access import is_loopback
from roll.errors import ConfigError
from roll.version import build_install_command

__all__ = ["serve"]

_SHUTDOWN_TIMEOUT_S = 5
"""Timeout for open requests after an interruption."""


def serve(
    paths: Sequence[Path],
    host: str,
    port: int,
    token: str | None,
    *,
    open_browser: bool,
    notify: Callable[[str], None],
) -> None:
    """Serve the runs at and below `paths` until interrupted.

    Args:
        paths: run directories, or directories that contain run directories.
        host: address to listen on.
        port: port to listen on; 0 chooses a free one.
        token: token required from clients; by default, a token is generated if other machines can reach `host`.
        open_browser: whether to open the page in a browser.
        notify: called with messages for the user, such as the address.

    Raises:
        ConfigError: packages are missing, the token is invalid, or the address is not available.
    """
    try:
        import uvicorn

        from roll.dashboard.web import make_app
    except ImportError as error:
        raise ConfigError(
            f"`roll dashboard` requires packages that are not installed ({error}): {build_install_command('dashboard')}"
        ) from None
    if token is not None and re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", token) is None:
        raise ConfigError("--token must have 8 to 200 characters: letters, digits, '.', '_', '~' or '-'.")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listening = _listen(host, port)
    with contextlib.suppress(OSError):
        os.nice(10)  # a run on this machine has priority
    port = listening.getsockname()[1]
    url_host = f"[{host}]" if ":" in host else host
    address = f"http://{url_host}:{port}/" + (f"?token={token}" if token else "")
    notify(f"ROLL's dashboard: {address}   (Ctrl-C stops the server)")
    if open_browser:
        threading.Timer(0.5, _open_browser, [address, notify]).start()
    app = make_app(paths, host, token, lambda: server.should_exit)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",  # `Access` would have to handle the events, and the application has no startup
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def _open_browser(address: str, notify: Callable[[str], None]) -> None:
    if not webbrowser.open(address):
        notify("No browser could be opened on this machine: open the address in a browser.")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, which delays responses by 40 ms, only if the protocol is explicit
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # clients that connect before `accept` wait in the backlog
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}. Choose another `--port` (0 selects a free port) or `--host`."
        ) from None
    return listening
