"""Connection settings of clients and workers: the service's address, the token, and trusted certificates."""

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
    """Return the HTTP header that authorizes requests with a token.

    White space around the token, such as a newline from a file, is stripped.

    Raises:
        ConfigError: the token is empty, or contains whitespace or control characters.
    """
    word = (token or "").strip()
    if not word or not word.isprintable() or " " in word:
        problem = "contains whitespace or control characters" if word else "is empty"
        raise ConfigError(
            f"the token for the sandbox service {problem}: `roll-sandbox token create OWNER` creates a token."
        )
    return {"Authorization": f"Bearer {word}"}


def load_tls_context(ca_file: str | None) -> ssl.SSLContext | bool:
    """Return a TLS context that trusts the CA file; without a file, return `True` to use the system's certificates.

    Raises:
        ConfigError: the file does not exist, or contains no certificate.
    """
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(ca_file))
    except OSError as error:
        reason = "it contains no certificate in PEM format" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"the CA file '{ca_file}' cannot be loaded: {reason}.") from None


def make_unreachable_error(url: str, error: Exception) -> SandboxUnavailableError:
    """Build the error for a service that could not be reached, with advice for the user."""
    import aiohttp

    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
    advice = "start a service with `roll-sandbox serve`"
    reason = str(error) or "timeout"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(inner, "verify_message", "") or str(inner)
        advice = "set the path of the CA certificate: `--ca-file`, `ca_file`, or sandbox.ca_file"
    elif isinstance(error, aiohttp.ClientConnectorSSLError):
        reason, advice = "the server does not use TLS", "use http:// instead of https://"
    elif isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http:"):
        reason, advice = "the server closed the connection", "use https:// if the server uses TLS"
    elif isinstance(inner, OSError) and inner.errno is not None:
        reason = os.strerror(inner.errno) if inner.errno > 0 else str(inner.strerror)
    return SandboxUnavailableError(
        f"cannot reach a sandbox service at '{url}' ({reason}){describe_proxy(url)}: {advice}."
    )
