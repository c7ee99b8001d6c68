"""`roll dashboard`: where it listens, who may come in, and what it says when it starts."""

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
from roll.version import install_extra

__all__ = ["serve"]

_FAREWELL_S = 5
"""How long open requests may go on once it is interrupted."""


def serve(
    paths: Sequence[Path], host: str, port: int, token: str | None, *, open_browser: bool, say: Callable[[str], None]
) -> None:
    """Show the runs at and below `paths` until it is interrupted.

    Args:
        port: 0 takes any that is free.
        token: that readers need; where others can reach `host`, one is made if there is none.
        say: told the address.

    Raises:
        ConfigError: packages are missing, the token is none, or nothing can listen there.
    """
    try:
        import uvicorn

        from roll.dashboard.web import make_app
    except ImportError as error:
        raise ConfigError(
            f"`roll dashboard` needs packages that are not installed ({error}): {install_extra('dashboard')}"
        ) from None
    if token is not None and re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", token) is None:
        raise ConfigError("a token has 8 to 200 letters, digits, '.', '_', '~' or '-'; without --token one is made.")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listening = _listen(host, port)
    with contextlib.suppress(OSError):
        os.nice(10)  # a run on this machine goes first
    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    say(f"ROLL's dashboard: {address}   (Ctrl-C ends it)")
    if open_browser:
        threading.Timer(0.5, _open_browser, [address, say]).start()
    app = make_app(paths, host, token, lambda: server.should_exit)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_FAREWELL_S,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def _open_browser(address: str, say: Callable[[str], None]) -> None:
    if not webbrowser.open(address):
        say("No browser could be opened on this machine: open the address in one.")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off, which delays answers by 40 ms, only where the protocol is named
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # who is quicker than the server waits
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"nothing can listen at {host}:{port}: {reason}. Choose another `--port` (0 takes a free one) or `--host`."
        ) from None
    return listening
