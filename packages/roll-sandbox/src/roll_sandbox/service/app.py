"""The application: routes behind `Access`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from roll_sandbox.service.access import Access
from roll_sandbox.service.metrics import exposition
from roll_sandbox.service.rock import add_rock_routes
from roll_sandbox.service.routes import add_routes
from roll_sandbox.service.service import Service
from roll_sandbox.service.worker_routes import add_worker_routes
from roll_sandbox.version import __version__

__all__ = ["make_app"]


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service, which starts and ends with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not service.ready:  # `serve` may have started it already
            await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="ROLL sandboxes",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    access = Access(app, service.tokens, service.quotas, service.audit, service.settings.max_message_bytes)
    service.rates = access.rates  # type: ignore[method-assign]

    @app.get("/health/live", include_in_schema=False)
    def live() -> JSONResponse:
        return JSONResponse({"live": True})

    @app.get("/health/ready")
    def ready() -> JSONResponse:
        here = service.ready and any(worker.here for worker in list(service.board.workers.values()))
        here = here and not service.board.records.away
        return JSONResponse({"ready": here}, status_code=200 if here else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return exposition(service.board)

    add_routes(app, service.board)
    add_worker_routes(app, service.board, service.workers)
    add_rock_routes(app, images=service.settings.runtime == "docker")

    @app.websocket("/v1/line")
    async def line(socket: WebSocket) -> None:
        await service.line(socket)

    @app.websocket("/v1/worker")
    async def worker(socket: WebSocket) -> None:
        await service.worker(socket)

    return access
