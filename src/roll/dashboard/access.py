"""Access control: with a token, only its holders can read, and no other site can read through a user's browser.

A hostile page can make a browser send requests to this server. It cannot read the responses, since no header allows
that, unless the page's own host name resolves to this server (DNS rebinding): so the `Host` header is checked.
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

__all__ = ["Access", "cookie_name", "is_loopback"]

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
    "Cache-Control": "no-cache",
}


def cookie_name(token: str) -> str:
    """Return a cookie name for this token: browsers share cookies between all ports of a machine."""
    return f"roll-dashboard-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access:
    """Middleware in front of the whole application.

    Args:
        app: the guarded application.
        host: address on which the server listens.
        token: required for every request; `None` if all users of this machine may read.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        assert token is None or token, "an empty token is none"
        self._app = app
        self._host = host
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            refusal = self._refusal(scope)

            async def send_guarded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    for name, value in _HEADERS.items():
                        headers[name] = value
                await send(message)

            await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return _no(405, "only GET is answered here.")
        if not self._is_ours(headers.get("host", "")):
            return _no(403, "this server is not called that: open it by the address that `roll dashboard` printed.")
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(key == "token" for key, _ in query):
            if not any(key == "token" and self._is_token(value) for key, value in query):
                return _no(401, "that token is not this server's: `roll dashboard` printed it when it started.")
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            answer = RedirectResponse(f"/{scope['path'].lstrip('/')}" + (f"?{rest}" if rest else ""), status_code=303)
            answer.set_cookie(cookie_name(self._token), self._token, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(given.strip())) or self._is_token(
            _cookie(headers, cookie_name(self._token))
        ):
            return None
        return _no(401, "a token is needed: open the address that `roll dashboard` printed, with `?token=…`.")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), (self._token or "").encode())

    def _is_ours(self, host: str) -> bool:
        """Return whether a request's `Host` names this server; with a token, on all addresses, it may be any name."""
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", host)
        if match is None:
            return False
        name = match[1].lower().strip("[]")
        if is_loopback(self._host):
            return is_loopback(name)
        everywhere = self._host in ("0.0.0.0", "::", "")
        return (everywhere and self._token is not None) or name == self._host.lower().strip("[]")


def _cookie(headers: Headers, name: str) -> str:
    """Return a cookie, parsed as browsers write them; Python's own parser drops all cookies if one is malformed."""
    return cookie_parser(headers.get("cookie", "")).get(name, "")


def _no(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)
