"""The HTTP server for agents: authenticates requests, enforces limits, and formats errors and streams for each vendor.

    request ─► key ─► session ─► route: validate the body, answer ─► object, or server-sent events
       └── missing or invalid key, ended session: 401              └── disconnected: the unsent part is not recorded

Invariants:
    - a request without the key of an open session gets 401, whether its path exists or not;
    - no input of an agent causes an internal error: the response names the invalid field;
    - if an agent disconnects, its requests at the engines are aborted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from pydantic_core import to_json

from roll.agents.anthropic_messages import count_tokens, create_message
from roll.agents.openai_chat import create_chat_completion
from roll.agents.openai_completions import create_completion
from roll.agents.openai_responses import count_input_tokens, create_response
from roll.agents.openapi import build_description
from roll.agents.replies import Reply
from roll.agents.request_errors import RequestError
from roll.agents.session import Answer, Session, Sessions
from roll.agents.warning_log import WarningLog

__all__ = ["MODEL_NAME", "AgentServer"]

MODEL_NAME = "policy"
"""The name of the model in responses; requests may use any name."""
MAX_BYTES = 8 * 2**20
"""Maximum size of a request's body in bytes, if the policy reads only text."""
MAX_BYTES_WITH_IMAGES = 48 * 2**20
"""Maximum size of a request's body in bytes, if the policy reads images: agents send all of them with each request."""

Route: TypeAlias = Callable[[Session, bytes], Awaitable[Reply]]
POST_ROUTES: dict[str, Route] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/responses": create_response,
    "/v1/responses/input_tokens": count_input_tokens,
    "/v1/messages": create_message,
    "/v1/messages/count_tokens": count_tokens,
}


class AgentServer:
    """Answers the requests of a run's agents: `async with AgentServer() as server: server.sessions.add(…)`.

    Args:
        host: The address to listen on; by default only programs on this machine can connect.
        port: The port; 0 selects a free port.
        socket: The path of a Unix socket to listen on as well, for sandboxes.
        reads_images: Whether the policy reads images; requests may then be larger.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, socket: Path | None = None, reads_images: bool = False
    ) -> None:
        self.sessions = Sessions()
        self.warnings = WarningLog(reads_images=reads_images)
        self._max_bytes = MAX_BYTES_WITH_IMAGES if reads_images else MAX_BYTES
        self._host, self._port, self._socket = host, port, socket
        self._runner: web.ServerRunner | None = None

    async def __aenter__(self) -> AgentServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def base_url(self) -> str:
        """The address for OpenAI's clients, with `/v1`; Anthropic's clients accept it too."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Start listening."""
        loop = asyncio.get_running_loop()

        def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self._max_bytes)

        # The plain server instead of `web.Application`, whose routing and middleware would take a quarter of a
        # request's time. `handler_cancellation` aborts the engine's requests when an agent disconnects.
        server = web.Server(
            self._handle_request, request_factory=make_request, handler_cancellation=True, access_log=None
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]
        if self._socket is not None:
            await web.UnixSite(self._runner, str(self._socket)).start()
            self._socket.chmod(0o666)  # sandboxes have other UIDs; keys protect the sessions

    async def close(self) -> None:
        """Stop listening. Calling it twice is safe."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    # ---- requests

    async def _handle_request(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer an HTTP request; errors are returned in the format of the vendor whose API it uses."""
        try:
            return await self._dispatch(request)
        except RequestError as error:
            return _build_error_response(request, error)
        except web.RequestPayloadError:
            message = "the body does not match the headers: it is truncated, or its encoding is invalid."
            return _build_error_response(request, RequestError(400, "invalid_value", message))
        except web.HTTPRequestEntityTooLarge:
            message = f"the body must not be larger than {self._max_bytes} bytes."
            return _build_error_response(request, RequestError(413, "request_too_large", message))

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self.sessions.find(_read_api_key(request))
        # Anthropic's clients append /v1 to the address, which already has it
        path = request.path.removeprefix("/v1") if request.path.startswith("/v1/v1/") else request.path
        route, page = POST_ROUTES.get(path), _build_get_response(path, session)
        if route is None and page is None:
            raise RequestError(404, "not_found", f"the path {request.path[:200]} is not supported: see /openapi.json.")
        if request.method not in (("POST",) if route else ("GET", "HEAD")):
            raise RequestError(405, "method_not_allowed", f"{request.path} does not support {request.method}.")
        if route is None:
            return web.json_response(page)
        try:
            with session.admission.admit():
                reply = await route(session, await session.admission.read(request.read()))
        except RequestError as error:
            session.record_error(path, error)
            raise
        if reply.stream is not None:
            return await _stream_reply(request, session, reply)
        return web.Response(body=to_json(reply.body, inf_nan_mode="null"), content_type="application/json")


def _build_get_response(path: str, session: Session) -> dict[str, Any] | None:
    """Build the response to a `GET` request for the OpenAPI description or the models; `None` for any other path.

    A model is described with the fields of both vendors.
    """
    if path == "/openapi.json":
        return build_description()
    before, models, name = f"{path}/".partition("/v1/models/")
    if before or not models:
        return None
    model_id = name[:-1] or MODEL_NAME
    longest = session.max_context
    model = {"id": model_id, "object": "model", "created": 0, "owned_by": "roll", "max_model_len": longest}
    model |= {"type": "model", "display_name": model_id, "created_at": "1970-01-01T00:00:00Z"}
    model |= {"max_input_tokens": longest}
    return (
        model
        if name
        else {"object": "list", "data": [model], "has_more": False, "first_id": MODEL_NAME, "last_id": MODEL_NAME}
    )


def _read_api_key(request: web.BaseRequest) -> str:
    """Read the API key from the bearer token (OpenAI) or the `x-api-key` header (Anthropic); empty if missing."""
    bearer = request.headers.get("Authorization", "")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


async def _stream_reply(request: web.BaseRequest, session: Session, reply: Reply) -> web.StreamResponse:
    """Send a streamed reply; if the agent disconnects, truncate the recorded answers to the part that was sent."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    sent: dict[int, tuple[Answer, int | None]] = {id(answer): (answer, 0) for answer in reply.answers}
    try:
        await response.prepare(request)
        for piece in reply.stream or ():
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            await response.write(piece.data)
            if piece.answer is not None:
                sent[id(piece.answer)] = (piece.answer, piece.num_characters)
    except BaseException as error:
        for answer, num_characters in sent.values():
            if num_characters is not None:
                session.truncate_call(answer.call, num_characters)
        if isinstance(error, ConnectionError):
            return response
        raise
    with suppress(ConnectionError):
        await response.write_eof()
    return response


# ---- errors


_OPENAI_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_ERROR_TYPES = {**_OPENAI_ERROR_TYPES, 413: "request_too_large", 503: "overloaded_error"}


def _build_error_response(request: web.BaseRequest, error: RequestError) -> web.Response:
    if request.path.endswith(("/messages", "/messages/count_tokens")):
        kind = _ANTHROPIC_ERROR_TYPES.get(error.status, "invalid_request_error")
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    else:
        kind = _OPENAI_ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        content = {"message": error.message, "type": kind, "param": error.field or None, "code": error.code}
        body = {"error": content}
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return web.Response(text=json.dumps(body), status=error.status, content_type="application/json", headers=headers)
