"""Connection settings of clients and workers: the service's address, the token, trusted certificates, errors."""

from __future__ import annotations

import os
import ssl
from urllib.parse import urlsplit

from roll_sandbox.errors import ConfigError, SandboxUnavailableError
from roll_sandbox.proxies import describe_proxy

__all__ = ["load_tls_context", "make_token_header", "make_unreachable_error", "normalize_url"]


def normalize_url(url: str) -> str:
    """Return the address of a service without a trailing slash.

    Raises:
        ConfigError: the address is not an HTTP(S) URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the address of a sandbox service must be an HTTP(S) URL such as 'http://127.0.0.1:8741', got '{url}'."
        )
    return url.rstrip("/")


def make_token_header(token: str) -> dict[str, str]:
    """Return the authorization header. White space around a token, such as a newline from a file, is stripped.

    Raises:
        ConfigError: the token is empty, or has white space or control characters in it.
    """
    word = (token or "").strip()
    if not word or not word.isprintable() or " " in word:
        what = "has white space or control characters in it" if word else "is empty"
        raise ConfigError(f"the token for the sandbox service {what}: `roll-sandbox token create OWNER` prints one.")
    return {"Authorization": f"Bearer {word}"}


def load_tls_context(ca_file: str | None) -> ssl.SSLContext | bool:
    """Return the TLS context of a CA file; `True` (the system's certificates) without one.

    Raises:
        ConfigError: the file does not exist or has no certificate in it.
    """
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(ca_file))
    except OSError as error:
        reason = "it has no certificate in PEM format" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"the CA file '{ca_file}' cannot be loaded: {reason}.") from None


def make_unreachable_error(url: str, error: Exception) -> SandboxUnavailableError:
    """Return the error for a service that could not be reached, with what to do about it."""
    import aiohttp

    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
    what = "start one with `roll-sandbox serve`"
    reason = str(error) or "timeout"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(inner, "verify_message", "") or str(inner)
        what = "set the file of the CA certificate: `--ca-file`, `ca_file`, or sandbox.ca_file"
    elif isinstance(error, aiohttp.ClientConnectorSSLError):
        reason, what = "the server does not use TLS", "the address may begin with http://"
    elif isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http:"):
        reason, what = "the server closed the connection", "the address may begin with https://"
    elif isinstance(inner, OSError) and inner.errno is not None:
        reason = os.strerror(inner.errno) if inner.errno > 0 else str(inner.strerror)
    return SandboxUnavailableError(f"no sandbox service answers at '{url}' ({reason}){describe_proxy(url)}: {what}.")
