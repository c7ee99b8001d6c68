"""Selects HTTP proxies, by the same rule for all clients of this library and for the programs that it starts.

The usual environment variables apply, in upper or lower case: `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` name proxies,
and `NO_PROXY` lists hosts that are reached without a proxy: names (with their subdomains), addresses, networks such as
10.0.0.0/8, or `*`. This machine is always reached without a proxy: a proxy would resolve `localhost` to itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roll_sandbox.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["describe_proxy", "exclude_local_host_from_proxy", "find_proxy", "is_local_host", "make_client_session"]

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
"""Names and addresses of this machine, in the form that other programs understand in `NO_PROXY`."""
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_local_host(host: str) -> bool:
    """Return whether a host is this machine, without a DNS query.

    Args:
        host: name or address without a port; an IPv6 address with or without brackets.
    """
    name = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in ("localhost", "ip6-localhost", socket.gethostname().lower()) or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def find_proxy(url: str) -> str | None:
    """Return the URL of the proxy for requests to `url`; `None` if no proxy is needed.

    Raises:
        ConfigError: the environment configures a proxy of an unsupported type.
    """
    parts = urllib.parse.urlsplit(url)
    scheme, host = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme), parts.hostname or ""
    if not host or is_local_host(host):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or _is_in_no_proxy(host, parts.port or _DEFAULT_PORTS.get(scheme), proxies.get("no", "")):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        shown = urllib.parse.urlsplit(proxy)
        raise ConfigError(
            f"the proxy '{shown.scheme}://{shown.hostname}' for {scheme}://{host} is not supported: set "
            f"{scheme.upper()}_PROXY to an HTTP proxy, or list '{host}' in NO_PROXY."
        )
    return proxy


def _is_in_no_proxy(host: str, port: int | None, no_proxy: str) -> bool:
    """Return whether `no_proxy`, the value of `NO_PROXY`, lists a host, or a domain or network that contains it."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        address = None
    for entry in (part.strip().lower() for part in no_proxy.split(",")):
        if entry == "*":
            return True
        if address is not None:
            try:
                if address in ipaddress.ip_network(entry.strip("[]"), strict=False):
                    return True
            except ValueError:
                pass
        entry, _, of_port = entry.rpartition(":") if entry.rpartition(":")[2].isdigit() else (entry, "", "")
        if of_port and int(of_port) != port:
            continue
        entry = entry.removeprefix("*").strip(".[]")
        if entry and (name == entry or (address is None and name.endswith(f".{entry}"))):
            return True
    return False


def make_client_session(url: str, **options: Any) -> aiohttp.ClientSession:
    """Return an HTTP session for one address, with the proxy that `find_proxy` selects.

    Args:
        url: the address of all requests of the session.
        options: options of `aiohttp.ClientSession`.

    Raises:
        ConfigError: the environment configures a proxy of an unsupported type.
    """
    import aiohttp

    # `trust_env` would apply aiohttp's own rule instead.
    return aiohttp.ClientSession(proxy=find_proxy(url), trust_env=False, **options)


def describe_proxy(url: str) -> str:
    """Return a note for error messages that names the proxy for requests to `url`; empty if no proxy is needed."""
    proxy = find_proxy(url)
    if proxy is None:
        return ""
    parts = urllib.parse.urlsplit(proxy)
    port = f":{parts.port}" if parts.port else ""
    return f" (through the proxy {parts.hostname}{port}; to bypass it, add the host to NO_PROXY)"


def exclude_local_host_from_proxy(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which other programs reach this machine without a proxy.

    Args:
        environment: the environment to copy; by default the environment of this process.

    Returns:
        a copy of the environment; if it names a proxy, this machine is added to `NO_PROXY`.
    """
    variables = dict(os.environ if environment is None else environment)
    if not any(
        name.lower() in ("http_proxy", "https_proxy", "all_proxy") and value for name, value in variables.items()
    ):
        return variables
    names = [name for name in ("no_proxy", "NO_PROXY") if variables.get(name)]
    for name in ("no_proxy", "NO_PROXY"):
        value = variables.get(name) or (variables[names[0]] if names else "")
        listed = [entry.strip() for entry in value.split(",") if entry.strip()]
        if "*" not in listed:
            listed += [host for host in _LOCAL_HOSTS if host not in listed]
        variables[name] = ",".join(listed)
    return variables
