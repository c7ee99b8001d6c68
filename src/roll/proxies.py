"""Which HTTP requests go through a proxy: the rule of `roll_sandbox.proxies`, for every client here too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.sandbox_errors import sandbox_errors
from roll_sandbox import proxies
from roll_sandbox.proxies import is_this_machine, reaching_this_machine

if TYPE_CHECKING:
    import aiohttp

__all__ = ["client_session", "is_this_machine", "proxy_for", "reaching_this_machine", "through"]


def proxy_for(url: str) -> str | None:
    """Return the proxy through which an address is to be reached; `None` where it is to be reached directly.

    Raises:
        ConfigError: the environment names a proxy of a kind that cannot be used.
    """
    with sandbox_errors():
        return proxies.proxy_for(url)


def client_session(url: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session for one address, which reaches it as `proxy_for` says.

    Args:
        url: what all its requests go to.
        options: of `aiohttp.ClientSession`.

    Raises:
        ConfigError: see `proxy_for`.
    """
    with sandbox_errors():
        return proxies.client_session(url, **options)


def through(url: str) -> str:
    """Return ` (through the proxy …)` for a message about an address that does not answer; empty without a proxy."""
    with sandbox_errors():
        return proxies.through(url)
