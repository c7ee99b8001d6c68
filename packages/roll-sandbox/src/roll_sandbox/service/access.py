"""Access control for all routes: checks tokens, scopes, request rates and body sizes.

Only `/health/live` needs no token. The scopes of all paths are defined here; a path that is not listed needs the scope
`admin`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roll_sandbox.errors import SandboxDatabaseError
from roll_sandbox.service.audit import AuditLog
from roll_sandbox.service.quotas import Quotas
from roll_sandbox.service.rate_limits import RateLimiter
from roll_sandbox.service.tokens import Identity, TokenStore

__all__ = ["ROCK_PREFIX", "AccessMiddleware", "get_required_scope"]

ROCK_PREFIX = "/apis/envs/sandbox/v1"
_PUBLIC_PATH = "/health/live"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def get_required_scope(method: str, path: str) -> str:
    """Return the scope that a request needs. Unknown paths need `admin`."""
    if path == "/v1/worker":
        return "worker"
    if path in ("/health/ready", "/openapi.json"):
        return "read"
    if path == "/metrics" or path.startswith("/v1/workers"):
        return "admin"
    if path == "/v1/line" or (path.startswith("/v1/sandboxes/") and path.endswith("/stream")):
        return "run"
    if path != "/v1/sandboxes" and not path.startswith(("/v1/sandboxes/", ROCK_PREFIX + "/")):
        return "admin"
    return "read" if method in ("GET", "HEAD") else "run"


class AccessMiddleware:
    """Middleware that checks tokens, scopes and rates. It sets `scope["identity"]` of accepted requests.

    Args:
        app: the application that receives accepted requests.
        tokens: the tokens of the service.
        quotas: the quotas of owners.
        audit: the audit log.
        max_bytes: maximum bytes of a request's body.
    """

    def __init__(self, app: ASGIApp, tokens: TokenStore, quotas: Quotas, audit: AuditLog, max_bytes: int) -> None:
        self._app = app
        self._tokens = tokens
        self._quotas = quotas
        self._audit = audit
        self._max_bytes = max_bytes
        self._rates: dict[str, RateLimiter] = {}
        self._failures = RateLimiter(1.0, 20.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            return
        refusal = None if scope["path"] == _PUBLIC_PATH else await self._check_request(scope)
        if scope["type"] == "websocket":
            await (_reject_websocket(refusal, scope, receive, send) if refusal else self._app(scope, receive, send))
            return
        # Checked before the body is read; `_limit_body` bounds bodies without a Content-Length.
        if refusal is None:
            length = Headers(scope=scope).get("content-length", "0")
            if not length.isdigit() or int(length) > self._max_bytes:
                refusal = _make_error_response(
                    413, "oversized", f"the request body must not exceed {self._max_bytes:,} bytes."
                )
        app = refusal or self._app
        await app(scope, self._limit_body(receive), _add_headers(send))

    async def _check_request(self, scope: Scope) -> Response | None:
        """Return a response that rejects a request, or store the request's identity in `scope` and return `None`."""
        peer = str((scope.get("client") or ("", 0))[0])
        # Checked before the token is looked up, since that reads the database.
        if self._failures.is_empty(peer):
            return _make_error_response(
                429, "access", "too many requests with an invalid token from this address: retry in a minute."
            )
        token = _extract_token(Headers(scope=scope), scope["path"])
        if not token:
            return _make_error_response(
                401,
                "access",
                "the request has no token: send 'Authorization: Bearer TOKEN' (`roll-sandbox token create`).",
            )
        try:
            identity = await asyncio.to_thread(self._tokens.identify, token)
        except SandboxDatabaseError as error:
            return _make_error_response(503, "database", str(error))
        if identity is None:
            self._failures.consume(peer)
            self._audit.record("refuse", owner="", token="", target=scope["path"][:200], outcome="token", peer=peer)
            return _make_error_response(
                401,
                "access",
                "the token is invalid, expired or revoked: `roll-sandbox token create` creates a new one.",
            )
        needed = get_required_scope(scope.get("method", "GET"), scope["path"])
        if needed not in identity.scopes and "admin" not in identity.scopes:
            self._audit.record(
                "refuse",
                owner=identity.owner,
                token=identity.token,
                target=scope["path"][:200],
                outcome=f"scope {needed}",
                peer=peer,
            )
            return _make_error_response(
                403, "access", f"the token lacks the scope '{needed}', which this request requires."
            )
        wait_s = self.get_rate_limiter(identity).consume(identity.owner)
        if wait_s > 1.0:
            return _make_error_response(
                429, "quota", f"'{identity.owner}' exceeded its request rate limit: retry in {wait_s:.0f} s."
            )
        scope["identity"] = identity
        return None

    def get_rate_limiter(self, identity: Identity) -> RateLimiter:
        """Return the rate limiter that all tokens of the identity's owner share."""
        owner = identity.owner
        per_s = self._quotas.get(owner).requests_per_s
        if owner not in self._rates or self._rates[owner].per_s != per_s:
            self._rates[owner] = RateLimiter(per_s, 2 * per_s)
        return self._rates[owner]

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` so that the client is disconnected if its body is too large, even without a Content-Length."""
        left = self._max_bytes

        async def receive_bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            return message if left >= 0 else {"type": "http.disconnect"}

        return receive_bounded


def _extract_token(headers: Headers, path: str) -> str:
    """Return the token of a request; empty if the request has no token.

    On ROCK's routes, the token may also be in ROCK's header or, in requests of ROCK's SDK, be the password in the URL.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if path.startswith(ROCK_PREFIX + "/"):
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                return base64.b64decode(token.strip()).decode("ascii").partition(":")[2]
        if not token:
            scheme, _, token = headers.get("xrl-authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _reject_websocket(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket handshake with this response, or with 403 if the server does not support responses."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "websocket.http.response.start", **start})
    await send({"type": "websocket.http.response.body", "body": response.body})


def _add_headers(send: Send) -> Send:
    extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return send_with_headers


def _make_error_response(status: int, kind: str, reason: str) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": kind, "message": reason}, status_code=status, headers=headers)
