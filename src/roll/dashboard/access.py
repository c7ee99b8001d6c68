"""Access control: a token for readers, and protection against other sites that are open in a user's browser.

A malicious page can make a browser send requests to this server. It cannot read the responses, because no CORS header
allows it, unless the page's host name resolves to this server (DNS rebinding). Therefore the `Host` header is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Access", "build_cookie_name", "is_loopback"]

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def build_cookie_name(token: str) -> str:
    """Return a cookie name that depends on the token, because browsers share cookies between all ports of a machine."""
    return f"roll-dashboard-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    # Other names are not resolved: their addresses may change.
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access:
    """ASGI middleware that rejects requests for other hosts or without the token, and adds security headers.

    Args:
        app: the protected application.
        host: address on which the server listens.
        token: required for every request; `None` allows requests from all users of this machine.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        assert token is None or token, "a token must not be empty"
        self._app = app
        self._host = host
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            refusal = self._find_rejection(scope)

            async def send_guarded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    for name, value in _HEADERS.items():
                        headers[name] = value
                    headers.setdefault("Cache-Control", "no-cache")  # images by digest never change
                await send(message)

            await (refusal or self._app)(scope, receive, send_guarded)

    def _find_rejection(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return _reject(405, "only GET is supported.")
        if not self._is_own_host(headers.get("host", "")):
            return _reject(
                403, "the Host header does not name this server: open the address that `roll dashboard` printed."
            )
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(key == "token" for key, _ in query):
            if not any(key == "token" and self._is_token(value) for key, value in query):
                return _reject(
                    401, "the token is not valid: open the address that `roll dashboard` printed when it started."
                )
            # Moves the token into a cookie, so that it does not stay in the address bar, history or links.
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            answer = RedirectResponse(f"/{scope['path'].lstrip('/')}" + (f"?{rest}" if rest else ""), status_code=303)
            answer.set_cookie(build_cookie_name(self._token), self._token, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(given.strip())) or self._is_token(
            _read_cookie(headers, build_cookie_name(self._token))
        ):
            return None
        return _reject(401, "a token is required: open the address that `roll dashboard` printed, with `?token=…`.")

    def _is_token(self, candidate: str) -> bool:
        # Compares in constant time, so that response times do not reveal a prefix of the token.
        return hmac.compare_digest(candidate.encode("utf-8", "replace"), (self._token or "").encode())

    def _is_own_host(self, host: str) -> bool:
        """Return whether a request's `Host` header names this server.

        Any name is accepted if the server has a token and listens on all addresses.
        """
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", host)
        if match is None:
            return False
        name = match[1].lower().strip("[]")
        if is_loopback(self._host):
            return is_loopback(name)
        everywhere = self._host in ("0.0.0.0", "::", "")
        return (everywhere and self._token is not None) or name == self._host.lower().strip("[]")


def _read_cookie(headers: Headers, name: str) -> str:
    """Return the value of a cookie, or ""; unlike `http.cookies`, ignore malformed cookies in the same header."""
    return cookie_parser(headers.get("cookie", "")).get(name, "")


def _reject(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)
