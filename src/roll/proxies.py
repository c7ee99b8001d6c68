"""Which HTTP requests go through a proxy: the rule of `roll_sandbox.proxies`, for all clients of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.sandbox_errors import sandbox_errors
from roll_sandbox import proxies
from roll_sandbox.proxies import exempt_this_machine, is_this_machine

if TYPE_CHECKING:
    import aiohttp

__all__ = ["client_session", "exempt_this_machine", "is_this_machine", "proxy_for", "proxy_note"]


def proxy_for(url: str) -> str | None:
    """Return the proxy for a URL; `None` for a direct connection.

    Raises:
        ConfigError: The environment names a proxy of an unsupported kind.
    """
    with sandbox_errors():
        return proxies.proxy_for(url)


def client_session(url: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session for one URL, with the proxy that `proxy_for` returns.

    Args:
        url: URL of all requests of the session.
        options: Options of `aiohttp.ClientSession`.

    Raises:
        ConfigError: See `proxy_for`.
    """
    with sandbox_errors():
        return proxies.client_session(url, **options)


def proxy_note(url: str) -> str:
    """Return ` (through the proxy …)` for a message about a URL that does not respond; empty without a proxy."""
    with sandbox_errors():
        return proxies.describe_proxy(url)
