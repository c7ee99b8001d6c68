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
        threading.Timer(0.5, webbrowser.open, [address]).start()
    app = make_app(paths, host, token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # who is told the address may come before the server is ready
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"nothing can listen at {host}:{port}: {reason}. Choose another `--port` (0 takes a free one) or `--host`."
        ) from None
    return listening
