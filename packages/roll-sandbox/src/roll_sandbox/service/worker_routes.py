"""The routes of `/v1/workers`, which list and drain workers. They need the scope `admin`."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, FastAPI, Path
from pydantic import BaseModel

from roll_sandbox.service.dispatcher import Dispatcher
from roll_sandbox.service.placement import compute_load
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.service.workers import Workers

__all__ = ["add_worker_routes"]

WorkerName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class WorkerBody(BaseModel):
    """The state of a worker."""

    worker: str
    state: str
    """`ready`, `draining`, or `away`."""
    sandboxes: int
    capacity: int
    load: float
    """Used fraction of the worker's scarcest resource; 1 means full."""
    cores: int
    memory_bytes: int | None
    free_bytes: int | None
    images: list[str]
    seen: float
    """Time of the worker's last message, in seconds since 1970."""


def _make_worker_body(link: WorkerLink) -> WorkerBody:
    return WorkerBody(
        worker=link.name,
        state=link.state,
        sandboxes=link.num_sandboxes,
        capacity=link.capacity,
        load=compute_load(link),
        cores=link.report.cores,
        memory_bytes=link.report.memory_bytes,
        free_bytes=link.report.free_bytes,
        images=list(link.report.images),
        seen=link.last_seen,
    )


def add_worker_routes(app: FastAPI, dispatcher: Dispatcher, workers: Workers) -> None:
    """Add the worker routes; errors are handled in the same way as on other routes."""
    refused = {status: {"description": "refused"} for status in (401, 403, 404, 429)}
    router = APIRouter(prefix="/v1/workers", responses=cast(dict[int | str, dict[str, Any]], refused))

    @router.get("")
    async def list_workers() -> list[WorkerBody]:
        return [_make_worker_body(link) for link in dispatcher.workers.values()]

    @router.post("/{name}/drain")
    async def drain(name: WorkerName) -> WorkerBody:
        return _make_worker_body(workers.drain(name, draining=True))

    @router.post("/{name}/undrain")
    async def undrain(name: WorkerName) -> WorkerBody:
        return _make_worker_body(workers.drain(name, draining=False))

    app.include_router(router)
