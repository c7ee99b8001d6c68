"""Choose the proxy for HTTP requests, by the rules of `roll_sandbox.proxies`, for all clients of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.sandbox_errors import sandbox_errors
from roll_sandbox import proxies
from roll_sandbox.proxies import exclude_local_host_from_proxy, is_local_host

if TYPE_CHECKING:
    import aiohttp

__all__ = ["describe_proxy", "exclude_local_host_from_proxy", "find_proxy", "is_local_host", "make_client_session"]


def find_proxy(url: str) -> str | None:
    """Return the proxy for a URL; `None` for a direct connection.

    Raises:
        ConfigError: The environment configures a proxy of an unsupported type.
    """
    with sandbox_errors():
        return proxies.find_proxy(url)


def make_client_session(url: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session for one URL, with the proxy that `find_proxy` returns.

    Args:
        url: URL of all requests of the session.
        options: Options of `aiohttp.ClientSession`.

    Raises:
        ConfigError: See `find_proxy`.
    """
    with sandbox_errors():
        return proxies.make_client_session(url, **options)


def describe_proxy(url: str) -> str:
    """Return ` (through the proxy …)` for a message about a URL that does not respond; empty without a proxy."""
    with sandbox_errors():
        return proxies.describe_proxy(url)
