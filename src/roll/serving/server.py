"""The HTTP server: keys, routes, bodies, and the format of errors.

request ─► key ─► owner ─► route ─► parsed body ─► `Service` ─► object, or promise
   └── missing or unknown key: 401      └── wrong body: 400 with the field; an ID of another owner: 404
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from roll.errors import one_line_error
from roll.serving import requests, wire
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.promises import Promise
from roll.serving.routes import Answer, answer
from roll.serving.service import Service
from roll.serving.submissions import Submission

__all__ = ["MAX_BYTES", "TrainingServer"]

logger = logging.getLogger(__name__)

MAX_BYTES = 128 * 2**20
"""The largest size of a body in bytes. Clients split data into bodies of 5 MB, unless a single datum is larger."""
_PREFIX = "/api/v1/"


class TrainingServer:
    """Serves the API: `async with TrainingServer(service, …) as server: …`.

    Args:
        service: The state of the server.
        keys: Owners by key.
        host: The address to listen on.
        port: The port; 0 selects a free port.
    """

    def __init__(self, service: Service, keys: Mapping[str, str], host: str = "127.0.0.1", port: int = 0) -> None:
        self.service = service
        self._owners = {_hash(key): owner for key, owner in keys.items()}
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> TrainingServer:
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()  # ends the polls, for which the runner would wait
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        """The address for clients (`TINKER_BASE_URL`)."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ApiError as error:
            return _build_error(error.status, error.message, error.field)
        except web.HTTPRequestEntityTooLarge:
            return _build_error(413, f"the body must not be larger than {MAX_BYTES} bytes.")
        except web.RequestPayloadError as error:
            return _build_error(400, f"the body cannot be read: {one_line_error(error)}.")
        except RequestFailure as failure:
            return _build_error(400 if failure.category == "user" else 500, failure.message)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return _build_error(500, f"the server failed: {one_line_error(error)}")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        owner = self._find_owner(request.headers.get("X-API-Key", ""))
        path = request.path.removeprefix(_PREFIX)
        if not request.path.startswith(_PREFIX):
            raise ApiError(404, f"the path {request.path[:200]} is not supported: paths begin with {_PREFIX}.")
        if request.method == "GET":
            return web.json_response(self._get(owner, path))
        if request.method != "POST":
            raise ApiError(405, f"{request.method} is not supported: use POST.")
        body = await request.read()
        if self.service.is_closed:
            raise ApiError(503, "the server is stopping.")
        if path == "retrieve_future":
            response = await self._retrieve(owner, body)
        else:
            found = await self._post(owner, path, request.content_type, body)
            response = _build_promise(found) if isinstance(found, Promise) else web.json_response(found)
        await self.service.journal.sync()  # what this answer says survives a power cut
        return response

    def _find_owner(self, key: str) -> str:
        digest = _hash(key)
        for known, owner in self._owners.items():
            if hmac.compare_digest(known, digest):
                return owner
        raise ApiError(401, "the key in X-API-Key is missing or unknown: set TINKER_API_KEY to a key of this server.")

    def _get(self, owner: str, path: str) -> dict[str, Any]:
        service = self.service
        if path == "healthz":
            return {"status": "ok"}
        if path == "get_server_capabilities":
            model = {"model_name": service.settings.model_name, "max_context_length": service.max_context}
            return {"supported_models": [model | {"trainable": True, "sampleable": True}]}
        kind, _, name = path.partition("/")
        if kind == "samplers" and name:
            return service.get_sampler(owner, name)
        raise ApiError(404, f"GET {_PREFIX}{path[:200]} is not supported by this server.")

    async def _post(self, owner: str, path: str, content_type: str, body: bytes) -> Answer:
        if path == "telemetry":
            return {"status": "accepted"}  # and dropped
        if path == "forward_backward" and content_type != wire.CONTENT_TYPE:
            raise ApiError(415, f"the body must be {wire.CONTENT_TYPE}, got {content_type}: use a newer client.")
        parts = path.split("/")
        if len(parts) == 3 and parts[0] == "sessions" and parts[2] == "finish":
            requests.parse_body(requests.FinishSession, body)
            await self.service.finish_session(self.service.sessions.find(parts[1], owner))
            return {}
        return answer(self.service, owner, Submission(path=path, body=body))

    async def _retrieve(self, owner: str, body: bytes) -> web.Response:
        """Hold a poll until the promise has an outcome: clients repeat it without a pause."""
        promises = self.service.promises
        promise = promises.find(requests.parse_body(requests.RetrieveFuture, body).request_id, owner)
        outcome = await promises.wait(promise, self.service.settings.poll_s)
        if outcome is None:
            content = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
            return web.json_response(content)
        if isinstance(outcome, RequestFailure):
            return web.json_response({"error": outcome.message, "category": outcome.category})
        return web.Response(body=outcome.body, content_type=outcome.content_type)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _build_promise(promise: Promise) -> web.Response:
    content: dict[str, Any] = {"request_id": promise.request_id}
    if promise.num_sequences:
        content["sample_sequence_ids"] = promise.sequence_ids
    return web.json_response(content)


def _build_error(status: int, message: str, field: str = "") -> web.Response:
    text = f"{field}: {message}" if field else message
    return web.Response(
        status=status, text=json.dumps({"error": text, "field": field or None}), content_type="application/json"
    )
