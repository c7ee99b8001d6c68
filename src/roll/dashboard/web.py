"""The web server: the readers as JSON, and the page's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from roll.dashboard.access import Access
from roll.dashboard.questions import Filters, facets, page, search
from roll.dashboard.runs import Run, Runs
from roll.dashboard.settings import difference
from roll.errors import RunDirectoryError

__all__ = ["make_app"]

STATIC = Path(__file__).parent / "static"


def make_app(paths: Sequence[Path], host: str, token: str | None) -> Access:
    """What answers requests about the runs at and below `paths`; see `Access` for the rest."""
    runs = Runs(paths)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, default_response_class=JSONResponse)
    app.state.runs = runs
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RunDirectoryError, _unreadable)
    app.add_exception_handler(Exception, _failed)
    _add_runs(app, runs)
    _add_rollouts(app)
    _add_page(app)
    return Access(app, host, token)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code)


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
    return JSONResponse({"error": said[:1000]}, status_code=400)


def _unreadable(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404)


def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{type(error).__name__}: {str(error)[:300]}"}, status_code=500)


def _run(run: str, request: Request) -> Run:
    try:
        return request.app.state.runs.get(run)
    except KeyError:
        raise HTTPException(404, "there is no such run: it was moved or removed, or never here.") from None


OneRun = Annotated[Run, Depends(_run)]


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def list_runs() -> Any:
        return [run.overview() for run in runs.all()]

    @app.get("/api/diff")
    def diff(request: Request, runs: str) -> Any:
        found = [_run(run, request) for run in runs.split(",") if run]
        for run in found:
            run.settings.refresh()
        return {"keys": difference([run.settings.values for run in found])}

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: OneRun) -> Any:
        with run.lock:
            run.refresh()
            return run.metrics.names() | {"problem": run.metrics.problem or None}

    @app.get("/api/runs/{run}/series")
    def series(run: OneRun, names: str, kind: str = "train", since: int | None = None) -> Any:
        with run.lock:
            run.refresh()
            if kind not in run.metrics.tables:
                raise HTTPException(400, f"kind '{kind[:80]}' is not known: use {' or '.join(run.metrics.tables)}.")
            return run.metrics.series([name for name in names.split(",") if name], kind, since)

    @app.get("/api/runs/{run}/config")
    def config(run: OneRun) -> Any:
        with run.lock:
            settings = run.settings
            settings.refresh()
            return {
                "text": settings.text,
                "values": settings.values,
                "history": settings.history,
                "problem": settings.problem or None,
            }


def _add_rollouts(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/rollouts")
    def rollouts(
        run: OneRun,
        filters: Annotated[Filters, Depends(_filters)],
        sort: str = "row",
        desc: bool = False,
        offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        q: Annotated[str, Query(max_length=1000)] = "",
        cursor: str = "",
    ) -> Any:
        with run.indexed() as (index, progress):
            if q:
                return search(run.inside, index, filters, q, cursor) | progress
            try:
                return page(index, filters, sort=sort, descending=desc, offset=offset, limit=limit) | progress
            except KeyError:
                raise HTTPException(400, f"rollouts cannot be sorted by '{sort[:80]}'.") from None

    @app.get("/api/runs/{run}/facets")
    def all_facets(run: OneRun) -> Any:
        with run.indexed() as (index, progress):
            return facets(index) | progress


def _filters(
    step_min: float | None = None,
    step_max: float | None = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
    tokens_min: float | None = None,
    tokens_max: float | None = None,
    staleness_min: float | None = None,
    staleness_max: float | None = None,
    domain: str | None = None,
    verdict: str | None = None,
    status: str | None = None,
    finish_reason: str | None = None,
    engine_id: str | None = None,
    kind: str = "",
    correct: bool | None = None,
    draw_id: int | None = None,
) -> Filters:
    lowest = {"step": step_min, "reward": reward_min, "num_tokens": tokens_min, "staleness": staleness_min}
    highest = {"step": step_max, "reward": reward_max, "num_tokens": tokens_max, "staleness": staleness_max}
    labels = {
        "domain": domain,
        "verdict": verdict,
        "status": status,
        "finish_reason": finish_reason,
        "engine_id": engine_id,
    }
    return Filters(
        lowest={name: bound for name, bound in lowest.items() if bound is not None and math.isfinite(bound)},
        highest={name: bound for name, bound in highest.items() if bound is not None and math.isfinite(bound)},
        labels={name: text for name, text in labels.items() if text is not None},
        kind=kind,
        correct=correct,
        draw_id=draw_id,
    )


def _add_page(app: FastAPI) -> None:
    @app.get("/")
    def index() -> Response:
        path = STATIC / "index.html"
        if path.is_file():
            return FileResponse(path)
        return PlainTextResponse("The page was not built into this package; /api/runs answers.", status_code=404)

    if STATIC.is_dir():
        app.mount("/static", StaticFiles(directory=STATIC))
