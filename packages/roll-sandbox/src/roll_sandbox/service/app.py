"""The ASGI application: all routes, with access control."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from roll_sandbox.service.access import AccessMiddleware
from roll_sandbox.service.metrics import format_metrics
from roll_sandbox.service.rock import add_rock_routes
from roll_sandbox.service.routes import add_routes
from roll_sandbox.service.service import Service
from roll_sandbox.service.worker_routes import add_worker_routes
from roll_sandbox.version import __version__

__all__ = ["make_app"]


def make_app(service: Service) -> ASGIApp:
    """Build the ASGI application of a service; the service is started and closed together with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not service.is_ready:  # `serve` may have started it already
            await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="ROLL sandboxes",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's documentation pages load scripts from another host, which our Content-Security-Policy forbids.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    access = AccessMiddleware(app, service.tokens, service.quotas, service.audit, service.settings.max_message_bytes)
    # Messages over WebSockets count against the same rate limit as the owner's HTTP requests.
    service.get_rate_limiter = access.get_rate_limiter  # type: ignore[method-assign]

    @app.get("/health/live", include_in_schema=False)
    def report_liveness() -> JSONResponse:
        return JSONResponse({"live": True})

    @app.get("/health/ready")
    def report_readiness() -> JSONResponse:
        here = service.is_ready and any(worker.is_connected for worker in list(service.dispatcher.workers.values()))
        here = here and not service.dispatcher.records.unavailable_reason
        return JSONResponse({"ready": here}, status_code=200 if here else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def report_metrics() -> str:
        return format_metrics(service.dispatcher)

    add_routes(app, service.dispatcher)
    add_worker_routes(app, service.dispatcher, service.workers)
    add_rock_routes(app, use_images=service.settings.runtime == "docker")

    @app.websocket("/v1/line")
    async def serve_client(socket: WebSocket) -> None:
        await service.serve_client(socket)

    @app.websocket("/v1/worker")
    async def serve_worker(socket: WebSocket) -> None:
        await service.serve_worker(socket)

    return access
